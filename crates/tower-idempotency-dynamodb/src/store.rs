//! The store. Each method makes a conditional write.

use std::{collections::HashMap, fmt, sync::Arc, time::Duration};

use aws_sdk_dynamodb::{
    Client,
    config::{IdentityCache, retry::RetryConfig, timeout::TimeoutConfig},
    error::{ProvideErrorMetadata, SdkError},
    operation::{
        delete_item::DeleteItemError, put_item::PutItemError, update_item::UpdateItemError,
    },
    types::{AttributeValue, ReturnValue, ReturnValuesOnConditionCheckFailure},
};
use bytes::Bytes;
use tokio::time::sleep;
use tower_idempotency::{
    NeedsAttention,
    store::{Acquired, Claim, KeyId, LeaseRef, OrphanPolicy, Store, StoreError, Token, Ttl},
};

use crate::{
    clock::{Moment, ceil_seconds},
    error::DynamoDbError,
    expression::{self, attribute_names},
    identity_cache::BackgroundIdentityCache,
    item::{
        COMPLETED, EntryState, IN_PROGRESS, Item, NEEDS_ATTENTION, binary, index_partition, key, n,
        number, s,
    },
    options::DynamoDbOptions,
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
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    /// Client for store calls, with the timeout and attempts of the options.
    pub(crate) client: Client,
    /// Client for the table and for listings, as the application configured it.
    pub(crate) admin_client: Client,
    pub(crate) table: String,
    pub(crate) options: DynamoDbOptions,
}

