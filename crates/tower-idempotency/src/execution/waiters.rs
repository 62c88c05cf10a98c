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

use tokio::{
    sync::{Notify, OwnedMutexGuard},
    time::{Instant, sleep, timeout, timeout_at},
};

use crate::{
    execution::{acquire::Attempt, detach::DetachSwitch, shared::Context},
    panics::catch_panic,
    retry::from_now,
    store::{Acquired, KeyId},
    store_client::{AcquireReply, CallError},
    telemetry,
};

/// Waits for at most `limit`, until the first request has a record or this one acquires the lease. Returns the last reply of
/// the store.
pub(crate) async fn wait(
    context: &Context,
    attempt: &Attempt,
    detach: &DetachSwitch,
    limit: Duration,
    mut reply: AcquireReply,
) -> Result<AcquireReply, CallError> {
    let (rules, shared) = (&context.config.execution, &context.shared);
    let (claim, caller) = (&attempt.claim, attempt.permit.caller());
    let deadline = from_now(limit);
    if detach.is_detached() {
        return Ok(reply);
    }
    let Some(_permit) = caller.admit_waiter(rules.waiters) else {
        return Ok(reply);
    };
    let Some(waiter) = shared.waiters.join(claim.id, rules.waiters_per_key) else {
        return Ok(reply);
    };
    telemetry::waiting(&claim.id);
    disarm_unless_late(detach, &reply);
    let wakeup = timeout_at(deadline, waiter.turn_or_record()).await;
    detach.arm();
    let turn = match wakeup {
        Ok(Wakeup::Turn(turn)) => turn,
        Ok(Wakeup::Record(completed)) => {
            reply.acquired = completed;
            return Ok(reply);
        }
        Err(_elapsed) => return Ok(reply),
    };
    let mut poll_interval = MIN_INTERVAL;
    let mut notification_backoff = Duration::ZERO;
    while let Acquired::InProgress {
        fingerprint,
        expires_in,
    } = &reply.acquired
    {
        let timed_out = Instant::now() >= deadline;
        if !attempt.is_same_request(fingerprint) || timed_out || detach.is_detached() {
            break;
        }
        disarm_unless_late(detach, &reply);
        // After a notification without a result, the waiter delays its next query. A store that notifies without end is
        // then not flooded with queries.
        if !notification_backoff.is_zero() {
            timeout_at(deadline, sleep(notification_backoff)).await.ok();
        }
        // The notification is a hint. Without one, the waiter queries the store again, at the expiry of the lease at the
        // latest.
        let listening = Instant::now();
        let poll_timeout = poll_interval
            .min(deadline.saturating_duration_since(listening))
            .min(*expires_in)
            .max(Duration::from_millis(1));
        // A panic of the store counts as a notification: it must not end a wait on which other waiters depend.
        let changed = pin!(shared.store.wait_for_change(&claim.id, poll_timeout));
        timeout(poll_timeout, catch_panic(changed)).await.ok();
        notification_backoff = if listening.elapsed() < poll_timeout {
            (notification_backoff * 2).clamp(MIN_INTERVAL, MAX_INTERVAL)
        } else {
            Duration::ZERO
        };
        // The call may acquire the lease. A future that is dropped meanwhile continues in the background.
        detach.arm();
        if detach.is_detached() {
            break;
        }
        let earlier = reply.may_acquire_late;
        let acquired = shared.store.acquire(claim, rules.store_timeout).await;
        reply = acquired.map_err(|error| error.after_attempt(earlier))?;
        reply.may_acquire_late |= earlier;
        poll_interval = (poll_interval * 8 / 5).min(MAX_INTERVAL);
    }
    if let Acquired::Completed { .. } = reply.acquired {
        waiter.deliver(reply.acquired.clone());
    }
    drop(turn);
    Ok(reply)
}

/// Lets a client that disconnects cancel its waiter, which has had no effect, and free its permit.
///
/// A waiter whose call may still acquire the lease continues instead, to release it.
fn disarm_unless_late(detach: &DetachSwitch, reply: &AcquireReply) {
    if !reply.may_acquire_late {
        detach.disarm();
    }
}

