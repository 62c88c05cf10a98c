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
    history::{Heard, What},
    world::{Call, Done, Due, Op, State, World},
};

/// A process's connection to the store.
#[derive(Clone)]
pub(super) struct Link {
    pub(super) world: World,
    pub(super) process: usize,
}

/// The fate of a call.
enum Fate {
    /// The call receives its reply immediately.
    AtOnce,
    /// The call arrives after the first delay, and its reply returns after the second delay.
    Travels(Millis, Millis),
    /// The call arrives after the first delay, and an error returns after the second delay.
    FailsAfter(Millis, Millis),
    /// The call does not arrive, and an error returns.
    FailsBefore(Millis),
    /// The call does not arrive, and no reply returns.
    Lost,
    /// The call arrives, and no reply returns.
    ReplyLost(Millis),
}

impl Fate {
    /// A commit arrives soon or never. By the contract, other calls wait for a transaction in progress. A slow transaction
    /// in the store therefore looks like slowness of the other calls.
    fn of_a_commit(self) -> Self {
        match self {
            Self::Travels(there, back) => Self::Travels(there.min(2), back),
            Self::FailsAfter(there, back) => Self::FailsAfter(there.min(2), back),
            Self::ReplyLost(there) => Self::ReplyLost(there.min(2)),
            Self::AtOnce | Self::FailsBefore(_) | Self::Lost => self,
        }
    }
}

/// The reply to a call, as its caller receives it.
enum Hears {
    At(oneshot::Receiver<Option<Done>>),
    Now(Option<Done>),
    ErrorIn(Millis),
    Nothing,
}

impl State {
    fn fate(&mut self) -> Fate {
        let (timeout, lease) = (self.plan.store_timeout, self.plan.lease);
        let dice = &mut self.dice;
        if self.healed || !dice.percent(self.plan.faults) {
            return match dice.below(10) {
                0..5 => Fate::AtOnce,
                5..9 => Fate::Travels(dice.below(3), dice.below(3)),
                _ if self.healed => Fate::Travels(1, 1),
                _ => Fate::Travels(dice.below(timeout / 3 + 2), dice.below(timeout / 3 + 2)),
            };
        }
        let soon = dice.below(3);
        let late = dice.pick(&[timeout - 1, timeout, timeout + 1, timeout * 3 / 2]);
        match dice.below(8) {
            0 => Fate::FailsBefore(soon),
            1 => Fate::FailsAfter(soon, dice.below(3)),
            2 => Fate::Lost,
            3 => Fate::ReplyLost(soon),
            4 => Fate::Travels(soon, late),
            5 => Fate::Travels(late, soon),
            6 => Fate::FailsAfter(late, soon),
            // No caller waits for the call any more when it arrives.
            _ => Fate::ReplyLost(dice.below(lease * 2)),
        }
    }
}

impl Link {
    /// Sends a call and applies its fate. An error does not show if the call had an effect.
    async fn call(&self, op: Op) -> Result<Done, StoreError> {
        let (name, token) = (op.name(), op.token());
        let heard = match self.send(op) {
            Hears::At(reply) => match reply.await {
                Ok(heard) => heard,
                Err(_lost) => pending().await,
            },
            Hears::Now(heard) => heard,
            Hears::ErrorIn(pause) => {
                if pause > 0 {
                    sleep(Duration::from_millis(pause)).await;
                }
                None
            }
            Hears::Nothing => pending().await,
        };
        let mut world = self.world.look();
        let token_name = world.name(token);
        world.record_event(What::Hears {
            process: self.process,
            call: name,
            token: token_name,
            heard: match heard {
                Some(_) => Heard::Answer,
                None => Heard::Error,
            },
        });
        let execution = world.executions.iter_mut().rev();
        let mut execution = execution.filter(|it| it.lease.is_some_and(|it| it.token == token));
        if let Some(execution) = execution.next()
            && let Some(done) = &heard
        {
            match name {
                "complete" | "commit" => execution.heard = true,
                "renew" if !execution.completing => execution.lost |= matches!(done, Done::Lost),
                _ => {}
            }
        }
        heard.ok_or_else(|| StoreError::backend("the store failed"))
    }

