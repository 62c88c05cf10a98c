//! Execution without HTTP, for queue consumers, scheduled jobs and webhook processors.

mod outcome;

use std::{future::Future, sync::Arc, time::Duration};

use serde::{Serialize, de::DeserializeOwned};

pub(crate) use self::outcome::RunOutcome;
use self::outcome::{WorkResult, outcome_of_record, outcome_of_run};
use crate::{
    digest::{FieldDigest, SERVICE_SCOPE},
    error::Error,
    execution::{
        Execution, HandlerOutcome, PendingRecord,
        acquire::{AcquireOutcome, Attempt},
        detach::Detachable,
        shared::Context,
    },
    layer::IdempotencyLayer,
    lease::{Lease, commits::CommitOutcome},
    record::{Codec, NeedsAttention},
    request::{self, LeaseTerms},
    response::{
        self,
        disposition::{self, NotRecordedReason},
        reject::{admission_error, count_rejection, store_unavailable},
    },
    store::{Claim, Fingerprint, KeyId, RUN_ONCE_OPERATION, StoreError, Token, Ttl},
    telemetry,
};

/// Outcome of [`run_once`](IdempotencyLayer::run_once).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[must_use = "the work may not have run, or may have failed: if the outcome is ignored, its failure is lost"]
pub enum Outcome<T, E> {
    /// The work ran now and returned or committed this value.
    ///
    /// The value is recorded, unless it is too large, or cannot be serialized or read back. Later calls then get
    /// [`ValueNotRecorded`](Self::ValueNotRecorded). If the store fails, the layer retries storing it for one lease duration.
    Executed(T),
    /// Another run returned this value. This call did not run the work, or its run failed.
    Replayed(T),
    /// The work ran before, but its value was not recorded: it was too large, or could not be serialized or read back.
    ValueNotRecorded,
    /// The work ran before and failed, and no operator has resolved the failure yet: see [`WorkError::NeedsAttention`].
    /// This call did not run the work, or its run failed too. A consumer should move the message to its dead-letter queue.
    NeedsAttention {
        /// Code of the [`NeedsAttention`] that the work returned.
        code: String,
    },
    /// The work is running in another execution.
    InProgress {
        /// Time until the lease of the other execution expires, unless it is renewed.
        expires_in: Duration,
    },
    /// The key was used with another fingerprint. Nothing ran.
    Mismatch,
    /// An earlier run ended without an outcome, and the policy refuses a takeover. Nothing ran.
    Orphaned {
        /// Time since the lease of the earlier run expired.
        since: Duration,
    },
    /// Another process may have run the work too, or the outcome of the work's own commit is unknown.
    ///
    /// Contains the value of this run, which may differ from the recorded one.
    LeaseLost(T),
    /// The work returned this value, but an item of its [batch](crate::items::Items::run) can still change. The value is not
    /// recorded, and the key is released like that of [`WorkError::Release`]. A later call runs the work again, which gets the
    /// recorded values and runs the items that are left. So a consumer should not acknowledge the message. Limit its
    /// deliveries: an item that needs attention stays unfinished until an operator resolves it.
    UnfinishedBatch(T),
    /// The work failed. Its key was released, becomes an orphan or needs attention, as the work chose.
    Failed(E),
    /// The work failed, and the recorded outcome is unknown. Contains the error of this run.
    ///
    /// The store cannot report the outcome of the work's own commit, or the work needs attention and its lease was lost. A
    /// later run gets the recorded outcome, runs, or finds the key in progress or orphaned. If the retention has passed
    /// since the commit, the later run may repeat work that was done.
    Unknown(E),
}

/// Failure of work, and the treatment of its key.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WorkError<E> {
    /// Nothing happened. The key is released, and the next attempt runs.
    ///
    /// After a takeover the key becomes an orphan again, since the earlier run may have had its effect.
    Release(E),
    /// Something may have happened. The key becomes an orphan when its lease expires, and the orphan policy decides.
    Orphan(E),
    /// Something happened that no retry may repeat. Every later run gets [`Outcome::NeedsAttention`] and does nothing, until
    /// an operator resolves it.
    NeedsAttention(NeedsAttention, E),
}

/// The `?` operator releases the key. After a step that may have had an effect, map the error to
/// [`Orphan`](WorkError::Orphan) or [`NeedsAttention`](WorkError::NeedsAttention).
impl<E> From<E> for WorkError<E> {
    fn from(error: E) -> Self {
        Self::Release(error)
    }
}

