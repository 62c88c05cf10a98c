//! Concurrent requests that wait for the response of the first one. Their number is limited, and one request per key at a time
//! queries the store.

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
    execution::{detach::Detach, shared::Context},
    panics::catch_panic,
    retry::from_now,
    store::{Acquired, Claim, Fingerprint, KeyId},
    store_client::CallError,
    telemetry,
};

/// Waits for at most `limit`, until the first request has a record or this one acquires the lease. Returns the last reply of
/// the store, with the instant at which the call was sent.
pub(crate) async fn wait(
    context: &Context,
    claim: &Claim,
    detach: &Detach,
    limit: Duration,
    mut acquired: Acquired,
    mut sent: Instant,
) -> Result<(Acquired, Instant), CallError> {
    let (rules, shared) = (&context.config.execution, &context.shared);
    let deadline = from_now(limit);
    if detach.is_detached() {
        return Ok((acquired, sent));
    }
    let (per_key, total) = (rules.waiters_per_key, rules.waiters);
    let Some(waiter) = shared.waiters.join(claim.id, per_key, total) else {
        return Ok((acquired, sent));
    };
    telemetry::waiting(&claim.id);
    // A waiter has had no effect. If its client disconnects, it is cancelled and its permit is free.
    detach.disarm();
    let wakeup = timeout_at(deadline, waiter.turn_or_record()).await;
    detach.arm();
    let turn = match wakeup {
        Ok(Wakeup::Turn(turn)) => turn,
        Ok(Wakeup::Record(FoundRecord {
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
    let mut poll_interval = MIN_INTERVAL;
    let mut notification_backoff = Duration::ZERO;
    while let Acquired::InProgress {
        fingerprint,
        expires_in,
    } = &acquired
    {
        let expired = Instant::now() >= deadline;
        if *fingerprint != claim.fingerprint || expired || detach.is_detached() {
            break;
        }
        detach.disarm();
        // After a notification without a result, the next one is awaited with a delay. A store that notifies without end is
        // then not flooded with queries.
        if !notification_backoff.is_zero() {
            timeout_at(deadline, sleep(notification_backoff)).await.ok();
        }
        // The notification is a hint. The store is queried without one too, and no later than the lease may expire.
        let listening = Instant::now();
        let limit = poll_interval
            .min(deadline.saturating_duration_since(listening))
            .min(*expires_in)
            .max(Duration::from_millis(1));
        // A panic of the store counts as a notification: it must not end a wait on which other waiters depend.
        let changed = pin!(shared.store.wait_for_change(&claim.id, limit));
        timeout(limit, catch_panic(changed)).await.ok();
        notification_backoff = if listening.elapsed() < limit {
            (notification_backoff * 2).clamp(MIN_INTERVAL, MAX_INTERVAL)
        } else {
            Duration::ZERO
        };
        // The call may acquire the lease. A future that is dropped meanwhile continues in the background.
        detach.arm();
        let reply = shared.store.acquire(claim, rules.store_timeout).await;
        (acquired, sent) = reply?;
        poll_interval = (poll_interval * 8 / 5).min(MAX_INTERVAL);
    }
    if let Acquired::Completed {
        fingerprint,
        record,
    } = &acquired
    {
        waiter.deliver(FoundRecord {
            fingerprint: *fingerprint,
            record: record.clone(),
        });
    }
    drop(turn);
    Ok((acquired, sent))
}

/// Waiters of all keys.
#[derive(Default)]
pub(crate) struct Waiters {
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    groups: HashMap<KeyId, Arc<Group>>,
    total: usize,
}

/// Waiters of one key. The waiter that holds the turn queries the store. The others wait for the record that it finds.
struct Group {
    // Changed only under the lock of `State`.
    waiters: AtomicUsize,
    turn: Arc<tokio::sync::Mutex<()>>,
    record: OnceLock<FoundRecord>,
    // Wakes waiters in the order in which they joined.
    delivered: Notify,
}

/// Record that ends the wait.
#[derive(Clone)]
struct FoundRecord {
    fingerprint: Fingerprint,
    record: Bytes,
}

/// A waiter. Dropping it frees its slot.
struct Waiter {
    state: Arc<Mutex<State>>,
    id: KeyId,
    group: Arc<Group>,
}

/// Event that wakes a waiter.
enum Wakeup {
    /// The waiter now queries the store.
    Turn(OwnedMutexGuard<()>),
    /// Another waiter found the record.
    Record(FoundRecord),
}

impl Waiters {
    /// Adds a waiter for `id`. Returns `None` if `per_key` waiters of this key or `total` waiters are waiting.
    fn join(&self, id: KeyId, per_key: usize, total: usize) -> Option<Waiter> {
        let mut state = lock(&self.state);
        let waiters = state
            .groups
            .get(&id)
            .map_or(0, |group| group.waiters.load(Relaxed));
        if state.total >= total || waiters >= per_key {
            return None;
        }
        state.total += 1;
        let group = state.groups.entry(id).or_insert_with(|| {
            Arc::new(Group {
                waiters: 0.into(),
                turn: Arc::default(),
                record: OnceLock::new(),
                delivered: Notify::new(),
            })
        });
        group.waiters.fetch_add(1, Relaxed);
        let group = Arc::clone(group);
        Some(Waiter {
            state: Arc::clone(&self.state),
            id,
            group,
        })
    }
}

impl Waiter {
    /// Waits for the turn of this waiter, or for the record that another one found.
    async fn turn_or_record(&self) -> Wakeup {
        let mut delivered = pin!(self.group.delivered.notified());
        // Enabled before the check, so that no delivery between the two is missed.
        delivered.as_mut().enable();
        if let Some(record) = self.group.record.get() {
            return Wakeup::Record(record.clone());
        }
        let turn = Arc::clone(&self.group.turn);
        tokio::select! {
            biased;
            () = delivered => match self.group.record.get() {
                Some(record) => Wakeup::Record(record.clone()),
                None => unreachable!("the record is set before the notification"),
            },
            turn = turn.lock_owned() => Wakeup::Turn(turn),
        }
    }

    /// Delivers the record to all current waiters of the key. Later ones query the store themselves.
    fn deliver(&self, record: FoundRecord) {
        let mut state = lock(&self.state);
        // The group is removed first, so that no waiter joins a group that has its record.
        if state
            .groups
            .get(&self.id)
            .is_some_and(|group| Arc::ptr_eq(group, &self.group))
        {
            state.groups.remove(&self.id);
        }
        drop(state);
        // Only the waiter that holds the turn delivers. The next holder of the turn finds this record.
        let _ = self.group.record.set(record);
        self.group.delivered.notify_waiters();
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        let mut state = lock(&self.state);
        state.total -= 1;
        if self.group.waiters.fetch_sub(1, Relaxed) == 1
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

/// First and last interval at which a waiter queries the store without a notification.
const MIN_INTERVAL: Duration = Duration::from_millis(25);
const MAX_INTERVAL: Duration = Duration::from_secs(1);
