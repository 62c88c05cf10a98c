//! Duplicates that wait for the first request's answer: bounded, and one of them at a time asks the store.

use std::{
    collections::HashMap,
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use tokio::{
    sync::{Notify, OwnedMutexGuard},
    time::{Instant, sleep, timeout, timeout_at},
};

use crate::{
    config::Config,
    execution::rules::ConcurrentRequests,
    execution::shared::{Engine, Failure, from_now},
    future::{Detach, catch_panic},
    store::{Acquired, Claim, Fingerprint, KeyId},
    telemetry,
};

/// Waits until the first request has an answer, this one may take over, or the time is up: then it is still in progress.
pub(crate) async fn wait(
    config: &Config,
    engine: &Engine,
    claim: &Claim,
    detach: &Detach,
    mut acquired: Acquired,
    mut sent: Instant,
) -> Result<(Acquired, Instant), Failure> {
    let ConcurrentRequests::Wait(max) = config.execution.concurrent_requests else {
        return Ok((acquired, sent));
    };
    let deadline = from_now(max);
    if detach.caller_left() {
        return Ok((acquired, sent));
    }
    let Some(waiting) = engine.waiters.join(
        claim.id,
        config.execution.waiters_per_key,
        config.execution.waiters,
    ) else {
        return Ok((acquired, sent));
    };
    telemetry::waiting(&claim.id);
    // A waiter has nothing to lose: when its client leaves, its place is free.
    detach.disarm();
    let woken = timeout_at(deadline, waiting.woken()).await;
    detach.arm();
    let turn = match woken {
        Ok(Woken::Turn(turn)) => turn,
        Ok(Woken::Found(Found {
            fingerprint,
            record,
        })) => {
            return Ok((
                Acquired::Completed {
                    fingerprint,
                    record,
                },
                sent,
            ));
        }
        Err(_elapsed) => return Ok((acquired, sent)),
    };
    let mut pause = MIN_PAUSE;
    let mut deaf = Duration::ZERO;
    while let Acquired::InProgress {
        fingerprint,
        expires_in,
    } = &acquired
    {
        if *fingerprint != claim.fingerprint || Instant::now() >= deadline || detach.caller_left() {
            break;
        }
        detach.disarm();
        // A push that led to nothing makes us deaf for a while: a store that pushes without end is not hammered.
        if !deaf.is_zero() {
            timeout_at(deadline, sleep(deaf)).await.ok();
        }
        // The store's push is a hint: we look again however it ends, and no later than the lease may be over.
        let listening = Instant::now();
        let within = pause
            .min(deadline.saturating_duration_since(listening))
            .min(*expires_in)
            .max(Duration::from_millis(1));
        // A store that panics, as it is called or later, has pushed, and not ended a wait that others hope for.
        let changed = pin!(async { engine.store.wait_for_change(&claim.id, within).await });
        timeout(within, catch_panic(changed)).await.ok();
        deaf = if listening.elapsed() < within {
            (deaf * 2).clamp(MIN_PAUSE, MAX_PAUSE)
        } else {
            Duration::ZERO
        };
        // Asking may take the lease: whoever drops us meanwhile leaves it in good hands.
        detach.arm();
        (acquired, sent) = engine
            .acquire(claim, config.execution.store_timeout)
            .await?;
        pause = (pause * 8 / 5).min(MAX_PAUSE);
    }
    if let Acquired::Completed {
        fingerprint,
        record,
    } = &acquired
    {
        waiting.deliver(Found {
            fingerprint: *fingerprint,
            record: record.clone(),
        });
    }
    drop(turn);
    Ok((acquired, sent))
}

/// Who waits, by key.
#[derive(Default)]
pub(crate) struct Waiters {
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    groups: HashMap<KeyId, Arc<Group>>,
    total: usize,
}

/// The waiters of one key. Whoever has the turn watches the store; the others wait for what it finds.
struct Group {
    // Changed under the lock of `State` only.
    waiting: AtomicUsize,
    turn: Arc<tokio::sync::Mutex<()>>,
    found: OnceLock<Found>,
    // Wakes in the order in which they came.
    news: Notify,
}

/// The record that ended the wait.
#[derive(Clone)]
struct Found {
    fingerprint: Fingerprint,
    record: Bytes,
}

/// One waiter's place; given up when dropped.
struct Waiting {
    state: Arc<Mutex<State>>,
    id: KeyId,
    group: Arc<Group>,
}

/// What a waiter waits for.
enum Woken {
    /// It is this waiter's turn to watch the store.
    Turn(OwnedMutexGuard<()>),
    /// Another waiter found the record.
    Found(Found),
}

impl Waiters {
    /// A place among the waiters for `id`, or `None` when `per_key` or `total` of them wait already.
    fn join(&self, id: KeyId, per_key: usize, total: usize) -> Option<Waiting> {
        let mut state = lock(&self.state);
        let waiting = state
            .groups
            .get(&id)
            .map_or(0, |group| group.waiting.load(Relaxed));
        if state.total >= total || waiting >= per_key {
            return None;
        }
        state.total += 1;
        let group = state.groups.entry(id).or_insert_with(|| {
            Arc::new(Group {
                waiting: 0.into(),
                turn: Arc::default(),
                found: OnceLock::new(),
                news: Notify::new(),
            })
        });
        group.waiting.fetch_add(1, Relaxed);
        let group = Arc::clone(group);
        Some(Waiting {
            state: Arc::clone(&self.state),
            id,
            group,
        })
    }
}

impl Waiting {
    /// Resolves with this waiter's turn, or with what another found.
    async fn woken(&self) -> Woken {
        let mut news = pin!(self.group.news.notified());
        // Listening first: nothing is found unheard after the look.
        news.as_mut().enable();
        if let Some(found) = self.group.found.get() {
            return Woken::Found(found.clone());
        }
        let turn = Arc::clone(&self.group.turn);
        tokio::select! {
            biased;
            () = news => match self.group.found.get() {
                Some(found) => Woken::Found(found.clone()),
                None => unreachable!("the news are what was found"),
            },
            turn = turn.lock_owned() => Woken::Turn(turn),
        }
    }

    /// Gives the record to all who wait now. Those who come later ask the store themselves.
    fn deliver(&self, found: Found) {
        let mut state = lock(&self.state);
        // Out of the map first: nobody joins a group whose wait is over.
        if state
            .groups
            .get(&self.id)
            .is_some_and(|group| Arc::ptr_eq(group, &self.group))
        {
            state.groups.remove(&self.id);
        }
        drop(state);
        // Only who has the turn delivers, and whoever has it next finds this.
        let _ = self.group.found.set(found);
        self.group.news.notify_waiters();
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut state = lock(&self.state);
        state.total -= 1;
        if self.group.waiting.fetch_sub(1, Relaxed) == 1
            && state
                .groups
                .get(&self.id)
                .is_some_and(|group| Arc::ptr_eq(group, &self.group))
        {
            state.groups.remove(&self.id);
        }
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How often a waiter looks at the store however quiet it is: from the first pause to the last.
const MIN_PAUSE: Duration = Duration::from_millis(25);
const MAX_PAUSE: Duration = Duration::from_secs(1);
