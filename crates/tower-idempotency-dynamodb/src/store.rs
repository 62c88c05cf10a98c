//! The store: five methods, a conditional write each.

use std::{collections::HashMap, fmt, sync::Arc, time::Duration};

use aws_sdk_dynamodb::{
    Client,
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
    DynamoDbError, DynamoDbOptions,
    clock::{Moment, seconds},
    expression::{self, names},
    item::{COMPLETED, Found, IN_PROGRESS, Item, NEEDS_ATTENTION, binary, key, n, number, s},
};

/// Leases and records in a DynamoDB table, for any number of processes.
///
/// Clones share their client.
///
/// # Cancellation
///
/// A call that is dropped may or may not reach the service, where it happens as a whole or not at all.
#[derive(Clone)]
pub struct DynamoDbStore {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    /// For what requests wait for: with our timeout and repetitions.
    pub(crate) client: Client,
    /// For the table and its listing: as the application made it.
    pub(crate) theirs: Client,
    pub(crate) table: String,
    pub(crate) options: DynamoDbOptions,
}

/// What a conditional write came to.
pub(crate) enum Written {
    /// It happened; what it says of the item now.
    Done(Item),
    /// The condition does not hold; what it was judged by, if anything was there.
    Refused(Option<Item>),
}

impl DynamoDbStore {
    /// A store in this table, with the default [`DynamoDbOptions`] and a client of the application.
    ///
    /// Asks nobody yet: whether there is such a table shows with the first request, or with
    /// [`create_table`](Self::create_table).
    pub fn new(client: &Client, table: impl Into<String>) -> Self {
        DynamoDbOptions::new().store(client, table)
    }

