use std::time::Duration;

use tokio::time::sleep;
use tower_idempotency::{
    IdempotencyLayer, Lease, OrphanPolicy,
    run_once::{Failed, Outcome},
};

use crate::{Failure, Tally};

/// A number that many writers add to, each update once.
#[derive(Clone, Debug)]
pub struct Counter {
    once: IdempotencyLayer,
    tally: Tally,
    name: String,
    work: Duration,
    is_careless: bool,
}

impl Counter {
    /// The number under `name`. `layer` says how long leases last and how long updates are known.
    ///
    /// Whoever died on the way is taken over from, which is safe because the addition has a token of its own: the database
    /// knows it again.
    #[must_use]
    pub fn new(layer: IdempotencyLayer, tally: Tally, name: impl Into<String>) -> Self {
        Self {
            once: layer
                .with_namespace("updates")
                .with_orphans(OrphanPolicy::TakeOver),
            tally,
            name: name.into(),
            work: Duration::ZERO,
            is_careless: false,
        }
    }

    /// What else there is to do for an update once it is added. Default: nothing.
    #[must_use]
    pub fn with_work(self, work: Duration) -> Self {
        Self { work, ..self }
    }

    /// What not to copy: adds without a token. An update whose process dies after the addition is added twice.
    #[must_use]
    pub fn careless(self) -> Self {
        Self {
            is_careless: true,
            ..self
        }
    }

    /// Applies an update, unless it has been applied; `None` when it has not been, or nobody knows: try again later with
    /// the same id.
    ///
    /// # Errors
    ///
    /// When an update of this id has another amount.
    pub async fn add(&self, update: &str, amount: u32) -> Result<Option<Applied>, Failure> {
        let Self { tally, name, .. } = self.clone();
        let (work, is_careless) = (self.work, self.is_careless);
        let add = async move |lease: Lease| {
            if is_careless {
                let added = tally.add_unchecked(&name, amount).await;
                added.map_err(|unadded| Failed::Hold(unadded.error))?;
            } else {
                let token = lease.derive(&format!("{}/{name}", tally.table()));
                tally.add(&name, amount, &token).await?;
            }
            sleep(work).await;
            Ok(())
        };
        let once = self
            .once
            .run_once::<_, Failure, _, _>(update, amount.to_be_bytes(), add);
        match once.await {
            Ok(Outcome::Executed(()) | Outcome::LeaseLost(())) => Ok(Some(Applied::Now)),
            Ok(Outcome::Replayed(()) | Outcome::NotRetained) => Ok(Some(Applied::Before)),
            Ok(Outcome::Mismatch) => Err("this update was of another amount".into()),
            Ok(Outcome::Failed(error)) => {
                tracing::warn!(%error, "an update was not applied");
                Ok(None)
            }
            // In progress, or an orphan that another writer has just seen: later.
            Ok(_) => Ok(None),
            Err(error) => {
                tracing::warn!(%error, "an update could not be tried");
                Ok(None)
            }
        }
    }
}

/// When an update was applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Applied {
    /// By this call.
    Now,
    /// By another.
    Before,
}
