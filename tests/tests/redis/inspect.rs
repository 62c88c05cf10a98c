//! Operators on Redis and on a cluster: the cases of the suite, the calls that a listing makes, and slots that move.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::OnceLock,
    time::{Duration, Instant},
};

use tests::{
    Effects,
    barrier::within,
    conformance::run_all_inspect_cases,
    proxy::{ConnectionEnd, Fault, Proxy},
    servers::redis::{RedisCluster, RedisServer, UNHURRIED, shared, until_connected},
    sql,
};
use tokio::{task::JoinSet, time::sleep};
use tower_idempotency::{
    NeedsAttention,
    conformance::Subject,
    inspect::{Entry, Inspect, InspectErrorKind, Query, Resolution, State},
    store::{Acquired, KeyId, Store, Ttl},
};
use tower_idempotency_redis::{RedisOptions, RedisStore};

pub(crate) fn cluster() -> &'static RedisCluster {
    static SHARED: OnceLock<RedisCluster> = OnceLock::new();
    // No node is marked as failed on a machine that stalls: there is no replica to replace it.
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
    run_all_inspect_cases(async || {
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
    run_all_inspect_cases(async || {
        let store = on_cluster(cluster(), "operators:").await;
        Subject::new(store).with_push(false).with_inspector()
    });
}

#[test]
fn one_slot_of_cluster_passes_every_case() {
    run_all_inspect_cases(async || {
        let store = on_cluster(cluster(), "{operators}:").await;
        Subject::new(store).with_push(false).with_inspector()
    });
}

// ---- Calls ----

/// Creates a store on a separate server, with `count` entries in each state.
async fn with_entries(server: &RedisServer, count: usize) -> RedisStore {
    let options = RedisOptions::new().with_timeout(UNHURRIED);
    let url = server.url();
    let store = until_connected(|| options.clone().connect(&url)).await;
    for state in LISTED.into_iter().chain([State::Completed]) {
        for _ in 0..count {
            let mut claim = sql::claim();
            if state == State::Orphaned {
                claim.lease = Ttl::from_millis(1);
            } else {
                claim.lease = Ttl::from_secs(600);
            }
            claim.owner = "host-1:4711";
            claim.operation = "POST /orders".into();
            store.acquire(&claim).await.expect("the server runs");
            let (record, retention) = match state {
                State::NeedsAttention => {
                    let attention = NeedsAttention::new("refund-failed");
                    let record = Resolution::NeedsAttention(attention).record(&claim.id);
                    record.expect("it stores a record")
                }
                State::Completed => (b"\x01\x00\0\0\0\0".to_vec().into(), Ttl::from_secs(600)),
                _ => continue,
            };
            let lease = claim.lease_ref(1);
            let completed = store.complete(&lease, record, retention).await;
            completed.expect("the server runs");
        }
    }
    sleep(Duration::from_millis(10)).await;
    store
}

const LISTED: [State; 3] = [State::InProgress, State::Orphaned, State::NeedsAttention];

/// Lists all entries in a state, page by page.
pub(crate) async fn listed(store: &RedisStore, mut query: Query) -> Vec<Entry> {
    let mut entries = Vec::new();
    loop {
        let page = store.list(&query).await.expect("the server runs");
        entries.extend(page.entries);
        match page.next {
            Some(next) => query = query.with_page(Some(next)),
            None => return entries,
        }
    }
}

/// A renewal moves a lease to the end of the index while a listing reads the index.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn renewed_lease_is_listed_and_counted_once() {
    const LEASES: usize = 300;
    let server = RedisServer::start(&[]);
    let store = with_entries(&server, 0).await;
    let mut leases = Vec::new();
    for _ in 0..LEASES {
        let mut claim = sql::claim();
        claim.lease = Ttl::from_secs(600);
        store.acquire(&claim).await.expect("the server runs");
        leases.push(claim.lease_ref(1));
    }
    let renewals = Effects::default();
    let renewing = {
        let (store, renewals) = (store.clone(), renewals.clone());
        tokio::spawn(async move {
            for lease in leases.iter().cycle() {
                let renewed = store.renew(lease, Ttl::from_secs(600)).await;
                renewed.expect("the lease is held");
                renewals.happen();
            }
        })
    };
    let (began, mut conclusive) = (Instant::now(), 0);
    while conclusive < 30 {
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "{conclusive} listings during renewals"
        );
        assert!(!renewing.is_finished(), "the renewals continue");
        // One page, which the store reads in several calls.
        let query = Query::new(State::InProgress).with_limit(1000);
        let before = renewals.count();
        let page = store.list(&query).await.expect("the server runs");
        let during_list = renewals.count() - before;
        let ids: BTreeSet<_> = page.entries.iter().map(|entry| *entry.id()).collect();
        assert_eq!((page.entries.len(), ids.len()), (LEASES, LEASES));
        let before = renewals.count();
        let summary = store.summary(1000).await.expect("the server runs");
        let during_count = renewals.count() - before;
        let count = summary.count(State::InProgress).expect("it is listed");
        assert_eq!((count.value, count.is_exact), (LEASES as u64, true));
        // The second of two renewals began and ended during the calls.
        if during_list >= 2 && during_count >= 2 {
            conclusive += 1;
        }
    }
    renewing.abort();
}

