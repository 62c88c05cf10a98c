//! The conditional writes.

use std::{collections::HashMap, fmt};

use aws_sdk_dynamodb::{
    Config,
    config::retry::{ClassifyRetry, RetryAction, RetryConfig},
    error::{ProvideErrorMetadata, SdkError},
    operation::{
        delete_item::DeleteItemError,
        put_item::PutItemError,
        update_item::{UpdateItemError, builders::UpdateItemFluentBuilder},
    },
    types::{AttributeValue, ReturnValue, ReturnValuesOnConditionCheckFailure},
};
use aws_smithy_runtime_api::client::interceptors::context::InterceptorContext;
use bytes::Bytes;
use tower_idempotency::{
    NeedsAttention,
    store::{Claim, KeyId, LeaseRef, OrphanPolicy, Token, Ttl},
};

use crate::{
    clock::{Moment, ceil_seconds},
    error::DynamoDbError,
    expression::{self, attribute_names},
    item::{
        COMPLETED, IN_PROGRESS, Item, NEEDS_ATTENTION, beginning, binary, index_partition, key, n,
        s,
    },
    table_client::TableClient,
};

/// Outcome of a conditional write.
pub(crate) enum WriteOutcome {
    /// The write was applied. Contains the attributes that it returns.
    Applied(Item),
    /// The condition failed. Contains the conflicting item, if the service returned one.
    ConditionFailed(Option<Item>),
}

/// Maximum number of attempts that the SDK makes for a call.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Attempts {
    /// The number in the options.
    OfOptions,
    /// The number in the options, but none after an attempt that the service has not rejected. A lost reply is an error.
    WhileRejected,
    /// A single attempt. A lost reply is an error.
    One,
}

impl Attempts {
    /// Returns the settings of a call, or `None` for those of the client.
    fn settings(self) -> Option<aws_sdk_dynamodb::config::Builder> {
        match self {
            Self::OfOptions => None,
            Self::WhileRejected => Some(Config::builder().retry_classifier(OnlyRejected)),
            Self::One => Some(Config::builder().retry_config(RetryConfig::disabled())),
        }
    }
}

/// Lets the SDK repeat only attempts that the service has rejected, for example to throttle them.
#[derive(Debug)]
struct OnlyRejected;

impl ClassifyRetry for OnlyRejected {
    fn classify_retry(&self, context: &InterceptorContext) -> RetryAction {
        let response = context.response();
        match response.is_some_and(|response| response.status().is_client_error()) {
            true => RetryAction::NoActionIndicated,
            false => RetryAction::RetryForbidden,
        }
    }

    fn name(&self) -> &'static str {
        "only rejected attempts"
    }
}

/// The entry of an acquire, as the last attempt found it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AcquireTarget {
    /// Free, held by this token for the same request, or an orphan that the claim may take over.
    Any,
    /// Held by this token, for less time than the claim requests. The entry keeps its fingerprint.
    OwnLease,
}

/// Sends a conditional write, and returns its outcome. The three requests have the same methods, but no common trait.
macro_rules! send_write {
    ($request:ident, $attempts:expr, $error:ident) => {{
        let sent = match $attempts.settings() {
            None => Box::pin($request.send()).await,
            Some(settings) => Box::pin($request.customize().config_override(settings).send()).await,
        };
        match sent {
            Ok(written) => Ok(WriteOutcome::Applied(
                written.attributes.unwrap_or_default(),
            )),
            Err(error) => condition_failure(error, |error| match error {
                $error::ConditionalCheckFailedException(failed) => {
                    Some(WriteOutcome::ConditionFailed(failed.item))
                }
                _ => None,
            }),
        }
    }};
}

