//! The store. Each method makes a conditional write.

use std::{fmt, sync::Arc, time::Duration};

use aws_sdk_dynamodb::{
    Client,
    config::{IdentityCache, retry::RetryConfig, timeout::TimeoutConfig},
};
use bytes::Bytes;
use tokio::time::sleep;
use tower_idempotency::store::{
    Acquired, CheckError, Claim, KeyId, LeaseRef, OrphanPolicy, Store, StoreError, Token, Ttl,
};

use crate::{
    error::DynamoDbError,
    expression::{self},
    identity_cache::BackgroundIdentityCache,
    item::{EntryState, IN_PROGRESS, binary, n, number, s},
    options::DynamoDbOptions,
    table_client::TableClient,
    writes::{AcquireTarget, Attempts, RETURN_NOTHING, WriteOutcome},
};

/// A store of leases and records in a DynamoDB table, for any number of processes.
///
/// Clones share their client.
///
/// # Cancellation
///
/// A dropped call may or may not reach the service. The service executes it completely or not at all.
#[derive(Clone)]
pub struct DynamoDbStore {
    pub(crate) inner: Arc<TableClient>,
}

impl DynamoDbStore {
    /// Creates a store on this table, with the default [`DynamoDbOptions`] and a client of the application.
    ///
    /// Makes no call. A missing table becomes visible with the first request, or with
    /// [`create_table`](Self::create_table).
    pub fn new(client: &Client, table: impl Into<String>) -> Self {
        DynamoDbOptions::new().store(client, table)
    }
}

impl DynamoDbOptions {
    /// Creates a store on this table, with the credentials, region and endpoint of the application's client. Makes no call.
    pub fn store(self, client: &Client, table: impl Into<String>) -> DynamoDbStore {
        let retries = RetryConfig::standard()
            .with_max_attempts(self.attempts)
            .with_initial_backoff(Duration::from_millis(25))
            .with_max_backoff(Duration::from_millis(250));
        let timeouts = client.config().timeout_config().cloned();
        let timeouts = timeouts
            .map_or_else(TimeoutConfig::builder, |it| it.to_builder())
            .operation_timeout(self.timeout)
            .build();
        let credentials = client.config().identity_cache();
        let credentials = credentials.unwrap_or_else(|| IdentityCache::lazy().build());
        let config = client.config().to_builder();
        let config = config.retry_config(retries).timeout_config(timeouts);
        let config = config.identity_cache(BackgroundIdentityCache::new(credentials));
        DynamoDbStore {
            inner: Arc::new(TableClient {
                client: Client::from_conf(config.build()),
                admin_client: self.admin_client(client),
                table: table.into(),
                options: self,
            }),
        }
    }

    /// Returns the application's client, with a timeout for each attempt if the application has set none. By default, the SDK
    /// waits without limit for a reply.
    fn admin_client(&self, client: &Client) -> Client {
        let config = client.config();
        let timeouts = config.timeout_config().cloned();
        let timeouts = timeouts.unwrap_or_else(|| TimeoutConfig::builder().build());
        let limits = [
            timeouts.operation_timeout(),
            timeouts.operation_attempt_timeout(),
            timeouts.read_timeout(),
        ];
        if limits.iter().any(Option::is_some) {
            return client.clone();
        }
        let timeouts = timeouts
            .to_builder()
            .operation_attempt_timeout(self.timeout.max(MIN_ADMIN_TIMEOUT))
            .build();
        Client::from_conf(config.to_builder().timeout_config(timeouts).build())
    }
}

