use std::sync::Arc;

use tokio::{sync::Barrier, task::JoinSet};

use super::{
    FIRST, SECOND, apply, assert_state, claim_under, claims, completion, enter, entry_in,
    every_resolution, lists::expired_entries, purge, resolve, result_record, seen,
};
use crate::{
    conformance::{
        Subject,
        cases::races::race,
        subject::{CallOutcome, LONG},
    },
    inspect::{Inspect, Resolution, Seen, State},
    store::{Acquired, Claim, OrphanPolicy, Store},
};

const OPERATORS: usize = 32;
const ROUNDS: usize = 16;

/// Applies the resolutions in turn, in 32 concurrent calls. Returns the applied ones.
async fn resolve_at_once<S: Store>(
    subject: &Subject<S>,
    seen: Seen,
    resolutions: &[Resolution],
) -> Vec<Resolution> {
    let start = Arc::new(Barrier::new(OPERATORS));
    let mut operators = JoinSet::new();
    for n in 0..OPERATORS {
        let (subject, start) = (subject.clone(), Arc::clone(&start));
        let resolution = resolutions[n % resolutions.len()].clone();
        operators.spawn(async move {
            start.wait().await;
            let outcome = resolve(&subject, &seen, &resolution).await;
            outcome.is_applied().then_some(resolution)
        });
    }
    operators.join_all().await.into_iter().flatten().collect()
}

/// 5: of 32 concurrent equal resolutions of one entry, exactly one is applied.
pub async fn one_of_32_resolutions_is_applied<S: Store>(subject: &Subject<S>) {
    for state in super::STATES {
        for at in 0..6 {
            let claim = entry_in(subject, state).await;
            let resolution = every_resolution(&claim)[at].clone();
            if !resolution.applies_to(state) {
                continue;
            }
            let before = seen(subject, &claim).await;
            let resolutions = [resolution];
            let applied = resolve_at_once(subject, before, &resolutions).await;
            assert_eq!(applied, resolutions, "{state}");
        }
    }
}

/// 5: of 32 concurrent different resolutions of one entry, exactly one is applied, and the entry has its result.
pub async fn one_of_32_different_resolutions_is_applied<S: Store>(subject: &Subject<S>) {
    for state in [State::Orphaned, State::NeedsAttention] {
        for _ in 0..4 {
            let claim = entry_in(subject, state).await;
            let before = seen(subject, &claim).await;
            let resolutions = &every_resolution(&claim)[..4];
            let applied = resolve_at_once(subject, before, resolutions).await;
            assert_eq!(applied.len(), 1, "{applied:?}");
            let expected = match applied[0] {
                Resolution::Free => None,
                Resolution::Retry => Some(State::Orphaned),
                Resolution::NeedsAttention(_) => Some(State::NeedsAttention),
                _ => Some(State::Completed),
            };
            assert_state(subject, &claim, expected).await;
        }
    }
}

/// 5, 6: either the lease is broken, or its holder completes it: never both, and never neither.
pub async fn concurrent_break_and_complete_agree<S: Store>(subject: &Subject<S>) {
    for n in 0..ROUNDS {
        let claim = entry_in(subject, State::InProgress).await;
        let before = seen(subject, &claim).await;
        let (operator, holder, of) = (subject.clone(), subject.clone(), claim.clone());
        let both = race(
            n,
            async move { resolve(&operator, &before, &Resolution::BreakLease).await },
            async move {
                let record = result_record(&of.id, "paid");
                holder.complete(&of.lease_ref(1), &record, LONG).await
            },
        );
        let (broken, completed) = both.await;
        let (expected, state) = if broken.is_applied() {
            (CallOutcome::Lost, State::Orphaned)
        } else {
            (CallOutcome::Done, State::Completed)
        };
        assert_eq!(completed, expected);
        assert_state(subject, &claim, Some(state)).await;
    }
}

/// 5, 6: a lease is broken before or after its renewal. It is never held afterwards.
pub async fn concurrent_break_and_renew_leave_orphan<S: Store>(subject: &Subject<S>) {
    for n in 0..ROUNDS {
        let claim = entry_in(subject, State::InProgress).await;
        let before = seen(subject, &claim).await;
        let (operator, holder, of) = (subject.clone(), subject.clone(), claim.clone());
        let both = race(
            n,
            async move { resolve(&operator, &before, &Resolution::BreakLease).await },
            async move { holder.renew(&of.lease_ref(1), LONG).await },
        );
        let (broken, _) = both.await;
        assert!(broken.is_applied());
        assert_state(subject, &claim, Some(State::Orphaned)).await;
        let renewed = subject.renew(&claim.lease_ref(1), LONG).await;
        assert_eq!(renewed, CallOutcome::Lost);
    }
}

/// Resolves new orphans, each concurrently with a claim that takes it over. Returns both results of each.
async fn race_with_takeover<S: Store>(
    subject: &Subject<S>,
    resolution: impl Fn(&Claim) -> Resolution,
) -> Vec<(Claim, bool, Acquired)> {
    let orphans = claims(subject, ROUNDS);
    enter(subject, &orphans, State::Orphaned).await;
    let mut results = Vec::new();
    for (n, claim) in orphans.into_iter().enumerate() {
        let before = seen(subject, &claim).await;
        let (operator, retry) = (subject.clone(), subject.clone());
        let (resolution, next) = (resolution(&claim), subject.duplicate(&claim));
        let both = race(
            n,
            async move { resolve(&operator, &before, &resolution).await },
            async move { retry.acquire(&next).await },
        );
        let (resolved, acquired) = both.await;
        results.push((claim, resolved.is_applied(), acquired));
    }
    results
}