#[tokio::test]
async fn operations_scan_no_keys() {
    let server = RedisServer::start(&[]);
    let store = with_entries(&server, 120).await;
    let monitor = server.monitor();
    // The entry of the broken lease is then an orphan.
    for (state, count) in [
        (State::Orphaned, 120),
        (State::InProgress, 120),
        (State::NeedsAttention, 120),
    ] {
        let entries = listed(&store, Query::new(state).with_limit(7)).await;
        assert_eq!(entries.len(), count, "{state}");
        let seen = entries[3].seen();
        let found = store.get(entries[3].id()).await.expect("the server runs");
        assert_eq!(found.expect("it exists").entry.seen(), seen);
        let by_id = Query::new(state)
            .with_id_prefix(entries[3].id().to_hex()[..8].parse().expect("digits"));
        assert_eq!(listed(&store, by_id).await.len(), 1);
        let resolution = match state {
            State::InProgress => Resolution::BreakLease,
            _ => Resolution::Free,
        };
        let resolved = store.resolve(seen, &resolution).await;
        assert!(resolved.expect("the server runs").is_applied());
    }
    store.summary(1_000).await.expect("the server runs");
    store.purge(10).await.expect("the server runs");
    let mut names: BTreeMap<String, usize> = BTreeMap::new();
    for command in monitor.into_commands() {
        *names.entry(command.name).or_default() += 1;
    }
    println!("{names:?}");
    for name in names.keys() {
        assert!(
            ["eval", "evalsha", "echo", "client", "hello"].contains(&name.as_str()),
            "{name}"
        );
    }
    // Pages of 7: a call for the members, and one for their entries.
    assert!(names["evalsha"] < 250, "{names:?}");
}

/// A page is a call for the members and one for their entries, for any number of entries.
#[tokio::test]
async fn page_takes_two_calls() {
    let server = RedisServer::start(&[]);
    let store = with_entries(&server, 500).await;
    for state in LISTED {
        let query = Query::new(state).with_limit(50);
        store.list(&query).await.expect("the server runs");
        let monitor = server.monitor();
        let page = store.list(&query).await.expect("the server runs");
        assert_eq!((page.entries.len(), page.next.is_some()), (50, true));
        let commands = monitor.into_commands();
        let names: Vec<_> = commands.iter().map(|it| &*it.name).collect();
        assert_eq!(names, ["evalsha", "evalsha"], "{state}");
    }
}

/// A page between members with one score is one call for them, too: with two, a member that left in between hid another one.
#[tokio::test]
async fn page_among_equal_scores_takes_two_calls() {
    let server = RedisServer::start(&[]);
    let store = with_entries(&server, 12).await;
    let entries = listed(&store, Query::new(State::InProgress)).await;
    let lease = entries[11].lease_expires.expect("a lease");
    let millis = lease.duration_since(std::time::UNIX_EPOCH).expect("later");
    let script = "local id = string.gsub(ARGV[1], '..', function(h) return string.char(tonumber(h, 16)) end) \
         return redis.call('ZADD', KEYS[1], ARGV[2], id)";
    // The second band, which is that of a day.
    let score = (2 * 17_592_186_044_416 + millis.as_millis()).to_string();
    for entry in &entries {
        let id = entry.id().to_hex();
        server.command(&["EVAL", script, "1", "idempotency:~leases", &id, &score]);
    }
    let monitor = server.monitor();
    let mut found = listed(&store, Query::new(State::InProgress).with_limit(3)).await;
    let commands = monitor.into_commands();
    assert_eq!(commands.len(), 2 * 4, "{commands:?}");
    assert!(found.is_sorted_by_key(|entry| *entry.id()));
    found.dedup();
    assert_eq!(found.len(), 12);
}

