//! Synchronization primitives of the store: the standard ones, or those of the model checker in tests under
//! `cfg(shuttle)`.
//!
//! The replacement applies to tests only. Other crates set this cfg for their own tests and need a store that works
//! there.

#[cfg(not(all(test, shuttle)))]
pub(super) use std::sync::{Mutex, MutexGuard, atomic::AtomicUsize};

#[cfg(all(test, shuttle))]
pub(super) use shuttle::sync::{Mutex, MutexGuard, atomic::AtomicUsize};

/// Hasher with a random seed for each store, so that no client can direct ids to one shard.
#[cfg(not(all(test, shuttle)))]
pub(super) type HashBuilder = hashbrown::DefaultHashBuilder;

/// Hasher without a seed: the same schedule must use the same shards.
#[cfg(all(test, shuttle))]
pub(super) type HashBuilder = std::hash::BuildHasherDefault<std::hash::DefaultHasher>;
