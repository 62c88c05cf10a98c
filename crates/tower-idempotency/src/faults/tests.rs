use tokio::time::{Instant, timeout};

use super::*;
use crate::store::{Fingerprint, MemoryStore};

const SECOND: Duration = Duration::from_secs(1);
const ID: KeyId = KeyId::from_bytes([1; 32]);

fn claim() -> Claim {
    Claim::new(ID, Fingerprint::from_bytes([2; 32])).unwrap()
}

async fn is_held(store: &FaultInjector<MemoryStore>) -> bool {
    let claim = claim();
    let acquired = store.inner().acquire(&claim).await.unwrap();
    if let Acquired::Granted { generation, .. } = acquired {
        let lease = claim.lease_ref(generation);
        store.inner().release(&lease).await.unwrap();
        return false;
    }
    true
}

fn assert_injected<T: fmt::Debug>(result: Result<T, StoreError>, operation: Operation) {
    match result.unwrap_err() {
        StoreError::Backend(source) => {
            let fault = source.downcast_ref::<InjectedFault>();
            assert_eq!(fault, Some(&InjectedFault { operation }));
        }
        other => panic!("expected an injected fault, found {other}"),
    }
}

#[tokio::test]
async fn lost_call_has_no_effect_but_lost_reply_has() {
    let store = FaultInjector::new(MemoryStore::new());
    store.enqueue(Operation::Acquire, [Fault::CallLost]);
    assert_injected(store.acquire(&claim()).await, Operation::Acquire);
    assert!(!is_held(&store).await);

    store.enqueue(Operation::Acquire, [Fault::ReplyLost]);
    assert_injected(store.acquire(&claim()).await, Operation::Acquire);
    assert!(is_held(&store).await);
}

#[tokio::test(start_paused = true)]
async fn hanging_call_never_returns() {
    let store = FaultInjector::new(MemoryStore::new());
    let faults = [Fault::HangCall, Fault::HangReply];
    store.enqueue(Operation::Acquire, faults);
    for held in [false, true] {
        let hanging = timeout(SECOND, store.acquire(&claim())).await;
        assert!(hanging.is_err());
        assert_eq!(is_held(&store).await, held);
    }
    assert_eq!(store.calls(Operation::Acquire), 2);
}

#[tokio::test]
async fn queued_faults_precede_fail_all_in_order() {
    let store = FaultInjector::new(MemoryStore::new());
    store.set_fault_for_all(&Fault::CallLost);
    store.enqueue(Operation::Release, [Fault::None, Fault::ReplyLost]);
    let lease = claim().lease_ref(1);
    store.release(&lease).await.unwrap();
    assert_injected(store.release(&lease).await, Operation::Release);
    assert_injected(store.release(&lease).await, Operation::Release);
    assert_injected(store.renew(&lease, Ttl::MIN).await, Operation::Renew);
    let completed = store.complete(&lease, Bytes::new(), Ttl::MAX).await;
    assert_injected(completed, Operation::Complete);

    store.clear_faults();
    store.set_fault(Operation::Renew, Fault::CallLost);
    store.release(&lease).await.unwrap();
    assert_injected(store.renew(&lease, Ttl::MIN).await, Operation::Renew);

    store.enqueue(Operation::Release, [Fault::CallLost]);
    store.clear_faults();
    store.release(&lease).await.unwrap();
    assert!(matches!(
        store.renew(&lease, Ttl::MIN).await,
        Err(StoreError::LeaseLost)
    ));
    assert_eq!(store.calls(Operation::Release), 5);
    assert_eq!(store.calls(Operation::WaitForChange), 0);
}

#[tokio::test(start_paused = true)]
async fn slow_call_is_delayed_before_and_after() {
    let store = FaultInjector::new(MemoryStore::new()).with_plan(Plan::Slow(SECOND));
    let start = Instant::now();
    store.acquire(&claim()).await.unwrap();
    assert_eq!(start.elapsed(), 2 * SECOND);
}

#[tokio::test(start_paused = true)]
async fn lost_wait_returns_at_once() {
    let store = FaultInjector::new(MemoryStore::new());
    store.acquire(&claim()).await.unwrap();
    store.set_fault_for_all(&Fault::CallLost);
    let start = Instant::now();
    store.wait_for_change(&ID, SECOND).await;
    assert_eq!(start.elapsed(), Duration::ZERO);
    store.clear_faults();
    store.wait_for_change(&ID, SECOND).await;
    assert_eq!(start.elapsed(), SECOND);
}

#[tokio::test]
async fn plan_lets_every_call_through_eventually() {
    let plans = [
        (Plan::CallsLost, 2),
        (Plan::RepliesLost, 2),
        (Plan::Alternating(Duration::ZERO), 3),
    ];
    for (plan, attempts) in plans {
        let store = FaultInjector::new(MemoryStore::new()).with_plan(plan);
        let claims = [claim(), claim()];
        for attempt in 1..=attempts {
            for claim in &claims {
                let through = store.acquire(claim).await.is_ok();
                assert_eq!(through, attempt == attempts, "{plan:?}, {attempt}");
            }
        }
    }
}

