//! The same engine without HTTP: for queue consumers, scheduled jobs and webhooks' inner halves.

use std::{future::Future, panic::resume_unwind, pin::pin, sync::Arc, time::Duration};

use bytes::Bytes;
use serde::{Serialize, de::DeserializeOwned};

use crate::{
    config::Config,
    error::Error,
    execution::finish::{Instead, Produced, let_go, settle},
    execution::reconcile::{Found, look_once_more},
    execution::shared::{Engine, Failure},
    future::{Detach, Detachable, catch_panic},
    layer::IdempotencyLayer,
    lease::commits::Committed,
    lease::{Grant, Lease},
    limits::Place,
    record::{Codec, NeedsAttention, Record},
    request::fingerprint::Fields,
    response::disposition,
    response::reject::{turned_away, unavailable, unreadable},
    store::{Acquired, Claim, Fingerprint, KeyId, Token, Ttl},
    telemetry,
};

/// How a [`run_once`](IdempotencyLayer::run_once) ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[must_use = "nothing may have run, or it may have failed: whoever goes on as if it had not loses the work"]
pub enum Outcome<T, E> {
    /// The work ran now, and this is what it returned, or has committed itself. It is recorded, or the store is failing and it will be tried
    /// again for as long as a lease, from now on.
    Executed(T),
    /// The work ran before, and this is what it returned then.
    Replayed(T),
    /// The work ran before, but what it returned was not retained: it was larger than the store keeps, or could not be
    /// serialised.
    NotRecorded,
    /// The work ran before, failed, and nobody has resolved what became of it: see [`WorkError::NeedsAttention`]. Nothing
    /// ran. For a consumer: a message for the dead letters.
    NeedsAttention {
        /// Of the [`NeedsAttention`] that the work ended with.
        code: String,
    },
    /// The work is running now, elsewhere.
    InProgress {
        /// Until its lease ends, unless it is renewed.
        expires_in: Duration,
    },
    /// The key was used with another fingerprint. Nothing ran.
    Mismatch,
    /// An earlier run ended without an outcome, and the policy refuses to take over. Nothing ran.
    Orphaned {
        /// How long ago its lease ended.
        since: Duration,
    },
    /// The work ran now, but its lease was lost meanwhile: somebody else ran it too, or runs it still; or the store cannot
    /// be asked whether a commit of the work's own is what is recorded. This is what ours returned; it may not be what is
    /// recorded.
    LeaseLost(T),
    /// The work failed, and the key was freed, is held or needs attention, as the work chose.
    Failed(E),
    /// The work failed, and nobody knows what is recorded: the store cannot be asked what became of a commit of the work's own,
    /// or the work needs attention and its lease was lost meanwhile. This is what ours failed with. A later run is told what is
    /// recorded, runs, or finds the key in progress or orphaned; where the retention has passed since the commit, it may run
    /// though all was done.
    Unknown(E),
}

/// How work failed, and what is to become of its key.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WorkError<E> {
    /// Nothing happened: free the key, and let the next attempt run. After a takeover the key is an orphan again, as what
    /// was taken over may have had its effect.
    Release(E),
    /// Something may have happened: let the lease run out, and the orphan policy decide.
    Hold(E),
    /// Something has happened that no retry may repeat: every later run is told so, and does nothing, until an operator
    /// resolves it.
    NeedsAttention(NeedsAttention, E),
}

/// `?` frees the key. After anything that may have had an effect, map the error to [`Hold`](WorkError::Hold) or
/// [`NeedsAttention`](WorkError::NeedsAttention).
impl<E> From<E> for WorkError<E> {
    fn from(error: E) -> Self {
        Self::Release(error)
    }
}

