//! The scripts of the Redis store, as the store sends them.

macro_rules! script {
    ($name:literal) => {
        include_str!(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../crates/tower-idempotency-redis/src/scripts/",
            $name
        ))
    };
}

/// Acquires a lease.
pub const ACQUIRE: &str = concat!(script!("index.lua"), script!("acquire.lua"));
/// Extends a lease.
pub const RENEW: &str = concat!(script!("index.lua"), script!("renew.lua"));
/// Stores a record.
pub const COMPLETE: &str = concat!(script!("completed.lua"), script!("complete.lua"));
/// Ends a lease without a record.
pub const RELEASE: &str = concat!(script!("index.lua"), script!("release.lua"));
/// Returns `1` if an entry is in progress.
pub const IS_IN_PROGRESS: &str = script!("is_in_progress.lua");
