//! The primitives the store is built on: the standard ones, or under `cfg(shuttle)` those of the model checker.

#[cfg(not(shuttle))]
pub(super) use std::sync::{Mutex, MutexGuard, atomic::AtomicUsize};

#[cfg(shuttle)]
pub(super) use shuttle::sync::{Mutex, MutexGuard, atomic::AtomicUsize};

/// Hashes ids under a seed drawn for each store, so that nobody can aim ids at one shard.
#[cfg(not(shuttle))]
pub(super) type HashBuilder = hashbrown::DefaultHashBuilder;

/// Without a seed: the same schedule must meet the same shards.
#[cfg(shuttle)]
pub(super) type HashBuilder = std::hash::BuildHasherDefault<std::hash::DefaultHasher>;
