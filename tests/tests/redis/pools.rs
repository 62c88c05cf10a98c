//! Pools whose connection timeouts are at least the store's timeout.

use deadpool_redis::{Manager, Pool, Runtime};
use tests::servers::redis::UNHURRIED;
use tower_idempotency_redis::redis::AsyncConnectionConfig;

/// Creates a pool of `size` connections to a server.
///
/// The default response timeout of a connection would be half a second.
pub(crate) fn pool_to(size: usize, url: &str) -> Pool {
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(UNHURRIED))
        .set_response_timeout(Some(UNHURRIED));
    let manager = Manager::new_with_config(url, config).expect("an address");
    let pool = Pool::builder(manager).max_size(size);
    pool.runtime(Runtime::Tokio1).build().expect("a runtime")
}