    pub(crate) fn with(inner: Inner) -> Self {
        Self {
            inner: Arc::new(inner),
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
    // Each KB of an item is a unit of every write of it, and of every replay.
    const COMPRESS_ABOVE: usize = 512;

    async fn acquire(&self, claim: &Claim) -> Result<Acquired, StoreError> {
        let inner = &*self.inner;
        let moment = inner.options.clock.read();
        for _ in 0..LOOKS {
            let old = match inner.take(claim, moment).await? {
                Written::Done(new) => {
                    let generation = number(&new, "generation")?;
                    return Ok(Acquired::Granted {
                        generation,
                        takeover: generation > 1,
                    });
                }
                Written::Refused(old) => inner.what_refused(old, &claim.id).await?,
            };
            let Some(old) = old else { continue };
            match Found::read(old, moment)? {
                Found::Over => {
                    if let Written::Done(_) = inner.begin_anew(claim, moment).await? {
                        return Ok(Acquired::Granted {
                            generation: 1,
                            takeover: false,
                        });
                    }
                }
                Found::Completed {
                    fingerprint,
                    record,
                    ..
                } => {
                    return Ok(Acquired::Completed {
                        fingerprint,
                        record,
                    });
                }
                // Ours since the write was refused: a repetition of it by the SDK was applied meanwhile.
                Found::Leased { token, .. } if token == Some(*claim.token.as_bytes()) => {}
                Found::Leased {
                    fingerprint,
                    lease_ends,
                    ..
                } if lease_ends > moment.over => {
                    return Ok(Acquired::InProgress {
                        fingerprint,
                        expires_in: moment.until(lease_ends),
                    });
                }
                Found::Leased {
                    fingerprint,
                    lease_ends,
                    ..
                } => {
                    // Free for us by now, though it was not when the write was refused.
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
        let ends = moment.now.saturating_add(ttl.as_millis());
        let values = [
            (":in_progress", s(IN_PROGRESS)),
            (":token", binary(*lease.token.as_bytes())),
            (":over", n(moment.over)),
            (":lease_ends", n(ends)),
            (":ttl", n(seconds(ends))),
        ];
        let (condition, update) = (expression::HELD, expression::RENEW);
        let renewed = inner.update(&lease.id, &lease.token, condition, update, NOTHING, values);
        match renewed.await? {
            Written::Done(_) => Ok(()),
            Written::Refused(_) => Err(StoreError::LeaseLost),
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
        for _ in 0..LOOKS {
            let old = match inner.finish(lease, &record, retention, moment).await? {
                Written::Done(_) => return Ok(()),
                Written::Refused(old) => inner.what_refused(old, &lease.id).await?,
            };
            let Some(old) = old else { continue };
            match Found::read(old, moment)? {
                // Ours: the reply was lost, or the SDK met its own write.
                Found::Completed { token, .. } if token == *lease.token.as_bytes() => {
                    return Ok(());
                }
                Found::Completed { .. } => return Err(StoreError::LeaseLost),
                Found::Leased { token, .. }
                    if token.is_some_and(|it| it != *lease.token.as_bytes()) =>
                {
                    return Err(StoreError::LeaseLost);
                }
                // Open to us by now, though it was not when the write was refused.
                Found::Leased { .. } | Found::Over => {}
            }
        }
        Err(DynamoDbError::contended().into())
    }

    async fn release(&self, lease: &LeaseRef) -> Result<(), StoreError> {
        let inner = &*self.inner;
        let moment = inner.options.clock.read();
        let old = match inner.delete_first(lease).await? {
            Written::Done(_) => return Ok(()),
            Written::Refused(old) => inner.what_refused(old, &lease.id).await?,
        };
        let Some(old) = old else { return Ok(()) };
        let Found::Leased {
            token, generation, ..
        } = Found::read(old, moment)?
        else {
            return Ok(());
        };
        if token != Some(*lease.token.as_bytes()) || generation == 1 {
            return Ok(());
        }
        // A takeover. A token's generation never changes, so this is what there is to do, or nothing is.
        let values = [
            (":in_progress", s(IN_PROGRESS)),
            (":token", binary(*lease.token.as_bytes())),
            (":over", n(moment.over)),
            (":now", n(moment.now)),
            (":ttl", n(seconds(moment.now))),
        ];
        let (condition, update) = (expression::HELD, expression::GIVE_BACK);
        let given_back = inner.update(&lease.id, &lease.token, condition, update, NOTHING, values);
        given_back.await?;
        Ok(())
    }

    /// There is no push: waiters look from time to time.
    async fn wait_for_change(&self, _id: &KeyId, within: Duration) {
        sleep(within).await;
    }
}

impl Inner {
    /// Takes the lease if it is free, ours, or an orphan that may be taken over: one write.
    async fn take(&self, claim: &Claim, moment: Moment) -> Result<Written, DynamoDbError> {
        let condition = match claim.orphans {
            OrphanPolicy::TakeOver => expression::FREE_OWN_OR_ORPHANED,
            OrphanPolicy::Refuse => expression::FREE_OR_OWN,
        };
        let leased = Leased::by(claim, moment);
        let mut update = String::from(expression::TAKE);
        let mut values = vec![
            (":in_progress", s(IN_PROGRESS)),
            (":token", binary(*claim.token.as_bytes())),
            (":fingerprint", binary(*claim.fingerprint.as_bytes())),
            (":lease_ends", n(leased.ends)),
            (":expires", n(leased.expires)),
            (":ttl", n(leased.ttl)),
            (":keep", n(leased.keep)),
            (":keep_seconds", n(leased.keep_seconds)),
            (":owner", s(claim.owner)),
            (":operation", s(&*claim.operation)),
            (":now", n(moment.now)),
            (":over", n(moment.over)),
            (":one", n(1)),
            (":zero", n(0)),
            (":granted", expression::granted(&claim.token)),
        ];
        if let Some(listed) = self.listed(IN_PROGRESS, &claim.id) {
            update.push_str(expression::LISTED);
            values.push((":listed", s(listed)));
        }
        update.push_str(expression::WITHOUT_RECORD);
        self.update(&claim.id, &claim.token, condition, &update, ALL, values)
            .await
    }

    /// Takes what counts no more though it is still there: an orphan that is to be remembered no longer. Nothing of it
    /// stays.
    async fn begin_anew(&self, claim: &Claim, moment: Moment) -> Result<Written, DynamoDbError> {
        let leased = Leased::by(claim, moment);
        let attributes = [
            ("id", key(&claim.id)),
            ("status", s(IN_PROGRESS)),
            ("token", binary(*claim.token.as_bytes())),
            ("fingerprint", binary(*claim.fingerprint.as_bytes())),
            ("lease_ends", n(leased.ends)),
            ("expires", n(leased.expires)),
            ("ttl", n(leased.ttl)),
            ("keep", n(leased.keep)),
            ("keep_seconds", n(leased.keep_seconds)),
            ("owner", s(claim.owner)),
            ("operation", s(&*claim.operation)),
            ("created", n(moment.now)),
            ("since", n(moment.now)),
            ("generation", n(1)),
            ("grants", n(1)),
            ("granted", expression::granted(&claim.token)),
        ];
        let listed = self
            .listed(IN_PROGRESS, &claim.id)
            .map(|it| ("listed", s(it)));
        let item = attributes.into_iter().chain(listed);
        let item = item.map(|(name, value)| (name.to_owned(), value)).collect();
        let put = self
            .client
            .put_item()
            .table_name(&self.table)
            .set_item(Some(item))
            .condition_expression(expression::FORGOTTEN)
            .set_expression_attribute_names(Some(names(&claim.token, &[expression::FORGOTTEN])))
            .expression_attribute_values(":over", n(moment.over));
        match Box::pin(put.send()).await {
            Ok(_) => Ok(Written::Done(Item::new())),
            Err(error) => refused(error, |error| match error {
                PutItemError::ConditionalCheckFailedException(refused) => {
                    Some(Written::Refused(refused.item))
                }
                _ => None,
            }),
        }
    }

    async fn finish(
        &self,
        lease: &LeaseRef,
        record: &Bytes,
        retention: Ttl,
        moment: Moment,
    ) -> Result<Written, DynamoDbError> {
        let expires = moment.now.saturating_add(retention.as_millis());
        let mut values = vec![
            (":in_progress", s(IN_PROGRESS)),
            (":token", binary(*lease.token.as_bytes())),
            (":fingerprint", binary(*lease.fingerprint.as_bytes())),
            (":generation", n(lease.generation)),
            (":now", n(moment.now)),
            (":over", n(moment.over)),
            (":expires", n(expires)),
            (":ttl", n(seconds(expires))),
            (":record", binary(&**record)),
        ];
        let mut update = String::new();
        match NeedsAttention::in_record(record) {
            None => {
                update.push_str(expression::COMPLETE);
                values.push((":completed", s(COMPLETED)));
            }
            // For operators only: to whoever asks it is a record like any other.
            Some(attention) => {
                update.push_str(expression::GIVE_UP);
                values.push((":needs_attention", s(NEEDS_ATTENTION)));
                values.push((":reason", s(attention.code())));
                values.push((":nobody", s("")));
                if let Some(listed) = self.listed(NEEDS_ATTENTION, &lease.id) {
                    update.push_str(expression::LISTED);
                    values.push((":listed", s(listed)));
                }
                update.push_str(expression::WITHOUT_LEASE);
            }
        }
        let condition = expression::MAY_COMPLETE;
        self.update(&lease.id, &lease.token, condition, &update, NOTHING, values)
            .await
    }

    /// Deletes the entry if the token holds it and was the first to.
    async fn delete_first(&self, lease: &LeaseRef) -> Result<Written, DynamoDbError> {
        let values = [
            (":in_progress", s(IN_PROGRESS)),
            (":token", binary(*lease.token.as_bytes())),
            (":one", n(1)),
        ];
        self.delete(&lease.id, &lease.token, expression::HELD_FIRST, values)
            .await
    }

    pub(crate) async fn delete(
        &self,
        id: &KeyId,
        token: &Token,
        condition: &str,
        values: impl IntoIterator<Item = (&'static str, AttributeValue)>,
    ) -> Result<Written, DynamoDbError> {
        let delete = self
            .client
            .delete_item()
            .table_name(&self.table)
            .key("id", key(id))
            .condition_expression(condition)
            .set_expression_attribute_names(Some(names(token, &[condition])))
            .set_expression_attribute_values(Some(named(values)))
            .return_values_on_condition_check_failure(ReturnValuesOnConditionCheckFailure::AllOld);
        match Box::pin(delete.send()).await {
            Ok(_) => Ok(Written::Done(Item::new())),
            Err(error) => refused(error, |error| match error {
                DeleteItemError::ConditionalCheckFailedException(refused) => {
                    Some(Written::Refused(refused.item))
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
        answer: ReturnValue,
        values: impl IntoIterator<Item = (&'static str, AttributeValue)>,
    ) -> Result<Written, DynamoDbError> {
        let update = self
            .client
            .update_item()
            .table_name(&self.table)
            .key("id", key(id))
            .condition_expression(condition)
            .update_expression(update)
            .set_expression_attribute_names(Some(names(token, &[condition, update])))
            .set_expression_attribute_values(Some(named(values)))
            .return_values(answer)
            .return_values_on_condition_check_failure(ReturnValuesOnConditionCheckFailure::AllOld);
        match Box::pin(update.send()).await {
            Ok(updated) => Ok(Written::Done(updated.attributes.unwrap_or_default())),
            Err(error) => refused(error, |error| match error {
                UpdateItemError::ConditionalCheckFailedException(refused) => {
                    Some(Written::Refused(refused.item))
                }
                _ => None,
            }),
        }
    }

    /// What made a condition fail. A refusal that does not say (there may be nothing to say, or it is not the custom of
    /// the endpoint) is followed by a look at what was last written.
    async fn what_refused(
        &self,
        old: Option<Item>,
        id: &KeyId,
    ) -> Result<Option<Item>, DynamoDbError> {
        if old.is_some() {
            return Ok(old);
        }
        let get = self
            .client
            .get_item()
            .table_name(&self.table)
            .key("id", key(id))
            .consistent_read(true);
        let found = Box::pin(get.send()).await;
        Ok(found.map_err(|error| DynamoDbError::call(&error))?.item)
    }

    /// Where the index lists the entry in this status.
    fn listed(&self, status: &str, id: &KeyId) -> Option<String> {
        let [a, b, ..] = id.as_bytes();
        let shard = u16::from_be_bytes([*a, *b]).checked_rem(self.options.shards)?;
        Some(crate::list::partition(status, shard))
    }
}

/// What is written of a lease's length.
struct Leased {
    ends: u64,
    expires: u64,
    ttl: u64,
    keep: u64,
    keep_seconds: u64,
}

impl Leased {
    fn by(claim: &Claim, moment: Moment) -> Self {
        let keep = claim.orphan_retention.as_millis();
        let keep_seconds = seconds(keep);
        let ends = moment.now.saturating_add(claim.lease.as_millis());
        Self {
            ends,
            expires: ends.saturating_add(keep),
            ttl: seconds(ends).saturating_add(keep_seconds),
            keep,
            keep_seconds,
        }
    }
}

/// What a failed write says: that its condition does not hold, or why there is no answer.
fn refused<E, R>(
    error: SdkError<E, R>,
    condition: impl FnOnce(E) -> Option<Written>,
) -> Result<Written, DynamoDbError>
where
    E: ProvideErrorMetadata + std::error::Error + 'static,
    R: fmt::Debug,
{
    if let SdkError::ServiceError(reported) = error {
        let code = DynamoDbError::reported(reported.err().code(), None);
        return condition(reported.into_err()).ok_or(code);
    }
    Err(DynamoDbError::call(&error))
}

fn named(
    values: impl IntoIterator<Item = (&'static str, AttributeValue)>,
) -> HashMap<String, AttributeValue> {
    let values = values.into_iter();
    values
        .map(|(name, value)| (name.to_owned(), value))
        .collect()
}

// What a write that happened says of the item.
pub(crate) const NOTHING: ReturnValue = ReturnValue::None;
const ALL: ReturnValue = ReturnValue::AllNew;

/// How often an entry that changes as it is looked at is looked at.
const LOOKS: usize = 4;
