//! Lost leases and rejected records while the layer stores the record.

use std::{
    sync::{Arc, Mutex, OnceLock},
    time::Duration,
};

use metrics::{Counter, CounterFn};
use metrics_util::debugging::DebuggingRecorder;
use tests::{
    barrier::within,
    observed::{Counters, read, total},
    sql::claim,
};
use tokio::time::sleep;
use tower_idempotency::{
    IdempotencyLayer,
    conformance::{Fault, Operation},
    store::{Acquired, Store},
    transaction::LeaseExt,
};

use super::{LEASE, LONG, Node, joined, taken_over};
use crate::transactions::leases_lost;

// S-801, F-801
/// The store does not reply to the completion, and only a renewal reports that another process holds the lease.
#[tokio::test(start_paused = true)]
async fn loss_during_completion_is_unknown() {
    let recorder = DebuggingRecorder::new();
    let _recorded = metrics::set_default_local_recorder(&recorder);
    within(LONG, async {
        let (node, first, _, other, second, taken) = taken_over().await;
        node.fail(&[Operation::Complete], Fault::HangCall);
        node.barrier.open_for_good();
        let first = joined(first).await;
        assert_eq!(first.code(), "outcome-unknown", "{first:?}");
        assert!(first.is_retryable() && taken.is_held());
        assert_eq!(leases_lost(&recorder), 1.0);
        node.recover();
        other.barrier.open_for_good();
        assert_eq!(joined(second).await.text(), "execution 2");
        for node in [&node, &other] {
            let retry = node.response().await;
            assert_eq!((retry.text(), retry.is_replay()), ("execution 2", true));
        }
        assert_eq!(node.effects.count(), 2);
    })
    .await;
}

// S-801, F-801
/// Like the test before, but the other process has responded first.
#[tokio::test(start_paused = true)]
async fn record_of_rival_is_returned() {
    let recorder = DebuggingRecorder::new();
    let _recorded = metrics::set_default_local_recorder(&recorder);
    within(LONG, async {
        let (node, first, _, other, second, _) = taken_over().await;
        other.barrier.open_for_good();
        assert_eq!(joined(second).await.text(), "execution 2");
        node.fail(&[Operation::Complete], Fault::HangCall);
        node.barrier.open_for_good();
        let first = joined(first).await;
        assert_eq!((first.text(), first.is_replay()), ("execution 2", true));
        let calls = node.store.calls(Operation::Complete);
        sleep(LEASE * 2).await;
        assert_eq!(node.store.calls(Operation::Complete), calls);
        assert_eq!((node.effects.count(), node.layer.in_flight()), (2, 0));
        assert_eq!(leases_lost(&recorder), 1.0);
    })
    .await;
}

// S-801, F-801
/// The store replies neither to the completion nor to the query. The completion in the background finds the lease lost.
#[tokio::test(start_paused = true)]
async fn loss_is_reported_after_failed_query() {
    let recorder = DebuggingRecorder::new();
    let _recorded = metrics::set_default_local_recorder(&recorder);
    within(LONG, async {
        let (node, first, _, other, second, taken) = taken_over().await;
        node.fail(&[Operation::Complete, Operation::Acquire], Fault::HangCall);
        node.barrier.open_for_good();
        let first = joined(first).await;
        assert_eq!(first.code(), "outcome-unknown", "{first:?}");
        assert_eq!(leases_lost(&recorder), 0.0);
        node.recover();
        sleep(Duration::from_secs(5)).await;
        let counted = read(&recorder);
        assert_eq!(total(&counted, "idempotency_lease_lost_total"), 1.0);
        assert_eq!(total(&counted, "idempotency_unrecorded_total"), 0.0);
        assert!(taken.is_held());
        other.barrier.open_for_good();
        assert_eq!(joined(second).await.text(), "execution 2");
        assert_eq!(node.response().await.text(), "execution 2");
        sleep(LEASE * 2).await;
        assert_eq!((node.effects.count(), node.layer.in_flight()), (2, 0));
    })
    .await;
}

// S-806
/// The other process has left an orphan, or the entry was deleted. The record of this execution is then the only one.
#[tokio::test(start_paused = true)]
async fn record_is_stored_after_loss_during_completion() {
    for is_deleted in [false, true] {
        let recorder = DebuggingRecorder::new();
        let _recorded = metrics::set_default_local_recorder(&recorder);
        within(LONG, async {
            let (node, first) = if is_deleted {
                let node = Node::new();
                let (first, lease) = node.start().await;
                sleep(LEASE / 3 - Duration::from_secs(1)).await;
                let deleted = node.store.inner().release(&lease.lease_ref()).await;
                deleted.expect("memory");
                (node, first)
            } else {
                let (node, first, _, other, second, _) = taken_over().await;
                other.finish_without_record(second).await;
                (node, first)
            };
            node.fail(&[Operation::Complete], Fault::HangCall);
            node.barrier.open_for_good();
            let first = joined(first).await;
            assert_eq!(first.code(), "outcome-unknown", "{is_deleted} {first:?}");
            assert_eq!(leases_lost(&recorder), 1.0, "{is_deleted}");
            node.recover();
            sleep(Duration::from_secs(5)).await;
            let retry = node.another().response().await;
            assert_eq!((retry.text(), retry.is_replay()), ("execution 1", true));
            assert_eq!(node.layer.in_flight(), 0);
        })
        .await;
    }
}

