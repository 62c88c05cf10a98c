use std::time::Duration;

use tokio::time::sleep;
use tower_idempotency::{
    IdempotencyLayer, Lease, OrphanPolicy,
    run_once::{Outcome, WorkError},
};

use crate::{Failure, Tally, Unadded};

/// A number that many writers add to, each update once.
#[derive(Clone, Debug)]
pub struct Counter {
    layer: IdempotencyLayer,
    tally: Tally,
    name: String,
    work: Duration,
    is_careless: bool,
}

impl Counter {
    /// Returns the number under `name`. `layer` sets how long leases last, and how long an update id with another amount is
    /// refused.
    ///
    /// If a writer dies during an update, another writer takes the update over. This is safe because the addition has its
    /// own token, and the database stores the token permanently. So an update is added once even if a retry arrives after
    /// its record has expired.
    #[must_use]
    pub fn new(layer: IdempotencyLayer, tally: Tally, name: impl Into<String>) -> Self {
        Self {
            layer: layer
                .with_namespace("updates")
                .with_orphan_policy(OrphanPolicy::TakeOver),
            tally,
            name: name.into(),
            work: Duration::ZERO,
            is_careless: false,
        }
    }

    /// Sets the time for further work after an update is added. Default: none.
    #[must_use]
    pub fn with_work(self, work: Duration) -> Self {
        Self { work, ..self }
    }

    /// Adds without a token. Do not copy this: an update is added twice if its process dies after the addition.
    #[must_use]
    pub fn careless(self) -> Self {
        Self {
            is_careless: true,
            ..self
        }
    }

    /// Applies an update, unless it has been applied.
    ///
    /// # Errors
    ///
    /// Returns an error if a retry cannot succeed. An update of this id had another amount, the update waits for an
    /// operator, or the database refuses the request.
    pub async fn add(&self, update: &str, amount: u32) -> Result<Applied, Failure> {
        let Self { tally, name, .. } = self.clone();
        let (work, is_careless) = (self.work, self.is_careless);
        let add = async move |lease: Lease| {
            let is_new = if is_careless {
                let added = tally.add_unchecked(&name, amount).await;
                added.map(|()| true).map_err(WorkError::Orphan)?
            } else {
                let token = lease.derive(&name);
                let added = tally.add(&name, amount, &token).await;
                added.map_err(|unadded| match unadded {
                    Unadded::Perhaps(_) => WorkError::Orphan(unadded),
                    Unadded::Not(_) | Unadded::Never(_) => WorkError::Release(unadded),
                })?
            };
            sleep(work).await;
            Ok(is_new)
        };
        let amount = amount.to_be_bytes();
        let outcome = self
            .layer
            .run_once::<bool, Unadded, _, _>(update, amount, add);
        match outcome.await {
            Ok(Outcome::Executed(true) | Outcome::LeaseLost(true)) => Ok(Applied::Now),
            Ok(
                Outcome::Executed(false)
                | Outcome::LeaseLost(false)
                | Outcome::Replayed(_)
                | Outcome::ValueNotRecorded,
            ) => Ok(Applied::Before),
            Ok(Outcome::InProgress { .. } | Outcome::Orphaned { .. }) => Ok(Applied::Later),
            Ok(Outcome::Failed(Unadded::Never(error))) => Err(error),
            Ok(
                Outcome::Failed(Unadded::Not(error) | Unadded::Perhaps(error))
                | Outcome::Unknown(
                    Unadded::Never(error) | Unadded::Not(error) | Unadded::Perhaps(error),
                ),
            ) => {
                tracing::warn!(%error, "update not applied, or its outcome is unknown");
                Ok(Applied::Later)
            }
            Ok(Outcome::Mismatch) => Err("an update of this id had another amount".into()),
            Ok(Outcome::NeedsAttention { code }) => {
                Err(format!("an update of this id waits for an operator: {code}").into())
            }
            Ok(other) => Err(format!("expected an outcome known here, found {other:?}").into()),
            Err(error) => {
                tracing::warn!(%error, "an update could not be tried");
                Ok(Applied::Later)
            }
        }
    }
}

/// The time of an update's addition, relative to the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Applied {
    /// By this call.
    Now,
    /// By another.
    Before,
    /// Not yet, or unknown: another writer applies the update, or the database does not work. Call again with the same id.
    Later,
}