/// 5: either an orphan is freed and its request executes like the first, or the orphan is taken over and not freed.
pub async fn concurrent_free_and_takeover_agree<S: Store>(subject: &Subject<S>) {
    for (claim, freed, acquired) in race_with_takeover(subject, |_| Resolution::Free).await {
        assert_eq!(acquired, if freed { FIRST } else { SECOND });
        let entry = assert_state(subject, &claim, Some(State::InProgress)).await;
        let generation = if freed { 1 } else { 2 };
        assert_eq!(entry.map(|entry| entry.generation()), Some(generation));
    }
}

/// 5: either an orphan is freed, or its holder renews it. A record that its holder stores stays, whichever call comes first.
pub async fn concurrent_free_and_holder_agree<S: Store>(subject: &Subject<S>) {
    let orphans = claims(subject, 2 * ROUNDS);
    enter(subject, &orphans, State::Orphaned).await;
    for (n, claim) in orphans.into_iter().enumerate() {
        let completes = n % 4 < 2;
        let before = seen(subject, &claim).await;
        let (operator, holder, of) = (subject.clone(), subject.clone(), claim.clone());
        let both = race(
            n,
            async move { resolve(&operator, &before, &Resolution::Free).await },
            async move {
                let lease = of.lease_ref(1);
                if completes {
                    let record = result_record(&of.id, "late");
                    holder.complete(&lease, &record, LONG).await
                } else {
                    holder.renew(&lease, LONG).await
                }
            },
        );
        let (freed, late) = both.await;
        let (expected, state) = match (completes, freed.is_applied()) {
            // An absent entry accepts a late record too.
            (true, _) => (CallOutcome::Done, Some(State::Completed)),
            (false, true) => (CallOutcome::Lost, None),
            (false, false) => (CallOutcome::Done, Some(State::InProgress)),
        };
        assert_eq!(late, expected);
        assert_state(subject, &claim, state).await;
    }
}

/// 5: an orphan gets the record of the operator, or is taken over. Never both: a request that executes finds no record.
pub async fn concurrent_completion_and_takeover_agree<S: Store>(subject: &Subject<S>) {
    let resolution = |claim: &Claim| completion(claim, "resolved");
    for (claim, completed, acquired) in race_with_takeover(subject, resolution).await {
        if completed {
            assert!(
                matches!(acquired, Acquired::Completed { .. }),
                "{acquired:?}"
            );
            assert_state(subject, &claim, Some(State::Completed)).await;
        } else {
            assert_eq!(acquired, SECOND);
            assert_state(subject, &claim, Some(State::InProgress)).await;
        }
    }
}

/// 4: a purge leaves the entries that are acquired or completed while it runs, although they were expired before.
pub async fn concurrent_purge_leaves_new_entries<S: Store>(subject: &Subject<S>) {
    if !subject.inspector().abilities().can_purge() {
        return;
    }
    // Few rounds, because other cases on the same store count the entries that they purge.
    for round in 0..2 {
        let expired = expired_entries(subject, 2 * ROUNDS).await;
        let next: Vec<Claim> = expired.iter().map(|it| subject.duplicate(it)).collect();
        let (operator, requests, starting) = (subject.clone(), subject.clone(), next.clone());
        let both = race(
            round,
            async move { purge_expired(&operator).await },
            async move { start_again(&requests, starting).await },
        );
        let ((), states) = both.await;
        for (claim, state) in next.iter().zip(states) {
            assert_state(subject, claim, Some(state)).await;
        }
    }
}

/// Purges until no more expired entries are left.
async fn purge_expired<S: Store>(subject: &Subject<S>) {
    const BATCH: u32 = 8;
    while purge(subject, BATCH).await >= u64::from(BATCH) {}
}

/// Acquires or completes expired entries, in turn, in concurrent calls. Returns their states.
async fn start_again<S: Store>(subject: &Subject<S>, expired: Vec<Claim>) -> Vec<State> {
    let states = [State::InProgress, State::Completed].into_iter().cycle();
    let states: Vec<State> = states.take(expired.len()).collect();
    let mut calls = JoinSet::new();
    for (claim, state) in expired.into_iter().zip(states.clone()) {
        let subject = subject.clone();
        calls.spawn(async move {
            if state == State::InProgress {
                assert_eq!(subject.acquire(&claim).await, FIRST);
                return;
            }
            let record = result_record(&claim.id, "paid");
            let completed = subject.complete(&claim.lease_ref(1), &record, LONG).await;
            assert_eq!(completed, CallOutcome::Done);
        });
    }
    calls.join_all().await;
    states
}

/// An allowed retry is used by exactly one of 32 concurrent claims, under the policy that refuses orphans.
pub async fn one_of_32_claims_uses_allowed_retry<S: Store>(subject: &Subject<S>) {
    let orphans = claims(subject, 4);
    enter(subject, &orphans, State::Orphaned).await;
    for claim in orphans {
        apply(subject, &claim, &Resolution::Retry).await;
        let start = Arc::new(Barrier::new(OPERATORS));
        let mut racing = JoinSet::new();
        for _ in 0..OPERATORS {
            let (subject, start) = (subject.clone(), Arc::clone(&start));
            let retry = claim_under(&subject, &claim, OrphanPolicy::Refuse);
            racing.spawn(async move {
                start.wait().await;
                subject.acquire(&retry).await
            });
        }
        let found = racing.join_all().await;
        let granted: Vec<_> = found
            .iter()
            .filter(|found| matches!(found, Acquired::Granted { .. }))
            .collect();
        assert_eq!(granted, [&SECOND]);
        let others = |found: &&Acquired| matches!(found, Acquired::InProgress { .. });
        assert_eq!(found.iter().filter(others).count(), OPERATORS - 1);
    }
}
