//! The Redis store passes the suite on a cluster.

use std::sync::OnceLock;

use tests::servers::redis::RedisCluster;
use tower_idempotency_redis::RedisOptions;

/// The tests of this binary share it: keys are random.
fn cluster() -> &'static RedisCluster {
    static SHARED: OnceLock<RedisCluster> = OnceLock::new();
    SHARED.get_or_init(RedisCluster::start)
}

tower_idempotency::conformance_tests! {
    mod redis_cluster,
    push = false,
    store = || async {
        let connected = RedisOptions::new().connect_cluster(cluster().urls()).await;
        connected.expect("the cluster runs")
    },
}
