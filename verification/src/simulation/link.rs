//! The path from a process to the store: calls and replies that are slow, late or lost.

use std::{future::pending, time::Duration};

use bytes::Bytes;
use tokio::{
    sync::oneshot,
    time::{sleep, timeout},
};
use tower_idempotency::store::{Acquired, Claim, KeyId, LeaseRef, Store, StoreError, Ttl};

use super::{
    Millis,
    bugs::Bug,
    history::{EventKind, ReceivedReply},
    world::{PendingCall, ScheduledEvent, StoreCall, StoreReply, World, WorldState},
};

/// A process's connection to the store.
#[derive(Clone)]
pub(super) struct Link {
    pub(super) world: World,
    pub(super) process: usize,
}

/// The delivery of a call and of its reply.
enum Delivery {
    /// The call receives its reply immediately.
    Immediate,
    /// The call arrives after the first delay, and its reply returns after the second delay.
    Delayed(Millis, Millis),
    /// The call arrives after the first delay, and an error returns after the second delay.
    FailsAfter(Millis, Millis),
    /// The call does not arrive, and an error returns.
    FailsBefore(Millis),
    /// The call does not arrive, and no reply returns.
    Lost,
    /// The call arrives, and no reply returns.
    ReplyLost(Millis),
}

impl Delivery {
    /// Returns the delivery of a commit, which arrives soon or never. By the contract, other calls wait for a transaction
    /// in progress. A slow transaction would only slow down the other calls, which their own deliveries do already.
    fn for_commit(self) -> Self {
        match self {
            Self::Delayed(there, back) => Self::Delayed(there.min(2), back),
            Self::FailsAfter(there, back) => Self::FailsAfter(there.min(2), back),
            Self::ReplyLost(there) => Self::ReplyLost(there.min(2)),
            Self::Immediate | Self::FailsBefore(_) | Self::Lost => self,
        }
    }

    /// Returns `true` if the caller receives an error, no reply, or a reply after `limit` at the earliest.
    fn is_faulty(&self, limit: Millis) -> bool {
        match self {
            Self::Immediate => false,
            Self::Delayed(there, back) => there + back >= limit,
            Self::FailsAfter(..) | Self::FailsBefore(_) | Self::Lost | Self::ReplyLost(_) => true,
        }
    }
}

/// The reply to a call, as its caller receives it.
enum PendingReply {
    Later(oneshot::Receiver<Option<StoreReply>>),
    Now(Option<StoreReply>),
    ErrorIn(Millis),
    Nothing,
}

impl WorldState {
    fn draw_delivery(&mut self) -> Delivery {
        let (timeout, lease) = (self.plan.store_timeout, self.plan.lease);
        let random = &mut self.random;
        if self.faults_ended || !random.percent(self.plan.faults) {
            return match random.below(10) {
                0..5 => Delivery::Immediate,
                5..9 => Delivery::Delayed(random.below(3), random.below(3)),
                _ if self.faults_ended => Delivery::Delayed(1, 1),
                _ => {
                    Delivery::Delayed(random.below(timeout / 3 + 2), random.below(timeout / 3 + 2))
                }
            };
        }
        let soon = random.below(3);
        let late = random.pick(&[timeout - 1, timeout, timeout + 1, timeout * 3 / 2]);
        match random.below(8) {
            0 => Delivery::FailsBefore(soon),
            1 => Delivery::FailsAfter(soon, random.below(3)),
            2 => Delivery::Lost,
            3 => Delivery::ReplyLost(soon),
            4 => Delivery::Delayed(soon, late),
            5 => Delivery::Delayed(late, soon),
            6 => Delivery::FailsAfter(late, soon),
            // The caller has stopped waiting before the call arrives.
            _ => Delivery::ReplyLost(random.below(lease * 2)),
        }
    }
}

impl Link {
    /// Sends a call and delivers it. The caller cannot see from an error if the call had an effect.
    async fn call(&self, op: StoreCall) -> Result<StoreReply, StoreError> {
        let (name, token) = (op.name(), op.token());
        let received = match self.send(op) {
            PendingReply::Later(reply) => match reply.await {
                Ok(received) => received,
                Err(_lost) => pending().await,
            },
            PendingReply::Now(received) => received,
            PendingReply::ErrorIn(pause) => {
                if pause > 0 {
                    sleep(Duration::from_millis(pause)).await;
                }
                None
            }
            PendingReply::Nothing => pending().await,
        };
        let mut world = self.world.lock();
        let token_name = world.name(token);
        world.record_event(EventKind::ReplyReceived {
            process: self.process,
            call: name,
            token: token_name,
            received: match received {
                Some(_) => ReceivedReply::Reply,
                None => ReceivedReply::Error,
            },
        });
        let execution = world.executions.iter_mut().rev();
        let mut execution = execution.filter(|it| it.lease.is_some_and(|it| it.token == token));
        if let Some(execution) = execution.next()
            && let Some(done) = &received
        {
            match name {
                "complete" => {
                    execution.received = true;
                    execution.refused = matches!(done, StoreReply::Lost);
                }
                "commit" => execution.received = true,
                // The layer has its lease back.
                "acquire" => {
                    execution.refused &=
                        !matches!(done, StoreReply::Acquired(Acquired::Granted { .. }));
                }
                "renew" => execution.lost |= matches!(done, StoreReply::Lost),
                _ => {}
            }
        }
        received.ok_or_else(|| StoreError::backend("the store failed"))
    }

