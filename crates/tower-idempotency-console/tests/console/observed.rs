//! Entries of requests that were only observed.

use tower_idempotency::{
    IdempotencyLayer, MemoryStore,
    inspect::State,
    store::{Store as _, Ttl},
};

use crate::harness::{Server, acquire, claim, orphan};

#[tokio::test]
async fn observed_entry_rejects_retry_decisions() {
    let server = Server::start().await;
    let id = orphan(&server.store.store, "observed: POST /orders")
        .await
        .id;
    let entry = format!("/entries/{}", id.to_hex());
    let page = server.get(&entry).await.text;
    let next = "each executes while the service observes";
    assert!(page.contains(next), "{page}");
    assert!(page.contains("Free the key"), "{page}");
    let seen = server.seen(&id).await;
    for (how, label) in [
        ("retry", "Allow one retry"),
        ("complete", "Record a response"),
        ("needs-attention", "Keep for another operator"),
    ] {
        assert!(!page.contains(label), "{page}");
        let form = server.get(&format!("{entry}/resolve?how={how}")).await;
        assert_eq!(form.status, 400, "{}", form.text);
        let fields = [
            ("seen", &*seen),
            ("how", how),
            ("reason", "ticket 17"),
            ("status", "201"),
        ];
        let done = server.post(&format!("{entry}/resolve"), &fields).await;
        assert_eq!(done.status, 400, "{}", done.text);
        assert!(done.text.contains("only observed"), "{}", done.text);
    }
    assert_eq!(server.state(&id).await, Some(State::Orphaned));
    assert!(server.audit().is_empty());
    let list = server.get("/entries?state=orphaned").await.text;
    assert!(list.contains("observed: stops no retry"), "{list}");
}

#[tokio::test]
async fn observed_record_is_no_value_of_run_once() {
    let server = Server::start().await;
    let store = &server.store.store;
    let claim = claim("observed: POST /orders");
    acquire(store, &claim).await;
    let layer = IdempotencyLayer::new(MemoryStore::new());
    let record = layer.encode_value_record(&claim.id, &"a digest");
    let lease = claim.lease_ref(1);
    let completed = store.complete(&lease, record, Ttl::from_secs(600));
    completed.await.expect("memory");
    let page = server.get(&format!("/entries/{}", claim.id.to_hex())).await;
    for (part, is_shown) in [
        ("No retry gets them", true),
        ("each executes", true),
        ("A value of run_once", false),
        ("gets the recorded response", false),
    ] {
        assert_eq!(page.text.contains(part), is_shown, "{part}: {}", page.text);
    }
}