impl TableClient {
    /// Acquires the lease, or returns the state that prevents it. `attempts` is the maximum number of attempts of the SDK.
    pub(crate) async fn acquire(
        &self,
        claim: &Claim,
        attempts: Attempts,
    ) -> Result<Acquired, StoreError> {
        let moment = self.options.clock.read();
        let requested = moment.now.saturating_add(claim.lease.as_millis());
        let mut target = AcquireTarget::Any;
        for _ in 0..MAX_ATTEMPTS {
            let sent = self.acquire_lease(claim, target, moment, attempts).await?;
            target = AcquireTarget::Any;
            let item = match sent {
                WriteOutcome::Applied(new) => {
                    let generation = number(&new, "generation")?;
                    return Ok(Acquired::Granted {
                        generation,
                        takeover: generation > 1,
                    });
                }
                WriteOutcome::ConditionFailed(item) => {
                    self.conflicting_item(item, &claim.id).await?
                }
            };
            let Some(item) = item else { continue };
            match EntryState::read(item, moment)? {
                EntryState::Expired => {
                    let outcome = self.replace_expired(claim, moment, attempts).await?;
                    if let WriteOutcome::Applied(_) = outcome {
                        return Ok(Acquired::Granted {
                            generation: 1,
                            takeover: false,
                        });
                    }
                }
                EntryState::Completed {
                    token,
                    fingerprint,
                    expires,
                    record,
                } => {
                    return Ok(Acquired::Completed {
                        fingerprint,
                        record,
                        expires_in: moment.until(expires),
                        token: token.map(Token::from_bytes),
                    });
                }
                // This token holds the lease for long enough. An earlier attempt was granted after the condition failed, or the
                // clock went back. No write shortens the lease, because the service may apply it after a renewal.
                EntryState::Leased {
                    token,
                    generation,
                    lease_ends,
                    ..
                } if token == Some(*claim.token.as_bytes()) && lease_ends >= requested => {
                    return Ok(Acquired::Granted {
                        generation,
                        takeover: generation > 1,
                    });
                }
                // This token holds the lease for another request, or was granted it after the condition failed.
                EntryState::Leased { token, .. } if token == Some(*claim.token.as_bytes()) => {
                    target = AcquireTarget::OwnLease;
                }
                EntryState::Leased {
                    fingerprint,
                    lease_ends,
                    ..
                } if lease_ends > moment.passed => {
                    return Ok(Acquired::InProgress {
                        fingerprint,
                        expires_in: moment.until(lease_ends),
                    });
                }
                EntryState::Leased {
                    token,
                    fingerprint,
                    lease_ends,
                    ..
                } => {
                    let may_take_over = match claim.orphans {
                        OrphanPolicy::TakeOver => true,
                        OrphanPolicy::Refuse => {
                            token.is_some_and(|token| Token::from_bytes(token).allows_retry())
                        }
                        OrphanPolicy::Never => false,
                    };
                    // The entry changed after the condition failed. It is an orphan now that this claim may take over.
                    if may_take_over && fingerprint == claim.fingerprint {
                        continue;
                    }
                    return Ok(Acquired::Orphaned {
                        fingerprint,
                        since: moment.since(lease_ends),
                    });
                }
            }
        }
        Err(DynamoDbError::contended().into())
    }
}

impl fmt::Debug for DynamoDbStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DynamoDbStore")
            .field("table", &self.inner.table)
            .field("options", &self.inner.options)
            .finish_non_exhaustive()
    }
}

impl Store for DynamoDbStore {
    /// The SDK repeats no attempt without a reply, because the attempt may be applied later, even after a release. The layer
    /// repeats it, and repeats the release too.
    async fn acquire(&self, claim: &Claim) -> Result<Acquired, StoreError> {
        self.inner.acquire(claim, Attempts::WhileRejected).await
    }

    /// Extends the lease. The first write is refused if the clock went back, or if `ttl` is shorter than before. A second one then
    /// shortens the lease that the first one has found. A write that the service applies after a later renewal changes nothing.
    async fn renew(&self, lease: &LeaseRef, ttl: Ttl) -> Result<(), StoreError> {
        let inner = &*self.inner;
        let mut seen: Option<u64> = None;
        for _ in 0..MAX_ATTEMPTS {
            // Each write reads the clock: after a refusal, a longer lease may have been granted meanwhile, which the next write keeps.
            let moment = inner.options.clock.read();
            let lease_ends = moment.now.saturating_add(ttl.as_millis());
            let mut values = vec![
                (":in_progress", s(IN_PROGRESS)),
                (":token", binary(*lease.token.as_bytes())),
                (":passed", n(moment.passed)),
                (":lease_ends", n(lease_ends)),
                (":ttl", n(moment.ttl(lease_ends))),
            ];
            let condition = match seen {
                Some(seen) if seen > lease_ends => {
                    values.push((":seen_lease_ends", n(seen)));
                    expression::CAN_SHORTEN
                }
                _ => expression::CAN_EXTEND,
            };
            let (id, token, update) = (&lease.id, &lease.token, expression::RENEW);
            let write = inner.update(id, token, condition, update, RETURN_NOTHING, values);
            let item = match write.await? {
                WriteOutcome::Applied(_) => return Ok(()),
                WriteOutcome::ConditionFailed(item) => inner.conflicting_item(item, id).await?,
            };
            let Some(item) = item else {
                return Err(StoreError::LeaseLost);
            };
            match EntryState::read(item, moment)? {
                EntryState::Leased {
                    token, lease_ends, ..
                } if token == Some(*lease.token.as_bytes()) => seen = Some(lease_ends),
                EntryState::Leased { .. } | EntryState::Completed { .. } | EntryState::Expired => {
                    return Err(StoreError::LeaseLost);
                }
            }
        }
        Err(DynamoDbError::contended().into())
    }