    /// Sends the call.
    fn send(&self, op: StoreCall) -> PendingReply {
        let mut world = self.world.lock();
        if let StoreCall::Complete(lease, ..) | StoreCall::Commit(lease, ..) = &op
            && let Some(execution) = world.execution_under(lease)
        {
            execution.completing = true;
            execution.refused = false;
        }
        let read = match &op {
            StoreCall::Acquire(claim) if world.has(Bug::ReadThenWritten) => {
                Some(world.backend.read(claim.id, world.store_now()))
            }
            _ => None,
        };
        let mut delivery = world.draw_delivery();
        if let StoreCall::Commit(..) = op {
            delivery = delivery.for_commit();
        }
        let process = self.process;
        // The layer rejects a lease that expired before its reply arrived.
        if delivery.is_faulty(world.plan.store_timeout.min(world.plan.lease)) {
            let (call, token) = (op.name(), world.name(op.token()));
            world.record_event(EventKind::CallFaulted {
                process,
                call,
                token,
            });
        }
        let (there, reply, fails, pending) = match delivery {
            Delivery::Immediate => {
                return PendingReply::Now(Some(world.arrive(process, &op, read)));
            }
            Delivery::FailsBefore(pause) => return PendingReply::ErrorIn(pause),
            Delivery::Lost => return PendingReply::Nothing,
            Delivery::ReplyLost(there) => (there, None, false, PendingReply::Nothing),
            Delivery::Delayed(there, back) => {
                let (reply, received) = oneshot::channel();
                (
                    there,
                    Some((reply, back)),
                    false,
                    PendingReply::Later(received),
                )
            }
            Delivery::FailsAfter(there, back) => {
                let (reply, received) = oneshot::channel();
                (
                    there,
                    Some((reply, back)),
                    true,
                    PendingReply::Later(received),
                )
            }
        };
        let call = PendingCall {
            process,
            op,
            reply,
            fails,
            read,
        };
        world.after(there, ScheduledEvent::Arrive(Box::new(call)));
        pending
    }

    /// Writes effect and record together, like the commit of a handler's transaction.
    pub(super) async fn commit(
        &self,
        lease: LeaseRef,
        record: Bytes,
        retention: Ttl,
        execution: usize,
    ) -> Result<(), StoreError> {
        let max_delay = {
            let mut world = self.world.lock();
            let over = world.now + retention.as_millis();
            world.executions[execution].over.get_or_insert(over);
            world.plan.store_timeout * 3 / 2
        };
        let op = StoreCall::Commit(lease, record, retention, execution);
        // Like the timeout of a driver: the outcome of the commit is unknown.
        match timeout(
            Duration::from_millis(max_delay),
            self.call_without_value(op),
        )
        .await
        {
            Ok(committed) => committed,
            Err(elapsed) => Err(StoreError::backend(elapsed)),
        }
    }

    async fn call_without_value(&self, op: StoreCall) -> Result<(), StoreError> {
        match self.call(op).await? {
            StoreReply::Ok => Ok(()),
            StoreReply::Lost | StoreReply::Acquired(_) => Err(StoreError::LeaseLost),
        }
    }
}

impl Store for Link {
    async fn acquire(&self, claim: &Claim) -> Result<Acquired, StoreError> {
        match self.call(StoreCall::Acquire(claim.clone())).await? {
            StoreReply::Acquired(acquired) => Ok(acquired),
            StoreReply::Ok | StoreReply::Lost => Err(StoreError::backend("no reply to an acquire")),
        }
    }

    async fn renew(&self, lease: &LeaseRef, ttl: Ttl) -> Result<(), StoreError> {
        self.call_without_value(StoreCall::Renew(*lease, ttl)).await
    }

    async fn complete(
        &self,
        lease: &LeaseRef,
        record: Bytes,
        retention: Ttl,
    ) -> Result<(), StoreError> {
        let op = StoreCall::Complete(*lease, record, retention);
        if self.world.lock().has(Bug::CompletionIsAssumed) {
            drop(self.send(op));
            if let Some(execution) = self.world.lock().execution_under(lease) {
                execution.received = true;
            }
            return Ok(());
        }
        self.call_without_value(op).await
    }

    async fn release(&self, lease: &LeaseRef) -> Result<(), StoreError> {
        self.call_without_value(StoreCall::Release(*lease)).await
    }

    async fn wait_for_change(&self, id: &KeyId, timeout: Duration) {
        let news = self.world.lock().watch(*id);
        // A lost notification never arrives.
        let _ = tokio::time::timeout(timeout, async {
            if news.await.is_err() {
                pending::<()>().await;
            }
        })
        .await;
    }

    fn compress_above(&self) -> usize {
        usize::MAX
    }
}
