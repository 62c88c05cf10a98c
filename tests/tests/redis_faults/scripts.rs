//! Two versions of the scripts on one server at the same time: failure modes 47 and 48.

use bytes::Bytes;
use tests::servers::redis::RedisServer;
use tower_idempotency::{
    Ttl,
    store::{Acquired, Claim, Fingerprint, KeyId, LeaseRef, Store, Token},
};
use tower_idempotency_redis::{
    RedisStore,
    redis::{Client, Script, Value, aio::MultiplexedConnection},
};

use crate::node::connect;

/// Another deployment: the same scripts in another text, so under other hashes.
struct Other(MultiplexedConnection);

const COPIES: [&str; 4] = [
    include_str!("../../../crates/tower-idempotency-redis/src/scripts/acquire.lua"),
    include_str!("../../../crates/tower-idempotency-redis/src/scripts/renew.lua"),
    include_str!("../../../crates/tower-idempotency-redis/src/scripts/complete.lua"),
    include_str!("../../../crates/tower-idempotency-redis/src/scripts/release.lua"),
];
const RECORD: Bytes = Bytes::from_static(b"\0record of \xff\r\n");

impl Other {
    async fn call(&self, script: usize, claim: &Claim, arguments: &[&[u8]]) -> Value {
        let id: String = claim
            .id
            .as_bytes()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        let script = Script::new(&format!("-- As of another day.\n{}", COPIES[script]));
        let mut call = script.key(format!("idempotency:{id}"));
        for argument in arguments {
            call.arg(*argument);
        }
        call.invoke_async(&mut self.0.clone())
            .await
            .expect("an answer")
    }

    /// What it is answered first: 1 is granted, 2 in progress, 4 completed.
    async fn acquire(&self, claim: &Claim) -> i64 {
        let (token, fingerprint) = (claim.token, claim.fingerprint);
        let arguments: [&[u8]; 7] = [
            token.as_bytes(),
            fingerprint.as_bytes(),
            b"60000",
            b"60000",
            b"1",
            b"other",
            b"POST /",
        ];
        match self.call(0, claim, &arguments).await {
            Value::Array(parts) => match parts.first() {
                Some(Value::Int(first)) => *first,
                _ => panic!("{parts:?}"),
            },
            answer => panic!("{answer:?}"),
        }
    }

    async fn renew(&self, claim: &Claim) -> bool {
        self.call(1, claim, &[claim.token.as_bytes(), b"60000"])
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
        self.call(2, claim, &arguments).await == Value::Int(1)
    }

    async fn release(&self, claim: &Claim) -> bool {
        self.call(3, claim, &[claim.token.as_bytes(), b"1"]).await == Value::Int(1)
    }
}

/// Either of them.
enum Version<'a> {
    This(&'a RedisStore),
    Other(&'a Other),
}

impl Version<'_> {
    async fn acquire(&self, claim: &Claim) -> i64 {
        match self {
            Self::This(store) => match store.acquire(claim).await.expect("an answer") {
                Acquired::Granted { .. } => 1,
                Acquired::InProgress { .. } => 2,
                Acquired::Orphaned { .. } => 3,
                Acquired::Completed { record, .. } => {
                    assert_eq!(record, RECORD);
                    4
                }
            },
            Self::Other(other) => other.acquire(claim).await,
        }
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

fn lease(claim: &Claim) -> LeaseRef {
    claim.lease_ref(1)
}

// fm 48: every step of an entry's life by either version, in all combinations.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_versions_of_the_scripts_work_on_the_same_entries() {
    let server = RedisServer::start(&[]);
    let store = connect(&server.url()).await;
    let client = Client::open(server.url()).unwrap();
    let other = Other(client.get_multiplexed_async_connection().await.unwrap());
    let version = |combination: u8, step: u8| {
        if combination >> step & 1 == 0 {
            Version::This(&store)
        } else {
            Version::Other(&other)
        }
    };
    for combination in 0..64_u8 {
        let by = |step| version(combination, step);
        let id = KeyId::from_bytes([combination; 32]);
        let claim = Claim::new(id, Fingerprint::from_bytes([b'\xff'; 32])).unwrap();
        let mut rival = claim.clone();
        rival.token = Token::random().unwrap();
        assert_eq!(by(0).acquire(&claim).await, 1, "combination {combination}");
        assert_eq!(by(1).acquire(&rival).await, 2);
        assert!(by(2).renew(&claim).await);
        assert!(!by(3).renew(&rival).await);
        by(4).release(&claim).await;
        assert_eq!(by(5).acquire(&rival).await, 1, "it is free");
        assert!(!by(0).complete(&claim).await, "and then it is not");
        assert!(by(1).complete(&rival).await);
        assert!(by(2).complete(&rival).await, "once more");
        assert_eq!(by(3).acquire(&claim).await, 4);
        assert!(!by(4).renew(&rival).await);
    }
    // As long as one of them runs, its scripts may be flushed by the other.
    server.command(&["SCRIPT", "FLUSH"]);
    let claim = Claim::new(
        KeyId::from_bytes([99; 32]),
        Fingerprint::from_bytes([0; 32]),
    )
    .unwrap();
    assert_eq!(Version::Other(&other).acquire(&claim).await, 1);
    assert!(Version::This(&store).complete(&claim).await);
}
