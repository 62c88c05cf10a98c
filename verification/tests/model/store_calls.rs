//! Makes the calls of the model on a real store.

use bytes::Bytes;
use tower_idempotency::store::{
    Acquired, Claim, Fingerprint, KeyId, OrphanPolicy, Store, StoreError, Token, Ttl,
};

use crate::store::{Call, Caller, Orphans};

/// A caller that only reads the state: it sends another request, and never takes over.
pub(crate) const OBSERVER: Caller = Caller {
    token: 200,
    fingerprint: 200,
};
pub(crate) const QUERY: Call = Call::Acquire(Orphans::Refuse);

/// Durations in real time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Durations {
    pub(crate) lease: Ttl,
    pub(crate) orphan_retention: Ttl,
    pub(crate) retention: Ttl,
}

/// An observable reply of a store.
#[derive(Debug, PartialEq)]
pub(crate) enum StoreReply {
    Acquired(Acquired),
    Done,
    LeaseLost,
}

/// Makes a call of the model on a store, and returns the reply.
pub(crate) async fn call_store<S: Store>(
    store: &S,
    durations: Durations,
    id: KeyId,
    caller: Caller,
    call: Call,
) -> Result<StoreReply, StoreError> {
    let fingerprint = Fingerprint::from_bytes([caller.fingerprint; 32]);
    let mut claim = Claim::new(id, fingerprint)?;
    claim.token = token(caller.token);
    claim.lease = durations.lease;
    claim.orphan_retention = durations.orphan_retention;
    // A store does not check the generation that a caller passes.
    let lease = claim.lease_ref(1);
    let done = match call {
        Call::Acquire(orphans) => {
            claim.orphans = match orphans {
                Orphans::TakeOver => OrphanPolicy::TakeOver,
                Orphans::Refuse => OrphanPolicy::Refuse,
                Orphans::Never => OrphanPolicy::Never,
            };
            return store.acquire(&claim).await.map(StoreReply::Acquired);
        }
        Call::Renew => store.renew(&lease, claim.lease).await,
        Call::Complete => {
            let record = record(caller.token);
            store.complete(&lease, record, durations.retention).await
        }
        Call::Release => store.release(&lease).await,
        Call::Commit => panic!("a commit is a call of the handler, not of a store"),
    };
    match done {
        Ok(()) => Ok(StoreReply::Done),
        Err(StoreError::LeaseLost) => Ok(StoreReply::LeaseLost),
        Err(error) => Err(error),
    }
}

/// Returns the record of this caller.
pub(crate) fn record(by: u8) -> Bytes {
    Bytes::from(vec![by])
}

/// Returns the token of this caller.
pub(crate) fn token(by: u8) -> Token {
    Token::from_bytes([by; 16])
}

/// Returns a key for this number. Different numbers have different keys.
pub(crate) fn id(number: u64) -> KeyId {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&number.to_be_bytes());
    KeyId::from_bytes(bytes)
}