impl TableClient {
    /// Acquires the lease if the entry is in the state of `target`.
    pub(crate) async fn acquire_lease(
        &self,
        claim: &Claim,
        target: AcquireTarget,
        moment: Moment,
        attempts: Attempts,
    ) -> Result<WriteOutcome, DynamoDbError> {
        let times = LeaseTimes::new(claim, moment);
        let mut update = String::from(expression::ACQUIRE);
        let mut values = vec![
            (":in_progress", s(IN_PROGRESS)),
            (":token", binary(*claim.token.as_bytes())),
            (":lease_ends", n(times.lease_ends)),
            (":expires", n(times.expires)),
            (":ttl", n(times.ttl)),
            (":orphan_retention", n(times.orphan_retention)),
            (
                ":orphan_retention_seconds",
                n(times.orphan_retention_seconds),
            ),
            (":owner", s(claim.owner)),
            (":operation", s(&*claim.operation)),
            (":now", n(moment.now)),
            (":passed", n(moment.passed)),
            (":one", n(1)),
            (":zero", n(0)),
            (":granted", expression::granted_value(&claim.token)),
        ];
        update.push_str(if claim.operation.is_empty() {
            expression::KEEP_OPERATION
        } else {
            expression::SET_OPERATION
        });
        // The service rejects values that no expression uses.
        let condition = match (target, claim.orphans) {
            (AcquireTarget::OwnLease, _) => expression::CAN_EXTEND,
            (AcquireTarget::Any, OrphanPolicy::TakeOver) => expression::CAN_ACQUIRE,
            (AcquireTarget::Any, OrphanPolicy::Refuse) => {
                values.push((":retry", binary(Token::RETRY_ALLOWED)));
                expression::CAN_ACQUIRE_ALLOWED_RETRIES
            }
            (AcquireTarget::Any, OrphanPolicy::Never) => expression::CAN_ACQUIRE_EXCEPT_ORPHANS,
        };
        if target == AcquireTarget::Any {
            update.push_str(expression::SET_FINGERPRINT);
            values.push((":fingerprint", binary(*claim.fingerprint.as_bytes())));
        }
        if let Some(listed) = self.index_partition(IN_PROGRESS, &claim.id) {
            update.push_str(expression::SET_LISTED);
            values.push((":listed", s(listed)));
        }
        update.push_str(expression::REMOVE_RECORD);
        let (id, token) = (&claim.id, &claim.token);
        let update = self.update_builder(id, token, condition, &update, RETURN_ALL_NEW, values);
        send_write!(update, attempts, UpdateItemError)
    }

    /// Acquires the lease of an orphan that has expired but is still stored. Replaces all attributes of the item.
    pub(crate) async fn replace_expired(
        &self,
        claim: &Claim,
        moment: Moment,
        attempts: Attempts,
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
            ("orphan_retention", n(times.orphan_retention)),
            (
                "orphan_retention_seconds",
                n(times.orphan_retention_seconds),
            ),
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
            .expression_attribute_values(":passed", n(moment.passed));
        send_write!(put, attempts, PutItemError)
    }

