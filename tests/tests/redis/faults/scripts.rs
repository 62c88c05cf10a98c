//! Two versions of the scripts on one server at the same time.
//!
//! The other version is frozen in `tests/golden/redis-v1`. A change of the scripts that is incompatible with deployed
//! versions fails here. Do not edit these files. Scripts that must work together with later ones get a new folder.

use std::time::Duration;

use bytes::Bytes;
use tests::{
    servers::redis::{RedisServer, UNHURRIED},
    versions::is_current,
};
use tower_idempotency::{
    Ttl,
    store::{Acquired, Claim, Fingerprint, KeyId, LeaseRef, Store, Token},
};
use tower_idempotency_redis::{
    RedisStore,
    redis::{AsyncConnectionConfig, Client, Script, Value, aio::MultiplexedConnection},
};

use crate::{
    events::{HANG, eventually},
    faults::node::connect_with_long_timeout,
};

/// Another deployment, with the frozen scripts. They have other hashes, even if the current scripts are equal.
struct Other(MultiplexedConnection);

const ACQUIRE: &str = include_str!("../../../golden/redis-v1/acquire.lua");
const RENEW: &str = include_str!("../../../golden/redis-v1/renew.lua");
const COMPLETE: &str = include_str!("../../../golden/redis-v1/complete.lua");
const RELEASE: &str = include_str!("../../../golden/redis-v1/release.lua");
const LOOK: &str = include_str!("../../../golden/redis-v1/look.lua");

const FINGERPRINT: Fingerprint = Fingerprint::from_bytes([b'\xff'; 32]);
const RECORD: Bytes = Bytes::from_static(b"\0record of \xff\r\n");

impl Other {
    async fn call(&self, script: &str, claim: &Claim, arguments: &[&[u8]]) -> Value {
        let id: String = claim
            .id
            .as_bytes()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        let script = Script::new(&format!("-- Another version.\n{script}"));
        let mut call = script.key(format!("idempotency:{id}"));
        for argument in arguments {
            call.arg(*argument);
        }
        call.invoke_async(&mut self.0.clone())
            .await
            .expect("an answer")
    }

    /// Returns the reply to an acquire, as this version understands it.
    async fn acquire(&self, claim: &Claim) -> Acquired {
        let (token, fingerprint) = (claim.token, claim.fingerprint);
        let [lease, keep] =
            [claim.lease, claim.orphan_retention].map(|ttl| ttl.as_millis().to_string());
        let arguments: [&[u8]; 7] = [
            token.as_bytes(),
            fingerprint.as_bytes(),
            lease.as_bytes(),
            keep.as_bytes(),
            b"1",
            b"other",
            b"POST /",
        ];
        let Value::Array(parts) = self.call(ACQUIRE, claim, &arguments).await else {
            panic!("expected a list");
        };
        match &*parts {
            [Value::Int(1), Value::Int(generation)] => Acquired::Granted {
                generation: u64::try_from(*generation).expect("1 or more"),
                takeover: *generation > 1,
            },
            [Value::Int(2), owner, Value::Int(left)] => Acquired::InProgress {
                fingerprint: owned_by(owner),
                expires_in: millis(*left),
            },
            [Value::Int(3), owner, Value::Int(since)] => Acquired::Orphaned {
                fingerprint: owned_by(owner),
                since: millis(*since),
            },
            [Value::Int(4), owner, Value::BulkString(record)] => Acquired::Completed {
                fingerprint: owned_by(owner),
                record: Bytes::copy_from_slice(record),
                expires_in: Duration::ZERO,
                token: None,
            },
            parts => panic!("{parts:?}"),
        }
    }

    async fn is_in_progress(&self, claim: &Claim) -> bool {
        self.call(LOOK, claim, &[]).await == Value::Int(1)
    }

    async fn renew(&self, claim: &Claim) -> bool {
        self.call(RENEW, claim, &[claim.token.as_bytes(), b"60000"])
            .await
            == Value::Int(1)
    }

