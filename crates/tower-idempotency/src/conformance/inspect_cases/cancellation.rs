use super::{assert_state, claims, enter, every_resolution, get, resolve, seen};
use crate::{
    conformance::{Subject, cases::cancellation::drop_after},
    inspect::{Inspect, Query, State},
    store::Store,
};

/// More than the number of awaits in a call.
const POLLS: usize = 12;

/// A resolution that is dropped at any of its awaits takes effect completely or not at all.
pub async fn dropped_resolution_leaves_entry_whole<S: Store>(subject: &Subject<S>) {
    for (state, resolutions) in [(State::Orphaned, 4), (State::InProgress, 1)] {
        let claims = claims(subject, POLLS * resolutions);
        enter(subject, &claims, state).await;
        for (n, claim) in claims.iter().enumerate() {
            let applicable = every_resolution(claim).into_iter();
            let mut applicable = applicable.filter(|resolution| resolution.applies_to(state));
            let resolution = applicable.nth(n % resolutions).expect("it applies");
            let before = seen(subject, claim).await;
            let dropped = subject.inspector().resolve(&before, &resolution);
            drop_after(n / resolutions, dropped).await;
            // Applies the resolution, unless the dropped call took effect before, or takes effect now.
            let outcome = resolve(subject, &before, &resolution).await;
            let expected = match &resolution {
                crate::inspect::Resolution::Free => None,
                crate::inspect::Resolution::NeedsAttention(_) => Some(State::NeedsAttention),
                crate::inspect::Resolution::Complete { .. } => Some(State::Completed),
                _ => Some(State::Orphaned),
            };
            assert_eq!(outcome.entry().map(|entry| entry.state()), expected);
            assert_state(subject, claim, expected).await;
        }
    }
}

/// A read that is dropped at any of its awaits changes nothing, and the store stays usable.
pub async fn dropped_reads_leave_store_usable<S: Store>(subject: &Subject<S>) {
    let claims = claims(subject, 1);
    enter(subject, &claims, State::InProgress).await;
    let inspector = subject.inspector();
    let before = seen(subject, &claims[0]).await;
    for polls in 0..POLLS {
        drop_after(polls, inspector.get(&claims[0].id)).await;
        let query = Query::new(State::InProgress);
        drop_after(polls, inspector.list(&query)).await;
        drop_after(polls, inspector.summary(10)).await;
        drop_after(polls, inspector.purge(1)).await;
    }
    let after = get(subject, &claims[0]).await.expect("it exists");
    assert_eq!(*after.entry.seen(), before);
}