    /// Completes the entry with the record.
    pub(crate) async fn write_record(
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
            (":passed", n(moment.passed)),
            (":expires", n(expires)),
            (":ttl", n(moment.ttl(expires))),
            (":record", binary(&**record)),
        ];
        let mut update = String::new();
        match NeedsAttention::in_record(record) {
            None => {
                update.push_str(expression::COMPLETE);
                values.push((":completed", s(COMPLETED)));
                match self.completed_partition(&lease.id) {
                    Some(listed) => {
                        update.push_str(expression::LIST_COMPLETED);
                        values.push((":listed", s(listed)));
                        values.push((":beginning", beginning(record)));
                    }
                    None => update.push_str(expression::LEAVE_INDEX),
                }
            }
            // The status is for operators only. For clients this is a record like any other.
            Some(attention) => {
                update.push_str(expression::COMPLETE_NEEDS_ATTENTION);
                values.push((":needs_attention", s(NEEDS_ATTENTION)));
                values.push((":reason", s(attention.code())));
                values.push((":unknown", s("")));
                match self.index_partition(NEEDS_ATTENTION, &lease.id) {
                    Some(listed) => {
                        update.push_str(expression::SET_LISTED);
                        values.push((":listed", s(listed)));
                        update.push_str(expression::REMOVE_LEASE);
                    }
                    None => update.push_str(expression::REMOVE_LEASE_AND_LISTING),
                }
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
    pub(crate) async fn delete_first_generation(
        &self,
        lease: &LeaseRef,
    ) -> Result<WriteOutcome, DynamoDbError> {
        let values = [
            (":in_progress", s(IN_PROGRESS)),
            (":token", binary(*lease.token.as_bytes())),
            (":one", n(1)),
        ];
        let condition = expression::IS_FIRST_HOLDER;
        // A second attempt that finds no item has nothing to release.
        let attempts = Attempts::OfOptions;
        self.delete(&lease.id, &lease.token, condition, values, attempts)
            .await
    }

    /// Deletes the item under a condition. `attempts` is the maximum number of attempts of the SDK.
    pub(crate) async fn delete(
        &self,
        id: &KeyId,
        token: &Token,
        condition: &str,
        values: impl IntoIterator<Item = (&'static str, AttributeValue)>,
        attempts: Attempts,
    ) -> Result<WriteOutcome, DynamoDbError> {
        let delete = self
            .client
            .delete_item()
            .table_name(&self.table)
            .key("id", key(id))
            .condition_expression(condition)
            .set_expression_attribute_names(Some(attribute_names(token, &[condition])))
            // The service rejects a map without values.
            .set_expression_attribute_values(Some(value_map(values)).filter(|it| !it.is_empty()))
            .return_values_on_condition_check_failure(ReturnValuesOnConditionCheckFailure::AllOld);
        send_write!(delete, attempts, DeleteItemError)
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
        let update = self.update_builder(id, token, condition, update, return_values, values);
        send_write!(update, Attempts::OfOptions, UpdateItemError)
    }

    /// Returns an update under a condition, which is not sent yet.
    fn update_builder(
        &self,
        id: &KeyId,
        token: &Token,
        condition: &str,
        update: &str,
        return_values: ReturnValue,
        values: impl IntoIterator<Item = (&'static str, AttributeValue)>,
    ) -> UpdateItemFluentBuilder {
        self.client
            .update_item()
            .table_name(&self.table)
            .key("id", key(id))
            .condition_expression(condition)
            .update_expression(update)
            .set_expression_attribute_names(Some(attribute_names(token, &[condition, update])))
            .set_expression_attribute_values(Some(value_map(values)))
            .return_values(return_values)
            .return_values_on_condition_check_failure(ReturnValuesOnConditionCheckFailure::AllOld)
    }

    /// Returns the item for which a condition failed.
    ///
    /// Reads the item consistently if the service did not return it with the failure. The item may be absent, or the
    /// endpoint may not return items.
    pub(crate) async fn conflicting_item(
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
    pub(crate) fn index_partition(&self, status: &str, id: &KeyId) -> Option<String> {
        let [a, b, ..] = id.as_bytes();
        let shard = u16::from_be_bytes([*a, *b]).checked_rem(self.options.shards)?;
        Some(index_partition(status, shard))
    }

    /// Returns the index partition that lists the completed entry, or `None` if the index has no completed entries.
    pub(crate) fn completed_partition(&self, id: &KeyId) -> Option<String> {
        let partition = self.index_partition(COMPLETED, id)?;
        self.options.has_completed_index.then_some(partition)
    }
}

/// Times that an acquire writes, in milliseconds, and their rounded values in seconds.
struct LeaseTimes {
    lease_ends: u64,
    expires: u64,
    ttl: u64,
    orphan_retention: u64,
    orphan_retention_seconds: u64,
}

impl LeaseTimes {
    fn new(claim: &Claim, moment: Moment) -> Self {
        let orphan_retention = claim.orphan_retention.as_millis();
        let orphan_retention_seconds = ceil_seconds(orphan_retention);
        let lease_ends = moment.now.saturating_add(claim.lease.as_millis());
        Self {
            lease_ends,
            expires: lease_ends.saturating_add(orphan_retention),
            ttl: moment
                .ttl(lease_ends)
                .saturating_add(orphan_retention_seconds),
            orphan_retention,
            orphan_retention_seconds,
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
pub(crate) const RETURN_ALL_NEW: ReturnValue = ReturnValue::AllNew;