/// A listing makes one call for 256 slots, and one more for each other node that has some of them.
#[tokio::test]
async fn cluster_listing_examines_slots_together() {
    let cluster = RedisCluster::start();
    let store = on_cluster(&cluster, "together:").await;
    let claims: Vec<_> = (0..3).map(|_| sql::claim()).collect();
    for claim in &claims {
        store.acquire(claim).await.expect("the cluster runs");
    }
    // Each node has the scripts in its cache from now on.
    listed(&store, Query::new(State::InProgress)).await;
    let monitors = [0, 1, 2].map(|node| cluster.node(node).monitor());
    let found = listed(&store, Query::new(State::InProgress)).await;
    assert_eq!(found.len(), claims.len());
    let commands: Vec<_> = monitors
        .into_iter()
        .flat_map(|it| it.into_commands())
        .collect();
    let count = |name| commands.iter().filter(|it| it.name == name).count();
    assert_eq!(count("exists"), 0, "{commands:?}");
    assert!((64..90).contains(&count("evalsha")), "{commands:?}");
}

/// More of the indexes that are examined together exist than are read together. A count passes over all of them, and a page
/// ends earlier.
#[tokio::test]
async fn cluster_count_includes_leases_of_all_slots() {
    const LEASES: usize = 7_000;
    let store = on_cluster(cluster(), "all-slots:").await;
    let mut callers = JoinSet::new();
    for _ in 0..100 {
        let store = store.clone();
        callers.spawn(async move {
            let mut ids = Vec::new();
            for _ in 0..LEASES / 100 {
                let mut claim = sql::claim();
                claim.lease = Ttl::from_secs(24 * 60 * 60);
                store.acquire(&claim).await.expect("the cluster runs");
                ids.push(claim.id);
            }
            ids
        });
    }
    let expected: BTreeSet<_> = callers.join_all().await.into_iter().flatten().collect();
    let summary = store.summary(u32::MAX).await.expect("the cluster runs");
    let counted = summary.in_progress.expect("a listed state");
    assert_eq!(counted.value, LEASES as u64);
    assert!(counted.is_exact);
    // Each index is examined, and none has an orphan.
    let summary = store.summary(1).await.expect("the cluster runs");
    let counted = summary.orphaned.expect("a listed state");
    assert_eq!((counted.value, counted.is_exact), (0, true));
    let query = Query::new(State::InProgress).with_limit(1_000);
    let found = listed(&store, query).await;
    assert_eq!(found.len(), LEASES, "each lease once");
    let found: BTreeSet<_> = found.iter().map(|entry| *entry.id()).collect();
    assert_eq!(found, expected);
}

/// The index forgets entries that the server has lost, and is deleted with its last lease.
#[tokio::test]
async fn lost_entries_leave_index() {
    let server = RedisServer::start(&[]);
    let store = with_entries(&server, 3).await;
    assert_eq!(server.command(&["ZCARD", "idempotency:~leases"]), "6");
    for key in server.entries() {
        server.command(&["DEL", &key]);
    }
    for state in LISTED {
        assert_eq!(listed(&store, Query::new(state)).await, []);
    }
    assert_eq!(server.command(&["EXISTS", "idempotency:~leases"]), "0");
    assert_eq!(server.command(&["EXISTS", "idempotency:~attention"]), "0");
    let claim = sql::claim();
    store.acquire(&claim).await.expect("the server runs");
    store
        .release(&claim.lease_ref(1))
        .await
        .expect("the server runs");
    assert_eq!(server.command(&["DBSIZE"]), "0");
}

/// Returns an id that lets an acquire remove expired members: one of 16 does.
fn trimming_id() -> KeyId {
    let mut id = *sql::claim().id.as_bytes();
    id[31] = 0x40;
    KeyId::from_bytes(id)
}

