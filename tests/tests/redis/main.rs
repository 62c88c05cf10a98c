//! The Redis store on real servers.

mod checks;
mod completed;
mod conformance;
mod conformance_cluster;
mod conformance_links;
mod costs;
mod events;
mod faults;
mod inspect;
mod pools;
mod pushes;
mod tiered;
mod waiting;
