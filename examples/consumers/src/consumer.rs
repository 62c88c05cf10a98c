use std::time::Duration;

use tokio::time::timeout;
use tower_idempotency::{
    IdempotencyLayer, Lease, NeedsAttention, OrphanPolicy, Ttl,
    run_once::{Outcome, WorkError},
};

use crate::{
    Backoff, Carrier, Failure, Unsent,
    retry_queue::{Message, Move, QUEUE_RETENTION, RetryQueue},
};

/// A consumer of a retry queue, which sends a parcel for each message.
///
/// A parcel cannot be called back, and the carrier has no idempotency keys. So an attempt is repeated only if nothing was
/// sent. If that is unknown, the message needs attention.
#[derive(Clone, Debug)]
pub struct Consumer {
    layer: IdempotencyLayer,
    carrier: Carrier,
    attempts: u32,
    backoff: Backoff,
    limit: Duration,
    visibility: Duration,
}

impl Consumer {
    /// Returns a consumer with the lease of `layer`.
    #[must_use]
    pub fn new(layer: IdempotencyLayer, carrier: Carrier) -> Self {
        Self {
            layer: layer
                .with_namespace("parcels")
                .with_retention(QUEUE_RETENTION)
                // A consumer that died may have sent its parcel. Its message is refused, also after a long outage.
                .with_orphan_policy(OrphanPolicy::Refuse)
                .with_orphan_retention(Ttl::MAX),
            carrier,
            attempts: 5,
            backoff: Backoff::new(Duration::from_secs(1), Duration::from_secs(600)),
            limit: Duration::from_secs(20),
            visibility: Duration::from_secs(60),
        }
    }

    /// Sets the number of failed attempts after which a message is a dead letter. Default: 5.
    ///
    /// With a small number, an outage of the carrier turns all messages into dead letters.
    #[must_use]
    pub fn with_attempts(self, attempts: u32) -> Self {
        Self { attempts, ..self }
    }

    /// Sets the delays between attempts. Default: up to 1 s after the first failure, doubling up to 10 minutes.
    #[must_use]
    pub fn with_backoff(self, backoff: Backoff) -> Self {
        Self { backoff, ..self }
    }

    /// Sets the timeout of a call to the carrier. Default: 20 s.
    ///
    /// After the timeout the message needs attention, because the parcel may be sent. Without a timeout, an unresponsive
    /// carrier would keep the key in progress indefinitely, because the layer renews its lease.
    #[must_use]
    pub fn with_limit(self, limit: Duration) -> Self {
        Self { limit, ..self }
    }

    /// Sets the time after which a message is delivered again if its consumer does not move it. Default: 1 minute.
    ///
    /// If it is shorter than an attempt, each further delivery fails: the key is in progress. The failure of such an attempt
    /// is not counted, so the message is retried without end.
    #[must_use]
    pub fn with_visibility(self, visibility: Duration) -> Self {
        Self { visibility, ..self }
    }

    /// Receives a message, handles it and moves it. Returns `false` if no message is due.
    ///
    /// # Errors
    ///
    /// Returns an error if the queue cannot be reached. A message that was received is delivered again.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, an attempt that has begun continues, and its message is delivered again.
    pub async fn step(&self, queue: &impl RetryQueue) -> Result<bool, Failure> {
        let Some(message) = queue.receive(self.visibility).await? else {
            return Ok(false);
        };
        let next = self.handle(&message).await;
        if !queue.apply(&next).await? {
            tracing::warn!("message not moved: it was delivered again");
        }
        Ok(true)
    }

    /// Makes an attempt at a message, unless all attempts are used up, and returns the move of the message.
    ///
    /// The layer records the outcome first, and the queue follows. If the process is killed between the two, the message is
    /// delivered again, and the layer returns the outcome again.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped after it was polled, the attempt continues.
    pub async fn handle(&self, message: &Message) -> Move {
        let (carrier, order, limit) = (self.carrier.clone(), message.body.clone(), self.limit);
        let ship = async move |lease: Lease| {
            if !lease.is_held() {
                // This process was paused, and an operator may have resolved the message meanwhile.
                return Err(WorkError::Release(Unsent::Not("the lease is lost".into())));
            }
            let sent = timeout(limit, carrier.send(&order)).await;
            let sent = sent.unwrap_or_else(|elapsed| Err(Unsent::Perhaps(elapsed.into())));
            sent.map_err(|unsent| match unsent {
                Unsent::Perhaps(_) => WorkError::NeedsAttention(PERHAPS_SENT, unsent),
                Unsent::Not(_) | Unsent::Never(_) => WorkError::Release(unsent),
            })
        };
        let outcome = self
            .layer
            .run_once::<(), Unsent, _, _>(message.key(), &message.body, ship);
        let failures = message.failures + 1;
        match outcome.await {
            Ok(Outcome::Executed(()) | Outcome::Replayed(()) | Outcome::ValueNotRecorded) => {
                message.done()
            }
            Ok(Outcome::LeaseLost(())) => {
                tracing::warn!("parcel sent, but the lease was lost: another one may be sent");
                message.done()
            }
            Ok(Outcome::Failed(Unsent::Not(error))) if failures < self.attempts => {
                message.retry(self.backoff.delay(failures), error.to_string())
            }
            Ok(Outcome::Failed(error @ (Unsent::Not(_) | Unsent::Never(_)))) => {
                message.dead_letter(error.to_string())
            }
            Ok(Outcome::Mismatch) => message.dead_letter("the key has another order".to_owned()),
            // A consumer died during an attempt.
            Ok(Outcome::Orphaned { .. }) => message.needs_attention("orphaned".to_owned()),
            Ok(Outcome::NeedsAttention { code }) => message.needs_attention(code),
            Ok(Outcome::InProgress { expires_in }) => message.postpone(expires_in),
            // The message is moved when the layer has a record: the next delivery returns it.
            Ok(Outcome::Failed(error @ Unsent::Perhaps(_)) | Outcome::Unknown(error)) => {
                tracing::warn!(%error, "a parcel may be sent");
                message.postpone(Duration::ZERO)
            }
            // No attempt was made: the store is unavailable, or the process is stopping.
            Err(error) => {
                tracing::warn!(%error, "message could not be tried");
                message.postpone(self.backoff.delay(1))
            }
            Ok(other) => message.needs_attention(format!("{other:?}")),
        }
    }
}

const PERHAPS_SENT: NeedsAttention = NeedsAttention::new("perhaps-sent");
