//! The store that the processes share: the simulation's own store, or the crate's in-memory store.

use std::{
    future::Future,
    pin::pin,
    task::{Context, Poll, Waker},
    time::Duration,
};

use tokio::{
    runtime::{Builder, Runtime},
    time::advance,
};
use tower_idempotency::{
    inspect::{Inspect, Resolution, Seen},
    store::{Fingerprint, KeyId, MemoryStore, Store, StoreError},
};

use super::{
    Millis,
    bugs::Bug,
    plan::Plan,
    store::{Entry, SimulatedStore},
    world::{StoreCall, StoreReply},
};

pub(super) enum Backend {
    Simulated(SimulatedStore),
    Memory(Box<Memory>),
}

/// The crate's in-memory store. Its clock is the clock of a runtime that runs no tasks.
pub(super) struct Memory {
    store: MemoryStore,
    clock: Runtime,
    now: Millis,
    /// The ids of the entries in progress. The store has no call that reads an entry without a change, so the ids are
    /// kept here.
    in_progress: Vec<KeyId>,
}

impl Backend {
    pub(super) fn new(plan: &Plan, bug: Option<Bug>) -> Self {
        if !plan.memory || bug.is_some() {
            return Self::Simulated(SimulatedStore::with(bug));
        }
        let clock = Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .expect("a simulation can have a runtime");
        let store = {
            let _entered = clock.enter();
            MemoryStore::new()
        };
        Self::Memory(Box::new(Memory {
            store,
            clock,
            now: 0,
            in_progress: Vec::new(),
        }))
    }

    /// Returns the current entry, for the bug of a store that reads first and writes later.
    pub(super) fn read(&self, id: KeyId, now: Millis) -> Option<Entry> {
        match self {
            Self::Simulated(store) => store.seen(id, now),
            Self::Memory(_) => None,
        }
    }

    pub(super) fn step(
        &mut self,
        op: &StoreCall,
        read: Option<Option<Entry>>,
        now: Millis,
        bug: Option<Bug>,
    ) -> StoreReply {
        match self {
            Self::Simulated(store) => step(store, op, read, now, bug),
            Self::Memory(memory) => memory.step(op, now),
        }
    }

    /// Returns the entry as an operator sees it, with the fingerprint of its request.
    pub(super) fn inspect(&mut self, id: KeyId, now: Millis) -> Option<(Seen, Fingerprint)> {
        match self {
            Self::Simulated(store) => store.inspect(id, now),
            Self::Memory(memory) => memory.inspect(id, now),
        }
    }

    /// Applies a decision of an operator. Returns `false` if the entry has changed.
    pub(super) fn resolve(&mut self, seen: &Seen, resolution: &Resolution, now: Millis) -> bool {
        match self {
            Self::Simulated(store) => store
                .resolve(seen, resolution, now)
                .expect("there is randomness"),
            Self::Memory(memory) => memory.resolve(seen, resolution, now),
        }
    }

    pub(super) fn is_in_progress(&self, id: KeyId, now: Millis) -> bool {
        match self {
            Self::Simulated(store) => store.is_in_progress(id, now),
            Self::Memory(memory) => memory.in_progress.contains(&id),
        }
    }
}

fn step(
    store: &mut SimulatedStore,
    op: &StoreCall,
    read: Option<Option<Entry>>,
    now: Millis,
    bug: Option<Bug>,
) -> StoreReply {
    match op {
        StoreCall::Acquire(claim) => StoreReply::Acquired(match read {
            Some(seen) => store.acquire_from(seen.as_ref(), claim, now),
            None => store.acquire(claim, now),
        }),
        StoreCall::Renew(lease, ttl) if bug != Some(Bug::RenewalsDoNothing) => {
            done(&store.renew(lease, *ttl, now))
        }
        StoreCall::Renew(..) => StoreReply::Ok,
        StoreCall::Complete(lease, record, retention) => {
            done(&store.complete(lease, record.clone(), *retention, now))
        }
        StoreCall::Commit(lease, record, retention, _) => {
            done(&store.commit(lease, record.clone(), *retention, now))
        }
        StoreCall::Release(lease) => {
            store.release(lease, now);
            StoreReply::Ok
        }
    }
}

impl Memory {
    /// Advances the clock of the store to `now`.
    fn advance(&mut self, now: Millis) {
        let _entered = self.clock.enter();
        if self.now < now {
            let mut advancing = pin!(advance(Duration::from_millis(now - self.now)));
            // The first poll advances the clock, and then yields.
            let _ = advancing
                .as_mut()
                .poll(&mut Context::from_waker(Waker::noop()));
            self.now = now;
        }
    }

    fn inspect(&mut self, id: KeyId, now: Millis) -> Option<(Seen, Fingerprint)> {
        self.advance(now);
        let _entered = self.clock.enter();
        let details = poll_once(self.store.get(&id)).expect("the store replies")?;
        let fingerprint = details.fingerprint.expect("it is stored");
        Some((*details.entry.seen(), fingerprint))
    }

    fn resolve(&mut self, seen: &Seen, resolution: &Resolution, now: Millis) -> bool {
        self.advance(now);
        let _entered = self.clock.enter();
        let outcome = poll_once(self.store.resolve(seen, resolution)).expect("the store replies");
        if outcome.is_applied() {
            self.in_progress.retain(|id| id != seen.id());
        }
        outcome.is_applied()
    }

    fn step(&mut self, op: &StoreCall, now: Millis) -> StoreReply {
        self.advance(now);
        let _entered = self.clock.enter();
        match op {
            StoreCall::Acquire(claim) => {
                let acquired = poll_once(self.store.acquire(claim)).expect("the store is not full");
                self.in_progress.retain(|id| *id != claim.id);
                if let tower_idempotency::store::Acquired::Granted { .. }
                | tower_idempotency::store::Acquired::InProgress { .. } = acquired
                {
                    self.in_progress.push(claim.id);
                }
                StoreReply::Acquired(acquired)
            }
            StoreCall::Renew(lease, ttl) => done(&poll_once(self.store.renew(lease, *ttl))),
            StoreCall::Complete(lease, record, retention)
            | StoreCall::Commit(lease, record, retention, _) => {
                let call = self.store.complete(lease, record.clone(), *retention);
                let done = done(&poll_once(call));
                if let StoreReply::Ok = done {
                    self.in_progress.retain(|id| *id != lease.id);
                }
                done
            }
            StoreCall::Release(lease) => {
                self.in_progress.retain(|id| *id != lease.id);
                done(&poll_once(self.store.release(lease)))
            }
        }
    }
}

/// Returns the output of a call to the in-memory store, which does its work at the first poll.
fn poll_once<T>(call: impl Future<Output = T>) -> T {
    match pin!(call).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(done) => done,
        Poll::Pending => unreachable!("a call to the store in memory does not wait"),
    }
}

fn done(result: &Result<(), StoreError>) -> StoreReply {
    match result {
        Ok(()) => StoreReply::Ok,
        Err(_) => StoreReply::Lost,
    }
}