    async fn complete(&self, claim: &Claim) -> bool {
        let (token, fingerprint) = (claim.token, claim.fingerprint);
        let arguments: [&[u8]; 6] = [
            token.as_bytes(),
            fingerprint.as_bytes(),
            b"1",
            &RECORD,
            b"60000",
            b"1",
        ];
        self.call(COMPLETE, claim, &arguments).await == Value::Int(1)
    }

    async fn release(&self, claim: &Claim) -> bool {
        self.call(RELEASE, claim, &[claim.token.as_bytes(), b"1"])
            .await
            == Value::Int(1)
    }
}

/// A deployment with one of the two versions.
enum Version<'a> {
    This(&'a RedisStore),
    Other(&'a Other),
}

impl<'a> Version<'a> {
    /// Returns the version that makes this step.
    fn of(store: &'a RedisStore, other: &'a Other, combination: u8, step: u8) -> Self {
        if is_current(combination, step) {
            Self::This(store)
        } else {
            Self::Other(other)
        }
    }

    /// Returns the reply to an acquire: 1 is a grant of a free key, 2 in progress, 4 this record. A takeover has 10 times
    /// its generation.
    async fn acquire(&self, claim: &Claim) -> u64 {
        let acquired = match self {
            Self::This(store) => store.acquire(claim).await.expect("an answer"),
            Self::Other(other) => other.acquire(claim).await,
        };
        let (response, owner) = match acquired {
            Acquired::Granted { generation: 1, .. } => return 1,
            Acquired::Granted { generation, .. } => return 10 * generation,
            Acquired::InProgress { fingerprint, .. } => (2, fingerprint),
            Acquired::Orphaned { fingerprint, .. } => (3, fingerprint),
            Acquired::Completed {
                fingerprint,
                record,
                ..
            } => {
                assert_eq!(record, RECORD);
                (4, fingerprint)
            }
        };
        assert_eq!(owner, FINGERPRINT);
        response
    }

    async fn renew(&self, claim: &Claim) -> bool {
        match self {
            Self::This(store) => store.renew(&lease(claim), Ttl::from_secs(60)).await.is_ok(),
            Self::Other(other) => other.renew(claim).await,
        }
    }

    async fn complete(&self, claim: &Claim) -> bool {
        match self {
            Self::This(store) => {
                let lease = lease(claim);
                let completed = store.complete(&lease, RECORD, Ttl::from_secs(60));
                completed.await.is_ok()
            }
            Self::Other(other) => other.complete(claim).await,
        }
    }

    async fn release(&self, claim: &Claim) {
        match self {
            Self::This(store) => store.release(&lease(claim)).await.expect("an answer"),
            Self::Other(other) => assert!(other.release(claim).await),
        }
    }
}

fn millis(value: i64) -> Duration {
    Duration::from_millis(value.try_into().expect("an expiry in the future"))
}

fn owned_by(value: &Value) -> Fingerprint {
    let Value::BulkString(bytes) = value else {
        panic!("expected a fingerprint, found {value:?}");
    };
    Fingerprint::from_bytes(bytes.as_slice().try_into().expect("32 bytes"))
}

fn lease(claim: &Claim) -> LeaseRef {
    claim.lease_ref(1)
}

async fn both(server: &RedisServer) -> (RedisStore, Other) {
    let client = Client::open(server.url()).expect("an URL");
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(UNHURRIED))
        .set_response_timeout(Some(UNHURRIED));
    let other = client.get_multiplexed_async_connection_with_config(&config);
    let other = other.await;
    (
        connect_with_long_timeout(&server.url()).await,
        Other(other.expect("the server runs")),
    )
}

