//! Concurrent requests that wait for the response of the first one. Their number is limited, and one request per key at a time
//! queries the store.

use std::{
    collections::HashMap,
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use tokio::sync::{Notify, OwnedMutexGuard};

use crate::store::{Acquired, KeyId};

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
pub(super) struct Waiter {
    by_key: Arc<Mutex<WaitersByKey>>,
    id: KeyId,
    group: Arc<KeyWaiters>,
}

/// Event that wakes a waiter.
pub(super) enum Wakeup {
    /// The waiter now queries the store.
    Turn(OwnedMutexGuard<()>),
    /// Another waiter found the record.
    Record(Acquired),
}

impl Waiters {
    /// Adds a waiter for `id`. Returns `None` if `per_key` waiters of this key are waiting.
    pub(super) fn join(&self, id: KeyId, per_key: usize) -> Option<Waiter> {
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
    pub(super) async fn turn_or_record(&self) -> Wakeup {
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
    pub(super) fn deliver(&self, completed: Acquired) {
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
