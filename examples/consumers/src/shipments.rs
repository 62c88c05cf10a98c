use std::time::Duration;

use tokio::time::sleep;
use tower_idempotency::{
    IdempotencyLayer, NeedsAttention, Ttl,
    run_once::{Failed, Outcome},
};

use crate::{Failure, Tally};

/// A queue's consumer, which sends a parcel for each message.
///
/// The content of a message is its key, as in a FIFO queue with content-based deduplication, and as there it is known for
/// five minutes.
#[derive(Clone, Debug)]
pub struct Shipments {
    once: IdempotencyLayer,
    parcels: Tally,
    packing: Duration,
}

/// What becomes of a delivery.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The parcel is sent: delete the message.
    Delete,
    /// It is being sent, or was not: let the queue deliver the message again.
    Leave,
    /// Nobody knows whether it was sent, and whoever sends it again may send it twice: keep the message for somebody who
    /// can look.
    DeadLetter(String),
}

impl Shipments {
    /// Counts the parcels that were sent under the content of their messages. `layer` says how long leases last.
    #[must_use]
    pub fn new(layer: IdempotencyLayer, parcels: Tally) -> Self {
        Self {
            once: layer.with_namespace("shipments").with_retention(WINDOW),
            parcels,
            packing: Duration::ZERO,
        }
    }

    /// How long it takes to pack a parcel, before it is sent. Default: no time.
    #[must_use]
    pub fn with_packing(self, packing: Duration) -> Self {
        Self { packing, ..self }
    }

    /// Handles one delivery of a message.
    pub async fn receive(&self, message: &str) -> Verdict {
        let (parcels, packing, order) = (self.parcels.clone(), self.packing, message.to_owned());
        let ship = async move |_lease| {
            sleep(packing).await;
            let sent = parcels.add_unchecked(&order, 1).await;
            sent.map_err(|unsent| match unsent.is_certain {
                true => Failed::Release(unsent.error),
                false => Failed::NeedsAttention(PERHAPS_SENT, unsent.error),
            })
        };
        match self
            .once
            .run_once::<(), Failure, _, _>(message, message, ship)
            .await
        {
            Ok(
                Outcome::Executed(())
                | Outcome::Replayed(())
                | Outcome::LeaseLost(())
                | Outcome::NotRetained,
            ) => Verdict::Delete,
            Ok(Outcome::NeedsAttention { code }) => Verdict::DeadLetter(code),
            // A consumer died while it was at it.
            Ok(Outcome::Orphaned { .. }) => Verdict::DeadLetter("orphaned".to_owned()),
            // If it needs attention, the next delivery is told so.
            Ok(Outcome::InProgress { .. } | Outcome::Failed(_)) | Err(_) => Verdict::Leave,
            Ok(other) => Verdict::DeadLetter(format!("{other:?}")),
        }
    }
}

/// As long as FIFO queues know a message again.
const WINDOW: Ttl = Ttl::from_secs(5 * 60);
const PERHAPS_SENT: NeedsAttention = NeedsAttention::new("perhaps-sent");