impl IdempotencyLayer {
    /// Runs `work` once for `key`, and returns what it returned ever after, within the retention. Work that fails runs again,
    /// unless it says that something may have happened: see [`WorkError`].
    ///
    /// The layer's lease, orphan policy, retention, namespace, secret, store timeout and number of requests in flight
    /// apply, and a value larger than its response limit is not retained; the other decisions do not apply, nor does
    /// [`StoreFailure`](crate::StoreFailure): without a lease nothing runs.
    ///
    /// `fingerprint` is what the work is about: the same key with another one is a mismatch. Entries of `run_once` and of
    /// HTTP requests never meet, whatever their keys.
    ///
    /// `work` returns any serde value, which is kept as MessagePack with named fields; a value that another version of
    /// the program can no longer read is an error until its retention is over, and is not run again before. There, `Some` of
    /// what is nil by itself is `None`: `Some(())`, `Some(None)` and `Some` of a JSON `null` are replayed as `None`. Return an
    /// enum of your own where that tells two outcomes apart.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::StoreUnavailable`](crate::ErrorKind::StoreUnavailable) when no lease could be taken or the record cannot be read,
    /// [`Overloaded`](crate::ErrorKind::Overloaded) and [`Draining`](crate::ErrorKind::Draining) as for requests. The
    /// work did not run now, unless it has committed a record that is not of a `T`: then that is what cannot be read.
    ///
    /// # Panics
    ///
    /// When `work` panics, after its key was freed; and when it is polled outside of a Tokio runtime.
    ///
    /// # Cancellation
    ///
    /// Dropped once it has been polled, it goes on in a task of its own: the work runs to its end and its value is
    /// recorded. [`drain`](Self::drain) waits for it.
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
    /// What cannot be taken back, and may have happened though it failed, holds the key:
    ///
    /// ```
    /// # use tower_idempotency::{IdempotencyLayer, Lease, MemoryStore, OrphanPolicy, run_once::{WorkError, Outcome}};
    /// # async fn find(_order: u64) -> Result<u64, &'static str> { Ok(7) }
    /// # async fn charge(_amount: u64, _key: String) -> Result<(), &'static str> { Err("no answer") }
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_idempotency::Error> {
    /// let once = IdempotencyLayer::new(MemoryStore::new()).with_orphan_policy(OrphanPolicy::Refuse);
    /// let pay = async |lease: Lease| {
    ///     // Nothing has happened: the next run may try.
    ///     let amount = find(42).await?;
    ///     // No answer is not no charge, and `?` alone would let the next run charge again.
    ///     charge(amount, lease.derive("charge")).await.map_err(WorkError::Hold)?;
    ///     Ok(())
    /// };
    /// let failed: Outcome<(), &str> = once.run_once("order-42", "pay", pay).await?;
    /// assert_eq!(failed, Outcome::Failed("no answer"));
    /// let redelivered = once.run_once("order-42", "pay", pay).await?;
    /// // Until the lease is over; then `Orphaned`.
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
        let (config, engine) = (Arc::clone(&self.config), Arc::clone(&self.engine));
        let place = engine.limits.enter(config.limits.max_in_flight);
        let place = place.map_err(|no_place| turned_away(&config, &no_place))?;
        let claim = claim(&config, &engine, key.as_ref(), fingerprint.as_ref())?;
        let detach = Arc::<Detach>::default();
        detach.arm();
        Detachable::new(exchange(config, engine, claim, place, work), detach).await
    }
}

fn claim(config: &Config, engine: &Engine, key: &[u8], fingerprint: &[u8]) -> Result<Claim, Error> {
    let digest = |name: &[u8], bytes: &[u8]| {
        let mut hash = Fields::new(config.request.secret.as_ref());
        hash.field(b"run_once")
            .field(name)
            .field(config.request.namespace.as_bytes())
            .field(bytes);
        hash.finish()
    };
    let token = Token::random().map_err(|error| unavailable(config, Failure::Store(error)))?;
    Ok(Claim {
        id: KeyId::from_bytes(digest(b"id", key)),
        fingerprint: Fingerprint::from_bytes(digest(b"fingerprint", fingerprint)),
        token,
        lease: config.execution.lease,
        orphans: config.execution.orphans,
        orphan_retention: config.orphan_retention(),
        owner: engine.owner,
        operation: Box::from("run_once"),
    })
}