impl IdempotencyLayer {
    /// Runs `work` once for `key`. Later calls return the same value until the retention has passed.
    ///
    /// Work that fails runs again, unless it reports that something may have happened: see [`WorkError`].
    ///
    /// The layer's lease, orphan policy, retention, namespace, secret, store timeout and limit of requests in flight apply.
    /// A value larger than the response limit is not recorded. The other settings do not apply, and neither does
    /// [`StoreFailure`](crate::StoreFailure): without a lease nothing runs.
    ///
    /// `fingerprint` identifies the content of the work. The same key with another fingerprint is a mismatch.
    ///
    /// # The key
    ///
    /// Entries of `run_once` and of HTTP requests never share a key. All calls of `run_once` with one namespace share their
    /// keys: the principal, the route and the type of the value are not parts of them. Two kinds of work with one key and one
    /// fingerprint are one execution, and the second kind never runs. So name the work in the key, or give each kind its own
    /// [`with_namespace`](Self::with_namespace). If clients choose the key, add the caller and the operation, for example as a
    /// JSON array. Otherwise one caller gets the values of another.
    ///
    /// A handler inside this layer may call `run_once`. If it gets an error, or an outcome that can change, add the extension
    /// [`Retention::NoStore`](crate::Retention::NoStore) to its response. Otherwise the layer records a 2xx or a 4xx, and retries
    /// get it. All outcomes can change except `Executed`, `Replayed` and `ValueNotRecorded`.
    ///
    /// # The value
    ///
    /// `work` returns a serde value, which is stored as MessagePack with named fields. If another version of the program
    /// cannot read the value, calls return an error and run nothing until its retention has passed. Each call counts in
    /// `idempotency_bad_record_total`.
    ///
    /// A value that this version cannot read back is not recorded, like one that cannot be serialized. An example is an
    /// `IpAddr` or a `u128` in a type with `#[serde(tag = "..")]`, `#[serde(untagged)]` or `#[serde(flatten)]`.
    ///
    /// In MessagePack, `Some` of a nil value is `None`: `Some(())`, `Some(None)` and `Some` of a JSON `null` are replayed as
    /// `None`. Return an enum of your own if you must distinguish the two.
    ///
    /// # Errors
    ///
    /// - [`StoreUnavailable`](crate::ErrorKind::StoreUnavailable) if no lease could be acquired, or if the entry or its
    ///   record cannot be read.
    /// - [`Overloaded`](crate::ErrorKind::Overloaded) and [`Draining`](crate::ErrorKind::Draining), as for requests.
    /// - [`CallerLimit`](crate::ErrorKind::CallerLimit) if calls outside HTTP, which are one caller, use up their share of a
    ///   limit.
    ///
    /// After these errors the work did not run. The exception is a record that is not a `T`. The work may have committed it,
    /// or another execution may have stored it while the work failed.
    ///
    /// The work ran and returned a value, but neither committed nor rolled back a transaction that it began under its lease:
    ///
    /// - [`UnfinishedTransaction`](crate::ErrorKind::UnfinishedTransaction) if its key was released. A later call runs it
    ///   again.
    /// - [`OutcomeUnknown`](crate::ErrorKind::OutcomeUnknown) if its lease was lost or the store failed, so that the recorded
    ///   outcome is unknown.
    ///
    /// # Panics
    ///
    /// Panics if `work` panics, after [`with_failure`](Self::with_failure) was applied to its key. Panics also if the future is
    /// polled outside a Tokio runtime.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped after it was polled, it continues in a background task. The work runs to completion and its
    /// value is recorded. [`drain`](Self::drain) waits for the task.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::convert::Infallible;
    /// use tower_idempotency::{IdempotencyLayer, MemoryStore, run_once::{WorkError, Outcome}};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_idempotency::Error> {
    /// let once = IdempotencyLayer::new(MemoryStore::new()).with_namespace("invoices");
    /// let send = async |_lease| Ok::<_, WorkError<Infallible>>("sent invoice 7".to_owned());
    ///
    /// let first = once.run_once("message-42", "invoice 7", send).await?;
    /// assert_eq!(first, Outcome::Executed("sent invoice 7".to_owned()));
    /// let redelivered = once.run_once("message-42", "invoice 7", send).await?;
    /// assert_eq!(redelivered, Outcome::Replayed("sent invoice 7".to_owned()));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Work that failed after a possible effect leaves an orphan:
    ///
    /// ```
    /// # use tower_idempotency::{IdempotencyLayer, Lease, MemoryStore, OrphanPolicy, run_once::{WorkError, Outcome}};
    /// # async fn find(_order: u64) -> Result<u64, &'static str> { Ok(7) }
    /// # async fn charge(_amount: u64, _key: String) -> Result<(), &'static str> { Err("no response") }
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_idempotency::Error> {
    /// let once = IdempotencyLayer::new(MemoryStore::new()).with_orphan_policy(OrphanPolicy::Refuse);
    /// let pay = async |lease: Lease| {
    ///     // Nothing has happened: the next run may try.
    ///     let amount = find(42).await?;
    ///     // A missing response does not prove that nothing was charged. With `?`, the next run would charge again.
    ///     charge(amount, lease.derive("charge")).await.map_err(WorkError::Orphan)?;
    ///     Ok(())
    /// };
    /// let failed: Outcome<(), &str> = once.run_once("order-42", "pay", pay).await?;
    /// assert_eq!(failed, Outcome::Failed("no response"));
    /// let redelivered = once.run_once("order-42", "pay", pay).await?;
    /// // `InProgress` until the lease expires, then `Orphaned`.
    /// assert!(matches!(redelivered, Outcome::InProgress { .. }));
    /// # Ok(())
    /// # }
    /// ```
    pub async fn run_once<T, E, W, F>(
        &self,
        key: impl AsRef<[u8]>,
        fingerprint: impl AsRef<[u8]>,
        work: W,
    ) -> Result<Outcome<T, E>, Error>
    where
        W: FnOnce(Lease) -> F + Send + 'static,
        F: Future<Output = Result<T, WorkError<E>>> + Send + 'static,
        T: Serialize + DeserializeOwned + Send + 'static,
        E: Send + 'static,
    {
        let context = Context::for_values(&self.config, &self.shared);
        let config = &*context.config;
        let (rules, layer) = (&config.response, config.layer());
        context.shared.registration.at_request(layer);
        let caller = context.shared.limits.caller(SERVICE_SCOPE);
        let permit = caller.admit(config.limits.max_in_flight, layer);
        let permit =
            permit.map_err(|error| count_rejection(rules, admission_error(rules, error)))?;
        let terms = config.lease_terms(context.shared.owner);
        let (key, fingerprint) = (key.as_ref(), fingerprint.as_ref());
        let claim = build_claim(&config.request, terms, key, fingerprint)
            .map_err(|error| count_rejection(rules, store_unavailable(rules, error)))?;
        let (caller, layer) = (Arc::clone(permit.caller()), layer.clone());
        let attempt = Attempt {
            claim,
            key: None,
            principal: None,
            is_nested: false,
            permit,
        };
        let run = execute(context, attempt, work);
        let ended = Detachable::armed(run, caller, layer).await?;
        Ok(ended.outcome)
    }

    /// Returns the ID of the entry of [`run_once`](Self::run_once) with this key.
    #[must_use]
    pub fn run_once_key_id(&self, key: impl AsRef<[u8]>) -> KeyId {
        key_id(&self.config.request, key.as_ref())
    }
}

fn build_claim(
    rules: &request::rules::Rules,
    terms: LeaseTerms,
    key: &[u8],
    fingerprint: &[u8],
) -> Result<Claim, StoreError> {
    Ok(Claim {
        id: key_id(rules, key),
        fingerprint: Fingerprint::from_bytes(digest(rules, b"fingerprint", fingerprint)),
        token: Token::random()?,
        lease: terms.ttl,
        orphans: terms.orphan_policy,
        orphan_retention: terms.orphan_retention,
        owner: terms.owner,
        operation: Box::from(RUN_ONCE_OPERATION),
        scope: Some(SERVICE_SCOPE),
    })
}

/// Returns the ID of the entry of `key`.
pub(crate) fn key_id(rules: &request::rules::Rules, key: &[u8]) -> KeyId {
    KeyId::from_bytes(digest(rules, b"id", key))
}

fn digest(rules: &request::rules::Rules, name: &[u8], bytes: &[u8]) -> [u8; 32] {
    let mut hash = FieldDigest::new(rules.secret.as_ref());
    hash.field(b"run_once")
        .field(name)
        .field(rules.namespace.as_bytes())
        .field(bytes);
    hash.finish()
}

/// Acquires the lease, runs the work and finishes the lease. Counts an error as a rejection.
pub(crate) async fn execute<T, E, W, F>(
    context: Context,
    attempt: Attempt,
    work: W,
) -> Result<RunOutcome<T, E>, Error>
where
    W: FnOnce(Lease) -> F,
    F: Future<Output = Result<T, WorkError<E>>>,
    T: Serialize + DeserializeOwned,
{
    let ended = acquire_and_run(&context, attempt, work).await;
    ended.map_err(|error| count_rejection(&context.config.response, error))
}

async fn acquire_and_run<T, E, W, F>(
    context: &Context,
    attempt: Attempt,
    work: W,
) -> Result<RunOutcome<T, E>, Error>
where
    W: FnOnce(Lease) -> F,
    F: Future<Output = Result<T, WorkError<E>>>,
    T: Serialize + DeserializeOwned,
{
    let (rules, id) = (&context.config.response, attempt.claim.id);
    let outcome = attempt.acquire(context, None).await;
    outcome.log(&rules.warnings, &id);
    let execution = match outcome {
        AcquireOutcome::Granted(grant) => {
            let begun = grant.begin(context, None, None).await;
            begun.map_err(|error| admission_error(rules, error).with_entry(&id))?
        }
        AcquireOutcome::Mismatch { completed } => {
            return Ok(RunOutcome {
                outcome: Outcome::Mismatch,
                can_change: !completed,
            });
        }
        AcquireOutcome::InProgress { expires_in } => {
            return Ok(RunOutcome::changeable(Outcome::InProgress { expires_in }));
        }
        AcquireOutcome::Orphaned { since } => {
            return Ok(RunOutcome::changeable(Outcome::Orphaned { since }));
        }
        AcquireOutcome::Completed(record) => {
            return outcome_of_record(rules, &id, &record).map(RunOutcome::changeable);
        }
        AcquireOutcome::Failed(failure) => {
            return Err(failure.into_error(context).with_entry(&id));
        }
    };
    let (result, finished) = execution
        .run(async |execution| run_work(execution, rules, &id, work).await)
        .await;
    outcome_of_run(rules, &id, result, finished)
}

/// Runs the work, and decides how its lease ends.
async fn run_work<T, E, W, F>(
    execution: &Execution,
    rules: &response::rules::Rules,
    id: &KeyId,
    work: W,
) -> HandlerOutcome<WorkResult<T, E>>
where
    W: FnOnce(Lease) -> F,
    F: Future<Output = Result<T, WorkError<E>>>,
    T: Serialize + DeserializeOwned,
{
    let lease = &execution.lease;
    let handle = lease.handle();
    let result = {
        let _timer = telemetry::HandlerTimer::start(rules.layer());
        work(handle).await
    };
    let closed = lease.close();
    // An error or another value may contradict the commit that the work reported.
    let is_confirmed = matches!((&closed, &result), (CommitOutcome::Committed(record), Ok(value))
        if disposition::has_value(record, rules, id, value));
    if let Some(record) = execution.committed_record(closed, is_confirmed).await {
        return HandlerOutcome::Committed(WorkResult::from(result), record);
    }
    let pending = |record, retention| PendingRecord {
        status: None,
        record,
        retention,
    };
    match result {
        Ok(_) if lease.has_open_transaction() => {
            telemetry::transaction_unfinished(rules.layer(), id);
            HandlerOutcome::Release(WorkResult::Unfinished, "unfinished_transaction")
        }
        Ok(value) if lease.has_unfinished_batch() => {
            let reason = NotRecordedReason::NoStore.name();
            HandlerOutcome::Release(WorkResult::UnfinishedBatch(value), reason)
        }
        Ok(value) => {
            let record = disposition::encode_readable_value(rules, id, &value);
            let pending = pending(record, rules.retention);
            HandlerOutcome::Record(WorkResult::Value(value), pending)
        }
        Err(WorkError::NeedsAttention(attention, error)) => {
            let record = Codec::encode_attention(id, None, &attention);
            let result = WorkResult::NeedsAttention(attention, error);
            HandlerOutcome::Record(result, pending(record, Ttl::MAX))
        }
        Err(WorkError::Release(error)) => {
            HandlerOutcome::Release(WorkResult::Failed(error), "failed")
        }
        Err(WorkError::Orphan(error)) => HandlerOutcome::Hold(WorkResult::Failed(error)),
    }
}