/// Leases whose entries have expired leave the index with a later acquire of their band. Those with longer retentions stay.
#[tokio::test]
async fn expired_orphans_leave_index() {
    const DAY: u64 = 86_400_000;
    let server = RedisServer::start(&[]);
    let store = with_entries(&server, 0).await;
    let retentions = [DAY / 24, 2 * DAY, 64 * DAY, 100 * DAY];
    let mut score = 0.0;
    for retention in retentions {
        let mut claim = sql::claim();
        claim.orphan_retention = Ttl::from_millis(retention);
        store.acquire(&claim).await.expect("the server runs");
        let last = ["ZRANGE", "idempotency:~leases", "-1", "-1", "WITHSCORES"];
        let (last, before) = (server.command(&last), score);
        score = last
            .lines()
            .last()
            .expect("a score")
            .parse()
            .expect("a number");
        assert!(score - before > 1e13, "each retention has a band: {last}");
        // A lease whose entry exists for ten minutes more, and one whose entry expired ten minutes ago.
        for (number, ago) in [retention - 600_000, retention + 600_000]
            .into_iter()
            .enumerate()
        {
            let member = format!("{retention:0>31}{number}");
            let score = (score - ago as f64).to_string();
            server.command(&["ZADD", "idempotency:~leases", &score, &member]);
        }
    }
    assert_eq!(server.command(&["ZCARD", "idempotency:~leases"]), "12");
    for (retention, left) in retentions.into_iter().zip([12, 11, 10, 10]) {
        let mut claim = sql::claim();
        (claim.id, claim.orphan_retention) = (trimming_id(), Ttl::from_millis(retention - 1_000));
        store.acquire(&claim).await.expect("the server runs");
        assert_eq!(
            server.command(&["ZCARD", "idempotency:~leases"]),
            left.to_string()
        );
        store
            .release(&claim.lease_ref(1))
            .await
            .expect("it is held");
    }
}

/// Another program has added members with scores that no position in a listing can have.
#[tokio::test]
async fn listing_ends_despite_fractional_scores() {
    let server = RedisServer::start(&[]);
    let store = with_entries(&server, 2).await;
    server.command(&["ZADD", "idempotency:~leases", "5.5", "a", "5.5", "b"]);
    // The first call reads two members.
    let query = Query::new(State::Orphaned).with_limit(1);
    let found = within(Duration::from_secs(120), listed(&store, query)).await;
    assert_eq!(found.len(), 2, "{found:?}");
}

/// A process of the former version keeps a marker in the index, and scores without bands.
#[tokio::test]
async fn former_index_is_listed_and_kept() {
    let server = RedisServer::start(&[]);
    let store = with_entries(&server, 2).await;
    let both = listed(&store, Query::new(State::InProgress)).await;
    let former = both[0].id();
    let script = "local id = string.gsub(ARGV[1], '..', function(h) return string.char(tonumber(h, 16)) end) \
         redis.call('ZADD', KEYS[1], -86400000, '') return redis.call('ZADD', KEYS[1], ARGV[2], id)";
    let lease = both[0].lease_expires.expect("a lease");
    let lease = lease
        .duration_since(std::time::UNIX_EPOCH)
        .expect("later")
        .as_millis();
    let lease = lease.to_string();
    let set = |score: &str| {
        let id = former.to_hex();
        server.command(&["EVAL", script, "1", "idempotency:~leases", &id, score]);
    };
    set(&lease);
    assert_eq!(listed(&store, Query::new(State::InProgress)).await.len(), 2);
    // An orphan of the former version: its lease has expired.
    let orphans = listed(&store, Query::new(State::Orphaned)).await;
    let orphan = orphans[0].id().to_hex();
    server.command(&["EVAL", script, "1", "idempotency:~leases", &orphan, "2"]);
    let found = listed(&store, Query::new(State::Orphaned)).await;
    assert_eq!(found.len(), 2, "{found:?}");
    // This version does not remove members without a band: it does not know their retention.
    let mut claim = sql::claim();
    claim.id = trimming_id();
    store.acquire(&claim).await.expect("the server runs");
    assert_eq!(listed(&store, Query::new(State::Orphaned)).await.len(), 2);
}

#[tokio::test]
async fn store_without_indexes_resolves_by_id() {
    let server = RedisServer::start(&[]);
    let (options, url) = (
        RedisOptions::new()
            .with_timeout(UNHURRIED)
            .with_indexes(false),
        server.url(),
    );
    let store = until_connected(|| options.clone().connect(&url)).await;
    let claim = sql::claim();
    store.acquire(&claim).await.expect("the server runs");
    assert_eq!(server.command(&["DBSIZE"]), "1");
    for &state in State::ALL {
        let error = store.list(&Query::new(state)).await.expect_err("no index");
        assert_eq!(error.kind(), InspectErrorKind::Unsupported);
    }
    let found = store
        .get(&claim.id)
        .await
        .expect("the server runs")
        .expect("it exists");
    let broken = store
        .resolve(found.entry.seen(), &Resolution::BreakLease)
        .await;
    assert!(broken.expect("the server runs").is_applied());
    assert_eq!(server.command(&["DBSIZE"]), "1");
}

