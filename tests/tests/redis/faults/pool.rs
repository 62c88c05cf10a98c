//! A pool that is too small.

use deadpool_redis::Pool;
use tests::{
    proxy::Proxy,
    servers::redis::{RedisServer, shared},
};
use tokio::{task::JoinSet, time::Instant};
use tower_idempotency::{Ttl, store::Store};
use tower_idempotency_redis::RedisStore;

use crate::{
    events::{HANG, eventually, until_renewed},
    faults::{
        node::{EffectsByKey, Node, options, options_with_long_timeout, patient, until_connected},
        sentinel::caught_up,
    },
    pools::pool_to,
};

pub(crate) async fn connect_pool(pool: &Pool) -> RedisStore {
    until_connected(|| options().connect_pool(pool.clone())).await
}

// F-136
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exhausted_pool_does_not_block_renewals() {
    let server = RedisServer::start(&[]);
    let pool = pool_to(1, &server.url());
    let database = EffectsByKey::default();
    let node = Node::with(connect_pool(&pool).await, &database, |layer| {
        layer.with_lease_ttl(Ttl::from_secs(18))
    });
    let mut running = Vec::new();
    for i in 0..100 {
        running.push(node.spawn("/held", &format!("slow-{i}")));
    }
    for _ in &running {
        tests::barrier::within(HANG, node.barrier.arrival()).await;
    }
    let leases = node.leases();
    assert_eq!((leases.len(), database.total()), (100, 100));

    // The test holds the only connection, and acquires queue for it.
    let taken = pool.get().await.unwrap();
    // The connection for renewals must be opened again.
    server.command(&["CLIENT", "KILL", "TYPE", "normal"]);
    let mut fresh = JoinSet::new();
    for i in 0..100 {
        let node = node.clone();
        fresh.spawn(async move {
            let key = format!("fresh-{i}");
            node.assert_unavailable("/orders", &key).await;
        });
    }
    until_renewed(&server, &leases).await;
    fresh.join_all().await;
    assert_eq!(database.total(), 100, "nothing runs unprotected");
    node.barrier.open_for_good();
    let mut responses = Vec::new();
    for request in running {
        responses.push(request.await.unwrap());
    }
    // The request was completed while the pool was exhausted.
    drop(taken);
    for (i, response) in responses.iter().enumerate() {
        let key = format!("slow-{i}");
        assert_eq!(response.text(), format!("effect 1 of {key}"));
        node.assert_replays("/held", &key, response).await;
        assert_eq!(database.of(&key), 1);
    }
    for i in 0..100 {
        let key = format!("fresh-{i}");
        let response = node.until_served("/orders", &key).await;
        assert_eq!(response.text(), format!("effect 1 of {key}"));
    }
}

// F-136
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pool_of_one_serves_100_requests() {
    let database = EffectsByKey::default();
    let pool = pool_to(1, &shared().url());
    let store = until_connected(|| options_with_long_timeout().connect_pool(pool.clone())).await;
    let node = Node::with(store, &database, |layer| {
        patient(layer).with_namespace(format!("{:?}", std::process::id()))
    });
    let mut requests = Vec::new();
    for i in 0..200 {
        // Sends two requests under each key.
        requests.push((i / 2, node.spawn("/orders", &format!("k-{}", i / 2))));
    }
    for (i, request) in requests {
        let response = request.await.unwrap();
        let served = response.status.is_success() || response.code() == "in-progress";
        assert!(served, "{response:?}");
        assert_eq!(database.of(&format!("k-{i}")), 1);
    }
}

// F-130
// The connections work, so the checks of a pool do not remove them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_to_demoted_primary_leave_pool() {
    let (former, next) = (RedisServer::start(&[]), RedisServer::start(&[]));
    let proxy = Proxy::start(former.address());
    let pool = pool_to(4, &format!("redis://{}/0", proxy.address()));
    let node = Node::new(connect_pool(&pool).await);
    let before = node.post("/orders", "before").await;
    let mut all = Vec::new();
    for _ in 0..4 {
        all.push(pool.get().await.unwrap());
    }
    drop(all);
    let port = |server: &RedisServer| server.address().port().to_string();
    next.command(&["REPLICAOF", "127.0.0.1", &port(&former)]);
    eventually("it has begun", || next.entries().len() == 1).await;
    caught_up(&former, &next).await;
    next.promote();
    former.command(&["REPLICAOF", "127.0.0.1", &port(&next)]);
    proxy.set_upstream(next.address());

    node.until_served("/orders", "fresh").await;
    for i in 0..8 {
        let key = format!("later-{i}");
        node.until_served("/orders", &key).await;
        assert_eq!(node.database.of(&key), 1);
    }
    node.assert_replays("/orders", "before", &before).await;
    assert_eq!(node.database.total(), 10);
}

// F-130
// The address of the pool still leads to the former primary, so a new connection does too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_share_connection_to_demoted_primary() {
    let server = RedisServer::start(&[]);
    let proxy = Proxy::start(server.address());
    let pool = pool_to(1, &format!("redis://{}/0", proxy.address()));
    let store = connect_pool(&pool).await;
    server.command(&["REPLICAOF", "127.0.0.1", "1"]);
    let (began, before) = (Instant::now(), proxy.counts().connections);
    for _ in 0..100 {
        let refused = store.acquire(&tests::sql::claim()).await;
        assert!(refused.is_err(), "{refused:?}");
    }
    let opened = proxy.counts().connections - before;
    // One at first, and one more for each second that has begun.
    let limit = began.elapsed().as_secs() + 2;
    assert!(opened <= limit, "{opened} in {:?}", began.elapsed());
}