// S-802, F-801
/// The completion takes effect and gets no reply, so the renewal finds a completed entry.
#[tokio::test(start_paused = true)]
async fn stored_record_without_reply_is_returned() {
    let recorder = DebuggingRecorder::new();
    let _recorded = metrics::set_default_local_recorder(&recorder);
    within(LONG, async {
        let node = Node::new();
        let (first, _) = node.start().await;
        sleep(LEASE / 3 - Duration::from_secs(1)).await;
        node.fail(&[Operation::Complete], Fault::HangReply);
        node.barrier.open_for_good();
        let first = joined(first).await;
        assert_eq!((first.text(), first.is_replay()), ("execution 1", false));
        assert_eq!(node.store.calls(Operation::Renew), 1, "one was due");
        let retry = node.another().response().await;
        assert_eq!((retry.text(), retry.is_replay()), ("execution 1", true));
        // Completions keep failing for longer than the lease.
        let calls = node.store.calls(Operation::Complete);
        sleep(Duration::from_secs(20)).await;
        assert_eq!(node.store.calls(Operation::Complete), calls);
        let counted = read(&recorder);
        assert_eq!(total(&counted, "idempotency_record_bytes"), 1.0);
        assert_eq!(total(&counted, "idempotency_lease_lost_total"), 0.0);
        assert_eq!(total(&counted, "idempotency_unrecorded_total"), 0.0);
        assert_eq!((node.effects.count(), node.layer.in_flight()), (1, 0));
    })
    .await;
}

// S-802, F-801
/// The completion stores the whole record without a reply. The store then rejects the size, so the layer sends a tombstone.
#[tokio::test(start_paused = true)]
async fn whole_record_without_reply_is_own() {
    within(LONG, async {
        let node = Node::new();
        let (first, _) = node.start().await;
        sleep(LEASE / 3 - Duration::from_secs(1)).await;
        node.store.set_script(|op, nth| match (op, nth) {
            (Operation::Complete, 2) => Fault::RecordTooLarge(1),
            (Operation::Complete, _) => Fault::HangReply,
            _ => Fault::None,
        });
        node.barrier.open_for_good();
        let first = joined(first).await;
        assert_eq!((first.text(), first.is_replay()), ("execution 1", false));
        let calls = node.store.calls(Operation::Complete);
        assert!(calls > 2, "the tombstone was sent: {calls}");
        let retry = node.another().response().await;
        assert_eq!((retry.text(), retry.is_replay()), ("execution 1", true));
        sleep(LEASE * 2).await;
        assert_eq!(node.store.calls(Operation::Complete), calls);
        assert_eq!((node.effects.count(), node.layer.in_flight()), (1, 0));
    })
    .await;
}

/// Reads the number of executions in flight each time a response is counted as unrecorded.
#[derive(Default)]
struct InFlightAtCount {
    layer: OnceLock<IdempotencyLayer>,
    in_flight: Mutex<Vec<usize>>,
}

impl CounterFn for InFlightAtCount {
    fn increment(&self, value: u64) {
        // A registration adds 0.
        if value == 0 {
            return;
        }
        let layer = self.layer.get().expect("a layer");
        let mut in_flight = self.in_flight.lock().expect("no poison");
        in_flight.push(layer.in_flight());
    }

    fn absolute(&self, _value: u64) {}
}

/// Another execution holds the key, so the store refuses the completion in the background. A drain ends the process only after
/// the response is counted.
#[tokio::test(start_paused = true)]
async fn unrecorded_response_is_counted_before_drain() {
    let unrecorded = Arc::<InFlightAtCount>::default();
    let counter = Counter::from_arc(Arc::clone(&unrecorded));
    let recorder = Counters([("idempotency_unrecorded_total", counter)]);
    let _recorded = metrics::set_default_local_recorder(&recorder);
    within(LONG, async {
        let node = Node::new();
        assert!(unrecorded.layer.set(node.layer.clone()).is_ok());
        let (first, lease) = node.start().await;
        node.fail(&[Operation::Complete], Fault::HangCall);
        node.barrier.open_for_good();
        assert_eq!(joined(first).await.text(), "execution 1");
        let deleted = node.store.inner().release(&lease.lease_ref()).await;
        deleted.expect("memory");
        let mut rival = claim();
        rival.id = lease.key_id();
        let taken = node.store.inner().acquire(&rival).await;
        assert!(matches!(taken, Ok(Acquired::Granted { .. })), "{taken:?}");
        node.recover();
        assert!(node.layer.drain(LEASE).await);
        assert_eq!(*unrecorded.in_flight.lock().expect("no poison"), [1]);
    })
    .await;
}

// S-270, F-105
/// An attempt of the acquire may be late, and the store rejects each record for its size. The lease is still held.
#[tokio::test(start_paused = true)]
async fn rejected_record_releases_no_lease() {
    within(LONG, async {
        let node = Node::new();
        node.barrier.open_for_good();
        node.store.set_script(|op, nth| match (op, nth) {
            (Operation::Acquire, 1) => Fault::HangCall,
            (Operation::Complete, 1..=3) => Fault::CallLost,
            (Operation::Complete, _) => Fault::RecordTooLarge(1),
            _ => Fault::None,
        });
        assert_eq!(node.response().await.text(), "execution 1");
        sleep(Duration::from_secs(3)).await;
        assert_eq!(node.store.calls(Operation::Complete), 5);
        assert_eq!(node.store.calls(Operation::Release), 0);
        assert_eq!(node.layer.in_flight(), 0);
        assert_eq!(node.another().response().await.code(), "in-progress");
        assert_eq!(node.effects.count(), 1);
    })
    .await;
}