    /// Sends the call.
    fn send(&self, op: Op) -> Hears {
        let mut world = self.world.look();
        if let Op::Complete(lease, ..) | Op::Commit(lease, ..) = &op
            && let Some(execution) = world.execution_under(lease)
        {
            execution.completing = true;
        }
        let read = match &op {
            Op::Acquire(claim) if world.has(Bug::ReadThenWritten) => {
                Some(world.holder.read(claim.id, world.store_now()))
            }
            _ => None,
        };
        let mut fate = world.fate();
        if let Op::Commit(..) = op {
            fate = fate.of_a_commit();
        }
        let process = self.process;
        let (there, reply, fails, hears) = match fate {
            Fate::AtOnce => return Hears::Now(Some(world.arrive(process, &op, read))),
            Fate::FailsBefore(pause) => return Hears::ErrorIn(pause),
            Fate::Lost => return Hears::Nothing,
            Fate::ReplyLost(there) => (there, None, false, Hears::Nothing),
            Fate::Travels(there, back) => {
                let (reply, heard) = oneshot::channel();
                (there, Some((reply, back)), false, Hears::At(heard))
            }
            Fate::FailsAfter(there, back) => {
                let (reply, heard) = oneshot::channel();
                (there, Some((reply, back)), true, Hears::At(heard))
            }
        };
        let call = Call {
            process,
            op,
            reply,
            fails,
            read,
        };
        world.after(there, Due::Arrival(Box::new(call)));
        hears
    }

    /// Writes effect and record together, like the commit of a handler's transaction.
    pub(super) async fn commit(
        &self,
        lease: LeaseRef,
        record: Bytes,
        retention: Ttl,
        execution: usize,
    ) -> Result<(), StoreError> {
        let patience = {
            let mut world = self.world.look();
            let over = world.now + retention.as_millis();
            world.executions[execution].over.get_or_insert(over);
            world.plan.store_timeout * 3 / 2
        };
        let op = Op::Commit(lease, record, retention, execution);
        // Like the timeout of a driver: the outcome of the commit is unknown.
        match timeout(Duration::from_millis(patience), self.unit(op)).await {
            Ok(committed) => committed,
            Err(elapsed) => Err(StoreError::backend(elapsed)),
        }
    }

    async fn unit(&self, op: Op) -> Result<(), StoreError> {
        match self.call(op).await? {
            Done::Ok => Ok(()),
            Done::Lost | Done::Acquired(_) => Err(StoreError::LeaseLost),
        }
    }
}

impl Store for Link {
    const COMPRESS_ABOVE: usize = usize::MAX;

    async fn acquire(&self, claim: &Claim) -> Result<Acquired, StoreError> {
        match self.call(Op::Acquire(claim.clone())).await? {
            Done::Acquired(acquired) => Ok(acquired),
            Done::Ok | Done::Lost => Err(StoreError::backend("no answer to an acquire")),
        }
    }

    async fn renew(&self, lease: &LeaseRef, ttl: Ttl) -> Result<(), StoreError> {
        self.unit(Op::Renew(*lease, ttl)).await
    }

    async fn complete(
        &self,
        lease: &LeaseRef,
        record: Bytes,
        retention: Ttl,
    ) -> Result<(), StoreError> {
        let op = Op::Complete(*lease, record, retention);
        if self.world.look().has(Bug::CompletionIsAssumed) {
            drop(self.send(op));
            if let Some(execution) = self.world.look().execution_under(lease) {
                execution.heard = true;
            }
            return Ok(());
        }
        self.unit(op).await
    }

    async fn release(&self, lease: &LeaseRef) -> Result<(), StoreError> {
        self.unit(Op::Release(*lease)).await
    }

    async fn wait_for_change(&self, id: &KeyId, within: Duration) {
        let news = self.world.look().watch(*id);
        // Lost news never arrive.
        let _ = timeout(within, async {
            if news.await.is_err() {
                pending::<()>().await;
            }
        })
        .await;
    }
}