/// Outcome of a conditional write.
pub(crate) enum WriteOutcome {
    /// The write was applied. Contains the attributes that it returns.
    Applied(Item),
    /// The condition failed. Contains the conflicting item, if the service returned one.
    ConditionFailed(Option<Item>),
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
            inner: Arc::new(Inner {
                client: Client::from_conf(config.build()),
                admin_client: client.clone(),
                table: table.into(),
                options: self,
            }),
        }
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
    // Each KB of an item costs a write unit for each write and for each replay.
    const COMPRESS_ABOVE: usize = 512;

    async fn acquire(&self, claim: &Claim) -> Result<Acquired, StoreError> {
        let inner = &*self.inner;
        let moment = inner.options.clock.read();
        for _ in 0..MAX_ATTEMPTS {
            let item = match inner.acquire_lease(claim, moment).await? {
                WriteOutcome::Applied(new) => {
                    let generation = number(&new, "generation")?;
                    return Ok(Acquired::Granted {
                        generation,
                        takeover: generation > 1,
                    });
                }
                WriteOutcome::ConditionFailed(item) => {
                    inner.conflicting_item(item, &claim.id).await?
                }
            };
            let Some(item) = item else { continue };
            match EntryState::read(item, moment)? {
                EntryState::Expired => {
                    let outcome = inner.replace_expired(claim, moment).await?;
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
                // This token holds the lease: another attempt of the SDK was applied after the condition failed.
                EntryState::Leased { token, .. } if token == Some(*claim.token.as_bytes()) => {}
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
                    fingerprint,
                    lease_ends,
                    ..
                } => {
                    // The entry changed after the condition failed. It is an orphan now that this claim may take over.
                    if claim.orphans == OrphanPolicy::TakeOver && fingerprint == claim.fingerprint {
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

    async fn renew(&self, lease: &LeaseRef, ttl: Ttl) -> Result<(), StoreError> {
        let inner = &*self.inner;
        let moment = inner.options.clock.read();
        let lease_ends = moment.now.saturating_add(ttl.as_millis());
        let values = [
            (":in_progress", s(IN_PROGRESS)),
            (":token", binary(*lease.token.as_bytes())),
            (":over", n(moment.passed)),
            (":lease_ends", n(lease_ends)),
            (":ttl", n(ceil_seconds(lease_ends))),
        ];
        let (condition, update) = (expression::IS_HOLDER, expression::RENEW);
        let write = inner.update(
            &lease.id,
            &lease.token,
            condition,
            update,
            RETURN_NOTHING,
            values,
        );
        match write.await? {
            WriteOutcome::Applied(_) => Ok(()),
            WriteOutcome::ConditionFailed(_) => Err(StoreError::LeaseLost),
        }
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
            (":over", n(moment.passed)),
            (":now", n(moment.now)),
            (":ttl", n(ceil_seconds(moment.now))),
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

    /// Waits for the timeout: DynamoDB sends no notifications, so waiters poll.
    async fn wait_for_change(&self, _id: &KeyId, timeout: Duration) {
        sleep(timeout).await;
    }
}

impl Inner {
    /// Acquires the lease if the entry is free, held by this token, or an orphan that the claim may take over.
    async fn acquire_lease(
        &self,
        claim: &Claim,
        moment: Moment,
    ) -> Result<WriteOutcome, DynamoDbError> {
        let condition = match claim.orphans {
            OrphanPolicy::TakeOver => expression::CAN_ACQUIRE,
            OrphanPolicy::Refuse => expression::CAN_ACQUIRE_EXCEPT_ORPHANS,
        };
        let times = LeaseTimes::new(claim, moment);
        let mut update = String::from(expression::ACQUIRE);
        let mut values = vec![
            (":in_progress", s(IN_PROGRESS)),
            (":token", binary(*claim.token.as_bytes())),
            (":fingerprint", binary(*claim.fingerprint.as_bytes())),
            (":lease_ends", n(times.lease_ends)),
            (":expires", n(times.expires)),
            (":ttl", n(times.ttl)),
            (":keep", n(times.keep)),
            (":keep_seconds", n(times.keep_seconds)),
            (":owner", s(claim.owner)),
            (":operation", s(&*claim.operation)),
            (":now", n(moment.now)),
            (":over", n(moment.passed)),
            (":one", n(1)),
            (":zero", n(0)),
            (":granted", expression::granted_value(&claim.token)),
        ];
        if let Some(listed) = self.index_partition(IN_PROGRESS, &claim.id) {
            update.push_str(expression::SET_LISTED);
            values.push((":listed", s(listed)));
        }
        update.push_str(expression::REMOVE_RECORD);
        self.update(
            &claim.id,
            &claim.token,
            condition,
            &update,
            RETURN_ALL_NEW,
            values,
        )
        .await
    }

    /// Acquires the lease of an orphan that has expired but is still stored. Replaces all attributes of the item.
    async fn replace_expired(
        &self,
        claim: &Claim,
        moment: Moment,
    ) -> Result<WriteOutcome, DynamoDbError> {
        let times = LeaseTimes::new(claim, moment);
        let attributes = [
            ("id", key(&claim.id)),
            ("status", s(IN_PROGRESS)),
            ("token", binary(*claim.token.as_bytes())),
            ("fingerprint", binary(*claim.fingerprint.as_bytes())),
            ("lease_ends", n(times.lease_ends)),
            ("expires", n(times.expires)),
            ("ttl", n(times.ttl)),
            ("keep", n(times.keep)),
            ("keep_seconds", n(times.keep_seconds)),
            ("owner", s(claim.owner)),
            ("operation", s(&*claim.operation)),
            ("created", n(moment.now)),
            ("since", n(moment.now)),
            ("generation", n(1)),
            ("grants", n(1)),
            ("granted", expression::granted_value(&claim.token)),
        ];
        let listed = self
            .index_partition(IN_PROGRESS, &claim.id)
            .map(|it| ("listed", s(it)));
        let item = attributes.into_iter().chain(listed);
        let item = item.map(|(name, value)| (name.to_owned(), value)).collect();
        let put = self
            .client
            .put_item()
            .table_name(&self.table)
            .set_item(Some(item))
            .condition_expression(expression::ABSENT_OR_EXPIRED)
            .set_expression_attribute_names(Some(attribute_names(
                &claim.token,
                &[expression::ABSENT_OR_EXPIRED],
            )))
            .expression_attribute_values(":over", n(moment.passed));
        match Box::pin(put.send()).await {
            Ok(_) => Ok(WriteOutcome::Applied(Item::new())),
            Err(error) => condition_failure(error, |error| match error {
                PutItemError::ConditionalCheckFailedException(failed) => {
                    Some(WriteOutcome::ConditionFailed(failed.item))
                }
                _ => None,
            }),
        }
    }

    /// Completes the entry with the record.
    async fn write_record(
        &self,
        lease: &LeaseRef,
        record: &Bytes,
        retention: Ttl,
        moment: Moment,
    ) -> Result<WriteOutcome, DynamoDbError> {
        let expires = moment.now.saturating_add(retention.as_millis());
        let mut values = vec![
            (":in_progress", s(IN_PROGRESS)),
            (":token", binary(*lease.token.as_bytes())),
            (":fingerprint", binary(*lease.fingerprint.as_bytes())),
            (":generation", n(lease.generation)),
            (":now", n(moment.now)),
            (":over", n(moment.passed)),
            (":expires", n(expires)),
            (":ttl", n(ceil_seconds(expires))),
            (":record", binary(&**record)),
        ];
        let mut update = String::new();
        match NeedsAttention::in_record(record) {
            None => {
                update.push_str(expression::COMPLETE);
                values.push((":completed", s(COMPLETED)));
            }
            // The status is for operators only. For clients this is a record like any other.
            Some(attention) => {
                update.push_str(expression::COMPLETE_NEEDS_ATTENTION);
                values.push((":needs_attention", s(NEEDS_ATTENTION)));
                values.push((":reason", s(attention.code())));
                values.push((":nobody", s("")));
                if let Some(listed) = self.index_partition(NEEDS_ATTENTION, &lease.id) {
                    update.push_str(expression::SET_LISTED);
                    values.push((":listed", s(listed)));
                }
                update.push_str(expression::REMOVE_LEASE);
            }
        }
        let condition = expression::CAN_COMPLETE;
        self.update(
            &lease.id,
            &lease.token,
            condition,
            &update,
            RETURN_NOTHING,
            values,
        )
        .await
    }

    /// Deletes the entry if the token holds its first generation.
    async fn delete_first_generation(
        &self,
        lease: &LeaseRef,
    ) -> Result<WriteOutcome, DynamoDbError> {
        let values = [
            (":in_progress", s(IN_PROGRESS)),
            (":token", binary(*lease.token.as_bytes())),
            (":one", n(1)),
        ];
        self.delete(&lease.id, &lease.token, expression::IS_FIRST_HOLDER, values)
            .await
    }

    pub(crate) async fn delete(
        &self,
        id: &KeyId,
        token: &Token,
        condition: &str,
        values: impl IntoIterator<Item = (&'static str, AttributeValue)>,
    ) -> Result<WriteOutcome, DynamoDbError> {
        let delete = self
            .client
            .delete_item()
            .table_name(&self.table)
            .key("id", key(id))
            .condition_expression(condition)
            .set_expression_attribute_names(Some(attribute_names(token, &[condition])))
            .set_expression_attribute_values(Some(value_map(values)))
            .return_values_on_condition_check_failure(ReturnValuesOnConditionCheckFailure::AllOld);
        match Box::pin(delete.send()).await {
            Ok(_) => Ok(WriteOutcome::Applied(Item::new())),
            Err(error) => condition_failure(error, |error| match error {
                DeleteItemError::ConditionalCheckFailedException(failed) => {
                    Some(WriteOutcome::ConditionFailed(failed.item))
                }
                _ => None,
            }),
        }
    }

    pub(crate) async fn update(
        &self,
        id: &KeyId,
        token: &Token,
        condition: &str,
        update: &str,
        return_values: ReturnValue,
        values: impl IntoIterator<Item = (&'static str, AttributeValue)>,
    ) -> Result<WriteOutcome, DynamoDbError> {
        let update = self
            .client
            .update_item()
            .table_name(&self.table)
            .key("id", key(id))
            .condition_expression(condition)
            .update_expression(update)
            .set_expression_attribute_names(Some(attribute_names(token, &[condition, update])))
            .set_expression_attribute_values(Some(value_map(values)))
            .return_values(return_values)
            .return_values_on_condition_check_failure(ReturnValuesOnConditionCheckFailure::AllOld);
        match Box::pin(update.send()).await {
            Ok(updated) => Ok(WriteOutcome::Applied(
                updated.attributes.unwrap_or_default(),
            )),
            Err(error) => condition_failure(error, |error| match error {
                UpdateItemError::ConditionalCheckFailedException(failed) => {
                    Some(WriteOutcome::ConditionFailed(failed.item))
                }
                _ => None,
            }),
        }
    }

    /// Returns the item for which a condition failed.
    ///
    /// Reads the item consistently if the service did not return it with the failure: it may be absent, or the endpoint may
    /// not support that.
    async fn conflicting_item(
        &self,
        item: Option<Item>,
        id: &KeyId,
    ) -> Result<Option<Item>, DynamoDbError> {
        if item.is_some() {
            return Ok(item);
        }
        let get = self
            .client
            .get_item()
            .table_name(&self.table)
            .key("id", key(id))
            .consistent_read(true);
        let read = Box::pin(get.send()).await;
        let read = read.map_err(|error| DynamoDbError::from_item_call(&error))?;
        Ok(read.item)
    }

    /// Returns the index partition that lists the entry in this status, or `None` if there is no index.
    fn index_partition(&self, status: &str, id: &KeyId) -> Option<String> {
        let [a, b, ..] = id.as_bytes();
        let shard = u16::from_be_bytes([*a, *b]).checked_rem(self.options.shards)?;
        Some(index_partition(status, shard))
    }
}

/// Times that an acquire writes, in milliseconds, and their rounded values in seconds.
struct LeaseTimes {
    lease_ends: u64,
    expires: u64,
    ttl: u64,
    keep: u64,
    keep_seconds: u64,
}

impl LeaseTimes {
    fn new(claim: &Claim, moment: Moment) -> Self {
        let keep = claim.orphan_retention.as_millis();
        let keep_seconds = ceil_seconds(keep);
        let lease_ends = moment.now.saturating_add(claim.lease.as_millis());
        Self {
            lease_ends,
            expires: lease_ends.saturating_add(keep),
            ttl: ceil_seconds(lease_ends).saturating_add(keep_seconds),
            keep,
            keep_seconds,
        }
    }
}

/// Returns the outcome of a write whose condition failed, or the error of a write that failed otherwise.
fn condition_failure<E, R>(
    error: SdkError<E, R>,
    outcome: impl FnOnce(E) -> Option<WriteOutcome>,
) -> Result<WriteOutcome, DynamoDbError>
where
    E: ProvideErrorMetadata + std::error::Error + 'static,
    R: fmt::Debug,
{
    if let SdkError::ServiceError(reported) = error {
        let other = DynamoDbError::from_code(reported.err().code(), None);
        return outcome(reported.into_err()).ok_or(other);
    }
    Err(DynamoDbError::from_item_call(&error))
}

fn value_map(
    values: impl IntoIterator<Item = (&'static str, AttributeValue)>,
) -> HashMap<String, AttributeValue> {
    let values = values.into_iter();
    values
        .map(|(name, value)| (name.to_owned(), value))
        .collect()
}

// Attributes that an applied write returns.
pub(crate) const RETURN_NOTHING: ReturnValue = ReturnValue::None;
const RETURN_ALL_NEW: ReturnValue = ReturnValue::AllNew;

/// Maximum number of writes to an entry that other processes change meanwhile.
const MAX_ATTEMPTS: usize = 4;