// F-139
// Each step of an entry's life is made by one of the versions. Any three steps are made in all combinations.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_script_versions_share_entries() {
    let server = RedisServer::start(&[]);
    let (store, other) = both(&server).await;
    for combination in 0..32_u8 {
        let by = |step| Version::of(&store, &other, combination, step);
        let id = KeyId::from_bytes([combination; 32]);
        let claim = Claim::new(id, FINGERPRINT).unwrap();
        let mut rival = claim.clone();
        rival.token = Token::random().unwrap();
        assert_eq!(by(0).acquire(&claim).await, 1, "combination {combination}");
        assert_eq!(by(1).acquire(&rival).await, 2);
        assert!(other.is_in_progress(&claim).await);
        assert!(by(2).renew(&claim).await);
        assert!(!by(3).renew(&rival).await);
        by(4).release(&claim).await;
        assert_eq!(by(5).acquire(&rival).await, 1, "the key is free");
        assert!(!by(6).complete(&claim).await, "the key is leased");
        assert!(by(7).complete(&rival).await);
        assert!(by(8).complete(&rival).await, "once more");
        assert_eq!(by(9).acquire(&claim).await, 4);
        assert!(!by(10).renew(&rival).await);
        assert!(!other.is_in_progress(&claim).await);
    }
    // One version may flush the scripts while the other one runs.
    server.command(&["SCRIPT", "FLUSH"]);
    let claim = Claim::new(
        KeyId::from_bytes([99; 32]),
        Fingerprint::from_bytes([0; 32]),
    )
    .unwrap();
    assert_eq!(Version::Other(&other).acquire(&claim).await, 1);
    assert!(Version::This(&store).complete(&claim).await);
}

// F-139
// Like the test before, with an expired lease and with a released takeover.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_script_versions_take_over() {
    let server = RedisServer::start(&[]);
    let (store, other) = both(&server).await;
    for combination in 0..16_u8 {
        let by = |step| Version::of(&store, &other, combination, step);
        let id = KeyId::from_bytes([combination; 32]);
        let mut claim = Claim::new(id, FINGERPRINT).unwrap();
        let mut rival = claim.clone();
        (claim.lease, rival.token) = (Ttl::from_millis(1), Token::random().unwrap());
        assert_eq!(by(0).acquire(&claim).await, 1, "combination {combination}");
        tokio::time::sleep(Duration::from_millis(3)).await;
        assert!(!other.is_in_progress(&claim).await);
        assert_eq!(by(1).acquire(&rival).await, 20);
        assert!(!by(2).renew(&claim).await);
        by(3).release(&rival).await;
        assert_eq!(by(4).acquire(&claim).await, 30, "still an orphan");
        assert!(!by(5).complete(&rival).await);
        assert!(by(6).complete(&claim).await);
        assert_eq!(by(7).acquire(&rival).await, 4);
    }
}

// F-139
// Each version notifies waiters of the other one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_script_version_notifies_waiters() {
    let server = RedisServer::start(&[]);
    let (store, other) = both(&server).await;
    let claim = Claim::new(KeyId::from_bytes([7; 32]), FINGERPRINT).unwrap();
    assert_eq!(Version::Other(&other).acquire(&claim).await, 1);
    let key = format!("idempotency:{}", "07".repeat(32));
    let before = server.commandstats().get("evalsha").copied();
    let before = before.unwrap_or(0);
    let waiter = tokio::spawn({
        let (store, id) = (store.clone(), claim.id);
        async move { store.wait_for_change(&id, HANG * 10).await }
    });
    let calls = || server.commandstats().get("evalsha").copied().unwrap_or(0);
    // The waiter listens before it queries.
    eventually("the waiter has queried", || calls() > before).await;
    let listening = server.command(&["PUBSUB", "NUMSUB", &key]);
    assert_eq!(listening, format!("{key}\n1"));
    assert!(!waiter.is_finished());
    assert!(other.complete(&claim).await);
    let heard = tokio::time::timeout(HANG, waiter).await;
    heard.expect("a notification").unwrap();

    // The other version's listener receives notifications in the same form.
    let mut connection = Client::open(server.url())
        .unwrap()
        .get_connection()
        .unwrap();
    let mut listening = connection.as_pubsub();
    listening.set_read_timeout(Some(HANG)).unwrap();
    listening.subscribe(&key).unwrap();
    server.command(&["DEL", &key]);
    assert_eq!(Version::This(&store).acquire(&claim).await, 1);
    assert!(Version::This(&store).complete(&claim).await);
    assert_eq!(
        listening
            .get_message()
            .expect("a notification")
            .get_channel_name(),
        key
    );
}