#[tokio::test]
async fn held_call_and_reply_wait_for_their_hold() {
    for (fault, is_granted) in [
        (Fault::HoldCall as fn(Hold) -> Fault, false),
        (Fault::HoldReply, true),
    ] {
        let permits = Arc::new(tokio::sync::Semaphore::new(0));
        let hold = Hold::new({
            let permits = Arc::clone(&permits);
            move || {
                let permits = Arc::clone(&permits);
                async move { permits.acquire().await.expect("open").forget() }
            }
        });
        let store = FaultInjector::new(MemoryStore::new());
        store.enqueue(Operation::Acquire, [fault(hold)]);
        let held = tokio::spawn({
            let store = store.clone();
            async move { store.acquire(&claim()).await }
        });
        tokio::task::yield_now().await;
        assert!(!held.is_finished());
        assert_eq!(is_held(&store).await, is_granted);
        permits.add_permits(1);
        assert!(held.await.expect("no panic").is_ok());
    }
}

#[tokio::test]
async fn yielding_call_is_pending_twice() {
    let store = FaultInjector::new(MemoryStore::new()).with_script(|_, _| Fault::Yield);
    let claim = claim();
    let mut call = std::pin::pin!(store.acquire(&claim));
    let mut polls = 0;
    let acquired = future::poll_fn(|cx| {
        polls += 1;
        call.as_mut().poll(cx)
    })
    .await;
    assert!(acquired.is_ok());
    assert_eq!(polls, 3);
}

#[tokio::test]
async fn script_decides_by_operation_and_number() {
    let store = FaultInjector::new(MemoryStore::new()).with_script(|operation, nth| {
        match (operation, nth) {
            (Operation::Acquire, 2) => Fault::CallLost,
            (Operation::Renew, 1) => Fault::LeaseLost,
            (Operation::Complete, _) => Fault::RecordTooLarge(7),
            _ => Fault::None,
        }
    });
    let (claim, lease) = (claim(), claim().lease_ref(1));
    store.acquire(&claim).await.unwrap();
    assert_injected(store.acquire(&claim).await, Operation::Acquire);
    store.acquire(&claim).await.unwrap();
    let renewed = store.renew(&claim.lease_ref(1), Ttl::MAX).await;
    assert!(matches!(renewed, Err(StoreError::LeaseLost)));
    store.renew(&claim.lease_ref(1), Ttl::MAX).await.unwrap();
    let completed = store.complete(&lease, Bytes::new(), Ttl::MAX).await;
    let limit = match completed {
        Err(StoreError::RecordTooLarge { limit }) => limit,
        other => panic!("expected a limit, found {other:?}"),
    };
    assert_eq!(limit, 7);
    assert_eq!(store.all_calls(), 6);

    store.enqueue(Operation::Complete, [Fault::CallLost]);
    let completed = store.complete(&lease, Bytes::new(), Ttl::MAX).await;
    assert_injected(completed, Operation::Complete);
}

#[tokio::test]
async fn script_may_change_faults() {
    let store = FaultInjector::new(MemoryStore::new());
    let scripted = store.clone();
    store.set_script(move |_, _| {
        scripted.set_fault(Operation::Acquire, Fault::CallLost);
        Fault::None
    });
    store.acquire(&claim()).await.unwrap();
    assert_injected(store.acquire(&claim()).await, Operation::Acquire);
}

#[tokio::test]
#[should_panic(expected = "a panic was injected into Acquire")]
async fn panicking_call_panics() {
    let store = FaultInjector::new(MemoryStore::new());
    store.set_fault_for_all(&Fault::Panic);
    let _ = store.acquire(&claim()).await;
}

#[tokio::test]
async fn clones_share_calls_claims_and_records() {
    let store = FaultInjector::new(MemoryStore::new());
    let claims = [claim(), claim()];
    store.acquire(&claims[0]).await.unwrap();
    let clone = store.clone();
    let lease = claims[0].lease_ref(1);
    let record = Bytes::from_static(b"record");
    clone.complete(&lease, record, Ttl::MAX).await.unwrap();
    clone.rewrite_records(|record| record.slice(1..));
    match store.acquire(&claims[1]).await.unwrap() {
        Acquired::Completed { record, .. } => assert_eq!(record, "ecord"),
        other => panic!("expected a record, found {other:?}"),
    }
    assert_eq!(clone.calls(Operation::Acquire), 2);
    let tokens: Vec<Token> = clone.claims().iter().map(|claim| claim.token).collect();
    assert_eq!(tokens, claims.map(|claim| claim.token));
}