// ---- Lost replies ----

/// The reply to a deletion is lost. The outcome is unknown: a second attempt would find no entry.
async fn assert_lost_deletion_is_unknown(store: RedisStore, proxy: Proxy) {
    let new = async || {
        let mut claim = sql::claim();
        claim.lease = Ttl::from_millis(1);
        store.acquire(&claim).await.expect("the server runs");
        sleep(Duration::from_millis(10)).await;
        let found = store.get(&claim.id).await.expect("the server runs");
        found.expect("it exists").entry
    };
    // The server has the script in its cache from now on.
    let [first, second] = [new().await, new().await];
    let freed = store.resolve(first.seen(), &Resolution::Free).await;
    assert!(freed.expect("the server runs").is_applied());
    proxy.once(Fault::reply_to(b"\r\ndelete\r\n"), ConnectionEnd::Cut);
    let unknown = store.resolve(second.seen(), &Resolution::Free).await;
    let error = unknown.expect_err("the reply is lost");
    assert_eq!(error.kind(), InspectErrorKind::Backend);
    assert_eq!(proxy.injected_faults(), 1);
    let found = within(Duration::from_secs(60), async {
        loop {
            // The connection is being replaced.
            if let Ok(found) = store.get(second.id()).await {
                return found;
            }
            sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    assert_eq!(found, None);
}

#[tokio::test]
async fn deletion_with_lost_reply_is_unknown() {
    let server = RedisServer::start(&[]);
    let proxy = Proxy::start(server.address());
    let options = RedisOptions::new().with_timeout(UNHURRIED);
    let url = format!("redis://{}", proxy.address());
    let store = until_connected(|| options.clone().connect(&url)).await;
    assert_lost_deletion_is_unknown(store, proxy).await;
}

#[tokio::test]
async fn cluster_deletion_with_lost_reply_is_unknown() {
    // The proxy leads to the server as soon as that has an address.
    let proxy = Proxy::start(([127, 0, 0, 1], 1).into());
    let _server = RedisServer::start_cluster_behind(&proxy);
    let options = RedisOptions::new().with_timeout(UNHURRIED);
    let urls = [format!("redis://{}", proxy.address())];
    let store = until_connected(|| options.clone().connect_cluster(&urls)).await;
    assert_lost_deletion_is_unknown(store, proxy).await;
}

// ---- Slots that move ----

/// While a slot is moved, its entries are acquired, renewed and completed, although their indexes are on the other node.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn entries_of_moving_slot_are_served_and_listed() {
    let cluster = RedisCluster::start();
    let (slot, prefix) = (cluster.slot("{moving}"), "{moving}:");
    let store = on_cluster(&cluster, prefix).await;
    let new = || {
        let mut claim = sql::claim();
        claim.lease = Ttl::from_secs(600);
        claim
    };
    let [before, meanwhile, completed] = [new(), new(), new()];
    store.acquire(&before).await.expect("the cluster runs");
    let to = (cluster.master_of(slot).expect("an owner") + 1) % 3;
    cluster.begin_move(slot, to);
    for claim in [&meanwhile, &completed] {
        let granted = store.acquire(claim).await.expect("the cluster runs");
        assert!(matches!(granted, Acquired::Granted { generation: 1, .. }));
    }
    let (lease, ttl) = (completed.lease_ref(1), Ttl::from_secs(600));
    let record = b"\x01\x00\0\0\0\0".to_vec();
    store
        .complete(&lease, record.into(), ttl)
        .await
        .expect("the cluster runs");
    let found = store.acquire(&completed).await.expect("the cluster runs");
    assert!(matches!(found, Acquired::Completed { .. }), "{found:?}");
    cluster.move_keys(slot, to);
    cluster.end_move(slot, to);
    // Each renewal puts its lease back in the index.
    for claim in [&before, &meanwhile] {
        store
            .renew(&claim.lease_ref(1), ttl)
            .await
            .expect("the lease is held");
    }
    let mut ids: Vec<_> = listed(&store, Query::new(State::InProgress)).await;
    ids.sort_by_key(|entry| *entry.id());
    let mut expected = [before.id, meanwhile.id];
    expected.sort();
    assert_eq!(
        ids.iter().map(|entry| *entry.id()).collect::<Vec<_>>(),
        expected
    );
}
