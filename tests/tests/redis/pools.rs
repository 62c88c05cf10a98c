//! Pools whose connection timeouts are at least the store's timeout.

use deadpool_redis::{Manager, Pool, Runtime};
use tests::servers::redis::UNHURRIED;
use tower_idempotency_redis::redis::AsyncConnectionConfig;

/// Makes a pool of `size` connections to a server.
///
/// Unless it is set, each answer has to come within half a second on a connection of a pool.
pub(crate) fn pool_to(size: usize, url: &str) -> Pool {
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(UNHURRIED))
        .set_response_timeout(Some(UNHURRIED));
    let manager = Manager::new_with_config(url, config).expect("an address");
    let pool = Pool::builder(manager).max_size(size);
    pool.runtime(Runtime::Tokio1).build().expect("a runtime")
}
