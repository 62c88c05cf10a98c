//! Fleets: several processes on one store, killed and paused at any moment.

mod clients;
mod dynamodb;
mod exactly_once;
mod memory;
mod redis;
mod sql;