/// One run's whole life, in the order of [`crate::execution`].
async fn exchange<T, E, W, F>(
    config: Arc<Config>,
    engine: Arc<Engine>,
    claim: Claim,
    place: Place,
    work: W,
) -> Result<Outcome<T, E>, Error>
where
    W: FnOnce(Lease) -> F,
    F: Future<Output = Result<T, WorkError<E>>>,
    T: Serialize + DeserializeOwned,
{
    let (acquired, sent) = match engine.acquire(&claim, config.execution.store_timeout).await {
        Ok(answer) => answer,
        Err(failure) => {
            engine.give_back_later(&config, &claim, place);
            return Err(unavailable(&config, failure));
        }
    };
    if let Acquired::InProgress { fingerprint, .. }
    | Acquired::Orphaned { fingerprint, .. }
    | Acquired::Completed { fingerprint, .. } = &acquired
        && *fingerprint != claim.fingerprint
    {
        telemetry::mismatch(&claim.id);
        return Ok(Outcome::Mismatch);
    }
    let lease = match acquired {
        Acquired::Granted {
            generation,
            takeover,
        } => {
            telemetry::granted(&claim.id, generation, takeover);
            let grant = Grant {
                config: Arc::clone(&config),
                engine: Arc::clone(&engine),
                claim,
                generation,
                takeover,
                broke: None,
                sent,
            };
            engine.renewer.keep(grant).await
        }
        Acquired::InProgress { expires_in, .. } => {
            telemetry::in_progress(&claim.id);
            return Ok(Outcome::InProgress { expires_in });
        }
        Acquired::Orphaned { since, .. } => {
            telemetry::orphaned(&claim.id);
            return Ok(Outcome::Orphaned { since });
        }
        Acquired::Completed { record, .. } => {
            return read(&config, &claim.id, &record);
        }
    };

    let handle = lease.handle();
    let started = telemetry::start();
    let produced = catch_panic(pin!(async { work(handle).await })).await;
    telemetry::handler_time(started);
    let limit = config.execution.store_timeout;
    let produced = match (lease.close(), produced) {
        (Committed::Record(record), Err(panic)) => {
            telemetry::recorded(lease.id(), &record);
            resume_unwind(panic)
        }
        // Whatever the work has said since: one key, one value.
        (Committed::Record(record), Ok(value)) => {
            telemetry::recorded(lease.id(), &record);
            if let Err(WorkError::NeedsAttention(late, _)) = &value {
                telemetry::attention_ignored(lease.id(), late.code(), "a value was committed");
            }
            return committed(&config, lease.id(), &record, value.ok());
        }
        (Committed::Nothing | Committed::Unknown, produced) => produced,
    };
    let id = *lease.id();
    let (produced, record, retention) = match produced {
        Ok(Ok(value)) => {
            let record = disposition::value(&config, &id, &value);
            (Ok(value), record, config.response.retention)
        }
        Ok(Err(WorkError::NeedsAttention(attention, error))) => {
            let record = Codec::encode_attention(&id, None, &attention);
            (Err(error), record, Ttl::MAX)
        }
        Ok(Err(WorkError::Release(error))) => {
            return match let_go(&config, &engine, lease, place, "failed").await {
                Some(Instead::Committed(record)) => committed(&config, &id, &record, None),
                Some(Instead::Record(record)) => read(&config, &id, &record),
                Some(Instead::Unknown { .. }) => Ok(Outcome::Unknown(error)),
                None => Ok(Outcome::Failed(error)),
            };
        }
        Ok(Err(WorkError::Hold(error))) => {
            // A commit of the work's own that nobody has heard of may be what is stored.
            let found = if lease.is_in_doubt() {
                Some(Box::pin(look_once_more(&config, &engine, &lease, place)).await)
            } else {
                None
            };
            return match found {
                Some(Found::Record(record)) if lease.commit.has_begun_with(&record) => {
                    telemetry::recorded(&id, &record);
                    committed(&config, &id, &record, None)
                }
                Some(Found::Record(record)) => read(&config, &id, &record),
                Some(Found::Unknown) => {
                    telemetry::held(&id);
                    Ok(Outcome::Unknown(error))
                }
                Some(Found::Held(_) | Found::Orphan | Found::Lost) | None => {
                    telemetry::held(&id);
                    Ok(Outcome::Failed(error))
                }
            };
        }
        Err(panic) => {
            engine.end(lease, limit, place, "panic").await;
            resume_unwind(panic)
        }
    };
    let made = Produced {
        status: None,
        record,
        retention,
    };
    match settle(&config, &engine, lease, place, made).await {
        None => Ok(executed(produced)),
        Some(Instead::Committed(record)) => committed(&config, &id, &record, produced.ok()),
        Some(Instead::Record(_) | Instead::Unknown { .. }) => Ok(lost(produced)),
    }
}

/// What a record holds that this run has committed itself; where that is no more than that it did, what it `returned`.
fn committed<T: DeserializeOwned, E>(
    config: &Config,
    id: &KeyId,
    record: &Bytes,
    returned: Option<T>,
) -> Result<Outcome<T, E>, Error> {
    Ok(match (outcome(decode(config, id, record)?)?, returned) {
        (Outcome::Replayed(value), _) | (Outcome::NotRecorded, Some(value)) => {
            Outcome::Executed(value)
        }
        (other, _) => other,
    })
}

/// What a record holds of an earlier run.
fn read<T: DeserializeOwned, E>(
    config: &Config,
    id: &KeyId,
    record: &Bytes,
) -> Result<Outcome<T, E>, Error> {
    let record = decode(config, id, record)?;
    match &record {
        Record::Tombstone { status, reason } => telemetry::tombstone(id, *status, *reason),
        Record::Attention { status, attention } => {
            telemetry::unresolved(id, *status, attention.code());
        }
        Record::Value(_) | Record::Response(_) => {}
    }
    let outcome = outcome(record)?;
    if let Outcome::Replayed(_) = &outcome {
        telemetry::replayed(id, None);
    }
    Ok(outcome)
}

fn decode(config: &Config, id: &KeyId, record: &Bytes) -> Result<Record, Error> {
    config.response.codec().decode(id, record).map_err(|error| {
        telemetry::bad_record(id, &error);
        unreadable(error)
    })
}

fn outcome<T: DeserializeOwned, E>(record: Record) -> Result<Outcome<T, E>, Error> {
    Ok(match record {
        // The parser's own message may quote the value.
        Record::Value(value) => Outcome::Replayed(
            rmp_serde::from_slice(&value)
                .map_err(|_| unreadable("expected a value of the type asked for, found another"))?,
        ),
        Record::Tombstone { .. } => Outcome::NotRecorded,
        Record::Attention { attention, .. } => Outcome::NeedsAttention {
            code: attention.code().to_owned(),
        },
        Record::Response(_) => return Err(unreadable("it is of an HTTP response")),
    })
}

fn executed<T, E>(produced: Result<T, E>) -> Outcome<T, E> {
    produced.map_or_else(Outcome::Failed, Outcome::Executed)
}

fn lost<T, E>(produced: Result<T, E>) -> Outcome<T, E> {
    produced.map_or_else(Outcome::Unknown, Outcome::LeaseLost)
}
