//! Operators on Redis and on a cluster: the cases of the suite, the calls that a listing makes, and slots that move.

use std::sync::OnceLock;

use tests::{
    conformance::every_inspect_case_at_once,
    servers::redis::{RedisCluster, UNHURRIED, shared, until_connected},
};
use tower_idempotency::conformance::Subject;
use tower_idempotency_redis::{RedisOptions, RedisStore};

fn cluster() -> &'static RedisCluster {
    static SHARED: OnceLock<RedisCluster> = OnceLock::new();
    // No node is marked as failed on a machine that stalls: there is no replica to take its place.
    SHARED.get_or_init(|| RedisCluster::start_with(&["--cluster-node-timeout", "20000"]))
}

async fn on_cluster(cluster: &RedisCluster, prefix: &str) -> RedisStore {
    let options = RedisOptions::new()
        .with_timeout(UNHURRIED)
        .with_prefix(prefix);
    until_connected(|| options.clone().connect_cluster(cluster.urls())).await
}

#[test]
fn redis_passes_every_case() {
    every_inspect_case_at_once(async || {
        let options = RedisOptions::new()
            .with_timeout(UNHURRIED)
            .with_prefix("operators:");
        let url = shared().url();
        let store = until_connected(|| options.clone().connect(&url)).await;
        Subject::new(store).with_inspector()
    });
}

#[test]
fn cluster_passes_every_case() {
    every_inspect_case_at_once(async || {
        let store = on_cluster(cluster(), "operators:").await;
        Subject::new(store).with_push(false).with_inspector()
    });
}

#[test]
fn one_slot_of_cluster_passes_every_case() {
    every_inspect_case_at_once(async || {
        let store = on_cluster(cluster(), "{operators}:").await;
        Subject::new(store).with_push(false).with_inspector()
    });
}
