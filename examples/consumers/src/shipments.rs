use std::time::Duration;

use tokio::time::sleep;
use tower_idempotency::{
    IdempotencyLayer, Lease, NeedsAttention, OrphanPolicy, Ttl,
    run_once::{Outcome, WorkError},
};

use crate::{Failure, Tally, Unadded};

/// A queue's consumer, which sends a parcel for each message.
///
/// The content of a message is its key, and its record expires after five minutes, as in a FIFO queue with content-based
/// deduplication. If a consumer dies at a message, the orphan is stored for longer than a queue stores messages.
#[derive(Clone, Debug)]
pub struct Shipments {
    layer: IdempotencyLayer,
    parcels: Tally,
    packing: Duration,
    work: Duration,
}

/// The consumer's decision about a delivery.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The parcel is sent: delete the message.
    Delete,
    /// The parcel is being sent, or was not sent: let the queue deliver the message again.
    Leave,
    /// The outcome is unknown, and a retry may send the parcel twice: store the message for an operator to inspect.
    DeadLetter(String),
}

impl Shipments {
    /// Counts the parcels that were sent under the content of their messages. `layer` sets how long leases last.
    #[must_use]
    pub fn new(layer: IdempotencyLayer, parcels: Tally) -> Self {
        Self {
            layer: layer
                .with_namespace("shipments")
                .with_retention(WINDOW)
                .with_orphan_policy(OrphanPolicy::Refuse)
                // By default an orphan expires with the retention of records, and a later delivery is then sent again.
                .with_orphan_retention(QUEUE_RETENTION),
            parcels,
            packing: Duration::ZERO,
            work: Duration::ZERO,
        }
    }

    /// Sets the time after which an equal message gets another parcel. Default: five minutes.
    ///
    /// If it is shorter than the time between two deliveries of one message, the parcel is sent twice.
    #[must_use]
    pub fn with_window(self, window: Ttl) -> Self {
        Self {
            layer: self.layer.with_retention(window),
            ..self
        }
    }

    /// Sets the time to pack a parcel, before it is sent. Default: none.
    #[must_use]
    pub fn with_packing(self, packing: Duration) -> Self {
        Self { packing, ..self }
    }

    /// Sets the time for further work after a parcel is sent. Default: none.
    #[must_use]
    pub fn with_work(self, work: Duration) -> Self {
        Self { work, ..self }
    }

    /// Takes over from consumers that died. Do not copy this: a parcel is sent twice if its consumer died after sending it.
    #[must_use]
    pub fn careless(self) -> Self {
        Self {
            layer: self.layer.with_orphan_policy(OrphanPolicy::TakeOver),
            ..self
        }
    }

    /// Handles one delivery of a message.
    pub async fn receive(&self, message: &str) -> Verdict {
        let (parcels, order) = (self.parcels.clone(), message.to_owned());
        let (packing, work) = (self.packing, self.work);
        let ship = async move |lease: Lease| {
            sleep(packing).await;
            if !lease.is_held() {
                // This process was paused, and an operator may have sent the parcel meanwhile. A release would delete the orphan.
                let lost = Failure::from("the lease is lost");
                return Err(WorkError::Orphan(lost));
            }
            let sent = parcels.add_unchecked(&order, 1).await;
            sent.map_err(|unsent| match unsent {
                Unadded::Perhaps(error) => WorkError::NeedsAttention(PERHAPS_SENT, error),
                Unadded::Not(error) | Unadded::Never(error) => WorkError::Release(error),
            })?;
            sleep(work).await;
            Ok(())
        };
        let outcome = self
            .layer
            .run_once::<(), Failure, _, _>(message, message, ship);
        match outcome.await {
            Ok(Outcome::Executed(()) | Outcome::Replayed(()) | Outcome::ValueNotRecorded) => {
                Verdict::Delete
            }
            Ok(Outcome::LeaseLost(())) => {
                tracing::warn!(
                    "lease lost after a parcel was sent: another parcel may have been sent"
                );
                Verdict::Delete
            }
            Ok(Outcome::NeedsAttention { code }) => Verdict::DeadLetter(code),
            // A consumer died during the execution.
            Ok(Outcome::Orphaned { .. }) => Verdict::DeadLetter("orphaned".to_owned()),
            Ok(Outcome::InProgress { .. }) => Verdict::Leave,
            // If it needs attention, the next delivery returns `NeedsAttention`.
            Ok(Outcome::Failed(error) | Outcome::Unknown(error)) => {
                tracing::warn!(%error, "parcel not sent, or its outcome is unknown");
                Verdict::Leave
            }
            Err(error) => {
                tracing::warn!(%error, "a message could not be tried");
                Verdict::Leave
            }
            Ok(other) => Verdict::DeadLetter(format!("{other:?}")),
        }
    }
}

/// The deduplication window of FIFO queues.
const WINDOW: Ttl = Ttl::from_secs(5 * 60);
/// The longest time for which a queue stores messages.
const QUEUE_RETENTION: Ttl = Ttl::from_secs(14 * 24 * 60 * 60);
const PERHAPS_SENT: NeedsAttention = NeedsAttention::new("perhaps-sent");
