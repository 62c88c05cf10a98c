//! Auto traits of public types and futures, which no signature shows. The tests fail by not compiling.

use std::{future::Future, time::Duration};

use axum::body::Body as AxumBody;
use bytes::Bytes;
use http::Response;
use tower::Service;
use tower_idempotency::{
    Body, ConfigError, Error, FingerprintBy, Idempotency, IdempotencyKey, IdempotencyLayer, Lease,
    MemoryStore, NeedsAttention, Principal, RecordError, Store, TakeOverOutcome,
    conformance::FaultInjector,
    extract::NoIdempotencyKey,
    run_once::{Outcome, WorkError},
    store::{Acquired, Claim, LeaseRef, StoreError},
    transaction::{BegunCommit, LeaseExt, NotRecordable, OpenTransaction, Prepared},
};
use tower_idempotency_dynamodb::{DynamoDbError, DynamoDbOptions, DynamoDbStore};
use tower_idempotency_redis::{ConnectError, RedisOptions, RedisStore};
use tower_idempotency_sqlx::{
    Checkpoint, CommitError, Completer, CompleterTask, FencedTransaction, MySqlFence, MySqlStore,
    Orphan, PostgresFence, PostgresStore, Purger, SqlError, SqliteFence, SqliteStore,
    TransactionError,
};

fn assert_shared<T: Send + Sync + 'static>() {}
fn assert_moved<T: Send + 'static>() {}
fn assert_send<T: Send>(_: T) {}

macro_rules! assert_all {
    ($assert:ident: $($ty:ty),* $(,)?) => { $( $assert::<$ty>(); )* };
}

#[test]
fn public_types_are_shared_between_threads() {
    assert_all! { assert_shared:
        IdempotencyLayer, Idempotency<axum::Router>, Lease, MemoryStore, FaultInjector<MemoryStore>,
        Error, ConfigError, RecordError, StoreError, NoIdempotencyKey,
        FingerprintBy, Principal, IdempotencyKey, NeedsAttention,
        Acquired, Claim, LeaseRef, Outcome<u8, u8>, WorkError<u8>, TakeOverOutcome<u8, u8>,
        Prepared<u8>, BegunCommit<u8>, NotRecordable<u8>, OpenTransaction,
        RedisStore, RedisOptions, ConnectError,
        DynamoDbStore, DynamoDbOptions, DynamoDbError,
        PostgresStore, MySqlStore, SqliteStore, SqlError, TransactionError, CommitError<u8>,
        Checkpoint, Orphan, Completer<PostgresStore>, CompleterTask, Purger,
        FencedTransaction<PostgresStore>, FencedTransaction<MySqlStore>, FencedTransaction<SqliteStore>,
        PostgresFence, MySqlFence, SqliteFence,
    }
}

#[test]
fn bodies_and_futures_move_between_threads() {
    assert_moved::<Body<AxumBody>>();
    assert_moved::<<Idempotency<axum::Router> as Service<http::Request<AxumBody>>>::Future>();
}

/// Calls each public function that returns a future with an unnamed type.
#[expect(dead_code, reason = "only its types matter")]
fn assert_futures_send<S: Store>(
    store: &S,
    layer: &IdempotencyLayer,
    lease: &Lease,
    claim: &Claim,
    prepared: Prepared<u8>,
    transaction: FencedTransaction<PostgresStore>,
    commit: impl Future<Output = Result<(), StoreError>> + Send,
) {
    assert_send(store.acquire(claim));
    assert_send(store.wait_for_change(&claim.id, Duration::ZERO));
    assert_send(layer.drain(Duration::ZERO));
    assert_send(layer.run_once("key", "fingerprint", async |_| Ok::<_, WorkError<u8>>(0_u8)));
    let work = async |_| Ok::<_, u8>(Response::new(AxumBody::empty()));
    assert_send(layer.take_over(claim.clone(), work));
    assert_send(lease.lost());
    assert_send(lease.prepare(Response::new(AxumBody::empty())));
    assert_send(prepared.commit(commit));
    assert_send(transaction.commit(Response::new(http_body_util::Full::new(Bytes::new()))));
}