    async fn complete(
        &self,
        lease: &LeaseRef,
        record: Bytes,
        retention: Ttl,
    ) -> Result<(), StoreError> {
        let inner = &*self.inner;
        let limit = inner.options.record_limit;
        if record.len() > limit {
            return Err(StoreError::RecordTooLarge { limit });
        }
        let moment = inner.options.clock.read();
        for _ in 0..MAX_ATTEMPTS {
            let outcome = inner
                .write_record(lease, &record, retention, moment)
                .await?;
            let item = match outcome {
                WriteOutcome::Applied(_) => return Ok(()),
                WriteOutcome::ConditionFailed(item) => {
                    inner.conflicting_item(item, &lease.id).await?
                }
            };
            let Some(item) = item else { continue };
            match EntryState::read(item, moment)? {
                // This token completed the entry: a reply was lost, or another attempt of the SDK was applied.
                EntryState::Completed { token, .. } if token == Some(*lease.token.as_bytes()) => {
                    return Ok(());
                }
                EntryState::Completed { .. } => return Err(StoreError::LeaseLost),
                EntryState::Leased { token, .. }
                    if token.is_some_and(|it| it != *lease.token.as_bytes()) =>
                {
                    return Err(StoreError::LeaseLost);
                }
                // The entry changed after the condition failed, and this token may complete it now.
                EntryState::Leased { .. } | EntryState::Expired => {}
            }
        }
        Err(DynamoDbError::contended().into())
    }

    async fn release(&self, lease: &LeaseRef) -> Result<(), StoreError> {
        let inner = &*self.inner;
        let moment = inner.options.clock.read();
        let item = match inner.delete_first_generation(lease).await? {
            WriteOutcome::Applied(_) => return Ok(()),
            WriteOutcome::ConditionFailed(item) => inner.conflicting_item(item, &lease.id).await?,
        };
        let Some(item) = item else { return Ok(()) };
        let EntryState::Leased {
            token, generation, ..
        } = EntryState::read(item, moment)?
        else {
            return Ok(());
        };
        if token != Some(*lease.token.as_bytes()) || generation == 1 {
            return Ok(());
        }
        // The lease is a takeover, so the entry becomes an orphan. If the condition fails, the token no longer holds it. The
        // generation of a token never changes, so no other write is needed.
        let values = [
            (":in_progress", s(IN_PROGRESS)),
            (":token", binary(*lease.token.as_bytes())),
            (":passed", n(moment.passed)),
            (":now", n(moment.now)),
            (":ttl", n(moment.ttl(moment.now))),
        ];
        let (condition, update) = (expression::IS_HOLDER, expression::RELEASE_AS_ORPHAN);
        let write = inner.update(
            &lease.id,
            &lease.token,
            condition,
            update,
            RETURN_NOTHING,
            values,
        );
        write.await?;
        Ok(())
    }

    async fn check(&self) -> Result<(), CheckError> {
        self.check_table().await
    }

    /// Waits for the timeout: DynamoDB sends no notifications, so waiters poll.
    async fn wait_for_change(&self, _id: &KeyId, timeout: Duration) {
        sleep(timeout).await;
    }

    /// Returns 512: each KB of an item costs a write unit for each write and for each replay.
    fn compress_above(&self) -> usize {
        512
    }
}

/// Minimum timeout of an attempt of a call about the table, or of a page of a listing.
const MIN_ADMIN_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of writes to an entry that other processes change meanwhile.
const MAX_ATTEMPTS: usize = 4;
