//! The primitives the store is built on: the standard ones, or in tests under `cfg(shuttle)` those of the model checker.
//!
//! In tests only: others set this cfg for tests of their own, and need a store that works there.

#[cfg(not(all(test, shuttle)))]
pub(super) use std::sync::{Mutex, MutexGuard, atomic::AtomicUsize};

#[cfg(all(test, shuttle))]
pub(super) use shuttle::sync::{Mutex, MutexGuard, atomic::AtomicUsize};

/// Hashes ids under a seed drawn for each store, so that nobody can aim ids at one shard.
#[cfg(not(all(test, shuttle)))]
pub(super) type HashBuilder = hashbrown::DefaultHashBuilder;

/// Without a seed: the same schedule must meet the same shards.
#[cfg(all(test, shuttle))]
pub(super) type HashBuilder = std::hash::BuildHasherDefault<std::hash::DefaultHasher>;
