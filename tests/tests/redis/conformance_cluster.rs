//! The Redis store passes the suite on a cluster.

use std::sync::OnceLock;

use tests::servers::redis::{RedisCluster, UNHURRIED, until_connected};
use tower_idempotency_redis::RedisOptions;

/// Returns the cluster that the tests of this binary share. Keys are random.
fn cluster() -> &'static RedisCluster {
    static SHARED: OnceLock<RedisCluster> = OnceLock::new();
    // A long timeout, so that no node is marked as failed on a machine that stalls. There are no replicas.
    SHARED.get_or_init(|| RedisCluster::start_with(&["--cluster-node-timeout", "20000"]))
}

tower_idempotency::conformance_tests! {
    mod redis_cluster,
    push = false,
    store = || async {
        let options = RedisOptions::new().with_timeout(UNHURRIED);
        until_connected(|| options.clone().connect_cluster(cluster().urls())).await
    },
}
