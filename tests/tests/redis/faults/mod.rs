//! Failures of Redis in production, on real servers and through the real layer.
//!
//! Each outcome is the documented one. No request is executed without a lease, and no key has two responses. Effects
//! are counted by key.

mod cluster;
mod connect;
mod endpoints;
mod eviction;
mod flush;
mod full;
mod links;
mod network;
mod node;
mod nowhere;
mod pause;
mod pool;
mod replica;
mod restart;
mod rights;
mod scripts;
mod secrets;
mod sentinel;
mod versions;
