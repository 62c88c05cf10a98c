//! The Redis store on servers of its own.

mod conformance;
mod conformance_cluster;
mod conformance_links;
mod costs;
mod faults;
mod fleet;
mod waiting;
