use super::*;
use crate::store::Fingerprint;

/// A store whose `find_completed` returns this.
struct Remembering(fn() -> Acquired);

impl Store for Remembering {
    async fn acquire(&self, _: &Claim) -> Result<Acquired, StoreError> {
        unreachable!("not called")
    }

    async fn renew(&self, _: &LeaseRef, _: Ttl) -> Result<(), StoreError> {
        unreachable!("not called")
    }

    async fn complete(&self, _: &LeaseRef, _: Bytes, _: Ttl) -> Result<(), StoreError> {
        unreachable!("not called")
    }

    async fn release(&self, _: &LeaseRef) -> Result<(), StoreError> {
        unreachable!("not called")
    }

    async fn wait_for_change(&self, _: &KeyId, _: Duration) {
        unreachable!("not called")
    }

    fn find_completed(&self, _: &KeyId) -> Option<Acquired> {
        Some((self.0)())
    }
}

#[test]
fn found_entry_is_used_only_if_completed() {
    let find = |reply: fn() -> Acquired| {
        let id = KeyId::from_bytes([1; 32]);
        StoreClient::new(Remembering(reply)).find_completed(&id, &LayerName::default())
    };
    let completed = find(|| Acquired::Completed {
        fingerprint: Fingerprint::from_bytes([2; 32]),
        record: Bytes::from_static(b"record"),
        expires_in: Duration::from_secs(1),
        token: None,
    });
    assert!(completed.is_some());
    let granted = find(|| Acquired::Granted {
        generation: 1,
        takeover: false,
    });
    assert!(granted.is_none(), "no token was drawn for a lease");
    assert!(find(|| panic!("a faulty store")).is_none());
}