/// Waiters of all keys.
#[derive(Default)]
pub(crate) struct Waiters {
    by_key: Arc<Mutex<WaitersByKey>>,
}

type WaitersByKey = HashMap<KeyId, Arc<KeyWaiters>>;

/// Waiters of one key. The waiter that holds the turn queries the store. The others wait for the record that it finds.
struct KeyWaiters {
    // Changed only under the lock of the map.
    waiters: AtomicUsize,
    turn: Arc<tokio::sync::Mutex<()>>,
    /// The reply [`Acquired::Completed`].
    completed: OnceLock<Acquired>,
    // Wakes waiters in the order in which they joined.
    delivered: Notify,
}

/// A waiter. Its drop removes it from the group.
struct Waiter {
    by_key: Arc<Mutex<WaitersByKey>>,
    id: KeyId,
    group: Arc<KeyWaiters>,
}

/// Event that wakes a waiter.
enum Wakeup {
    /// The waiter now queries the store.
    Turn(OwnedMutexGuard<()>),
    /// Another waiter found the record.
    Record(Acquired),
}

impl Waiters {
    /// Adds a waiter for `id`. Returns `None` if `per_key` waiters of this key are waiting.
    fn join(&self, id: KeyId, per_key: usize) -> Option<Waiter> {
        let mut by_key = lock(&self.by_key);
        let waiters = by_key
            .get(&id)
            .map_or(0, |group| group.waiters.load(Relaxed));
        if waiters >= per_key {
            return None;
        }
        let group = by_key.entry(id).or_insert_with(|| {
            Arc::new(KeyWaiters {
                waiters: 0.into(),
                turn: Arc::default(),
                completed: OnceLock::new(),
                delivered: Notify::new(),
            })
        });
        group.waiters.fetch_add(1, Relaxed);
        let group = Arc::clone(group);
        Some(Waiter {
            by_key: Arc::clone(&self.by_key),
            id,
            group,
        })
    }
}

impl Waiter {
    /// Waits for the turn of this waiter, or for the record that another waiter found.
    async fn turn_or_record(&self) -> Wakeup {
        let mut delivered = pin!(self.group.delivered.notified());
        // Enabled before the check, so that no delivery between the two is missed.
        delivered.as_mut().enable();
        if let Some(completed) = self.group.completed.get() {
            return Wakeup::Record(completed.clone());
        }
        let turn = Arc::clone(&self.group.turn);
        tokio::select! {
            biased;
            () = delivered => match self.group.completed.get() {
                Some(completed) => Wakeup::Record(completed.clone()),
                None => unreachable!("the record is set before the notification"),
            },
            turn = turn.lock_owned() => Wakeup::Turn(turn),
        }
    }

    /// Delivers the record to all current waiters of the key. Later ones query the store themselves.
    fn deliver(&self, completed: Acquired) {
        let mut by_key = lock(&self.by_key);
        // The group is removed first, so that no waiter joins a group that has its record.
        self.remove_group(&mut by_key);
        drop(by_key);
        // Only the waiter that holds the turn delivers. The next holder of the turn finds this record.
        let _ = self.group.completed.set(completed);
        self.group.delivered.notify_waiters();
    }

    /// Removes the group of this waiter, if it is the current one of its key.
    fn remove_group(&self, by_key: &mut WaitersByKey) {
        if by_key
            .get(&self.id)
            .is_some_and(|group| Arc::ptr_eq(group, &self.group))
        {
            by_key.remove(&self.id);
        }
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        let mut by_key = lock(&self.by_key);
        if self.group.waiters.fetch_sub(1, Relaxed) == 1 {
            self.remove_group(&mut by_key);
        }
    }
}

fn lock(by_key: &Mutex<WaitersByKey>) -> MutexGuard<'_, WaitersByKey> {
    by_key.lock().unwrap_or_else(PoisonError::into_inner)
}

/// First and last interval at which a waiter queries the store without a notification.
const MIN_INTERVAL: Duration = Duration::from_millis(25);
const MAX_INTERVAL: Duration = Duration::from_secs(1);
