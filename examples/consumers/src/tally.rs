//! Effects that count: an addition is not idempotent, and the sum shows if it happened once or twice.

use std::time::Duration;

use tower_idempotency_dynamodb::aws_sdk_dynamodb::{
    Client, Config,
    client::Waiters,
    config::{retry::RetryConfig, timeout::TimeoutConfig},
    error::SdkError,
    operation::{
        create_table::CreateTableError, transact_write_items::TransactWriteItemsError as Refused,
    },
    types::{
        AttributeDefinition, AttributeValue, BillingMode, KeySchemaElement, KeyType, Put,
        ScalarAttributeType, TransactWriteItem, Update,
    },
};

use crate::{Failure, Unadded};

/// Numbers in a separate table, each under a name, and a marker for each token of an addition.
#[derive(Clone, Debug)]
pub struct Tally {
    /// Retries a request without a reply.
    client: Client,
    /// Sends each request once.
    unrepeated: Client,
    table: String,
}

impl Tally {
    /// Returns a tally in the table of this name.
    #[must_use]
    pub fn new(client: &Client, table: impl Into<String>) -> Self {
        let unrepeated = Config::to_builder(client.config()).retry_config(RetryConfig::disabled());
        let tally = Self {
            client: client.clone(),
            unrepeated: Client::from_conf(unrepeated.build()),
            table: table.into(),
        };
        tally.with_timeout(TIMEOUT)
    }

    /// Sets the timeout of a call, which includes the retries of the SDK. Default: 10 s.
    ///
    /// Without a timeout, an unresponsive server would keep an update in progress indefinitely, because the layer renews its
    /// lease while the work runs.
    #[must_use]
    pub fn with_timeout(self, timeout: Duration) -> Self {
        let timeouts = TimeoutConfig::builder().operation_timeout(timeout).build();
        let bounded = |client: &Client| {
            let config = Config::to_builder(client.config()).timeout_config(timeouts.clone());
            Client::from_conf(config.build())
        };
        Self {
            client: bounded(&self.client),
            unrepeated: bounded(&self.unrepeated),
            table: self.table,
        }
    }

    /// Creates the table if it is missing, and waits until it is active.
    ///
    /// # Errors
    ///
    /// Returns an error if the database cannot be reached, or refuses.
    pub async fn create_table(&self) -> Result<(), Failure> {
        let name = AttributeDefinition::builder()
            .attribute_name(NAME)
            .attribute_type(ScalarAttributeType::S);
        let key = KeySchemaElement::builder()
            .attribute_name(NAME)
            .key_type(KeyType::Hash);
        let made = self
            .client
            .create_table()
            .table_name(&self.table)
            .billing_mode(BillingMode::PayPerRequest)
            .attribute_definitions(name.build()?)
            .key_schema(key.build()?);
        if let Err(error) = made.send().await {
            match error.into_service_error() {
                CreateTableError::ResourceInUseException(_) => {}
                error => return Err(error.into()),
            }
        }
        let there = self.client.wait_until_table_exists();
        let there = there.table_name(&self.table).wait(CREATION).await;
        there.map_err(|_| "the table of numbers was not made in time")?;
        Ok(())
    }

    /// Adds to a number, and returns `true` if this call added it. Under one token a number is added once, for any number
    /// of repeated calls, also late ones.
    ///
    /// The addition and a marker of the token are one transaction, which fails if the marker exists. DynamoDB itself offers
    /// a token for each call, but stores it for ten minutes only, and the SDK gives each call another token.
    ///
    /// # Errors
    ///
    /// Returns the [`Unadded`] of the last attempt. A retry under the same token adds nothing twice.
    pub async fn add(&self, name: &str, amount: u32, token: &str) -> Result<bool, Unadded> {
        // Markers are in the table of the numbers, under names that no number has.
        let marker = Put::builder()
            .table_name(&self.table)
            .item(NAME, AttributeValue::S(format!("added/{token}")))
            .condition_expression("attribute_not_exists(#name)")
            .expression_attribute_names("#name", NAME)
            .build()
            .map_err(|error| Unadded::Never(error.into()))?;
        let addition = Update::builder()
            .table_name(&self.table)
            .key(NAME, AttributeValue::S(name.to_owned()))
            .update_expression(ADD)
            .expression_attribute_values(":amount", AttributeValue::N(amount.to_string()))
            .build()
            .map_err(|error| Unadded::Never(error.into()))?;
        let adding = self
            .client
            .transact_write_items()
            .transact_items(TransactWriteItem::builder().put(marker).build())
            .transact_items(TransactWriteItem::builder().update(addition).build());
        match adding.send().await {
            Ok(_) => Ok(true),
            Err(error) => match cancelled_for(&error) {
                Some("ConditionalCheckFailed") => Ok(false),
                reason => Err(Unadded::judge(&error, reason)),
            },
        }
    }

    /// Adds to a number without a check for an earlier addition. The request is sent once, because a retry by the SDK after
    /// a lost reply would add again.
    ///
    /// # Errors
    ///
    /// Returns [`Unadded`] if the addition failed or its outcome is unknown.
    pub async fn add_unchecked(&self, name: &str, amount: u32) -> Result<(), Unadded> {
        let adding = self
            .unrepeated
            .update_item()
            .table_name(&self.table)
            .key(NAME, AttributeValue::S(name.to_owned()))
            .update_expression(ADD)
            .expression_attribute_values(":amount", AttributeValue::N(amount.to_string()));
        let added = adding.send().await;
        added.map_err(|error| Unadded::judge(&error, None))?;
        Ok(())
    }

    /// Returns the current number, or 0 if there is none.
    ///
    /// # Errors
    ///
    /// Returns an error if the database cannot be reached, or refuses.
    pub async fn amount(&self, name: &str) -> Result<u64, Failure> {
        let getting = self
            .client
            .get_item()
            .table_name(&self.table)
            .consistent_read(true)
            .key(NAME, AttributeValue::S(name.to_owned()));
        let got = getting.send().await?;
        let amount = got.item.as_ref().and_then(|item| item.get("amount"));
        let Some(amount) = amount else {
            return Ok(0);
        };
        let amount = amount.as_n().map_err(|_| "expected a number")?;
        Ok(amount.parse()?)
    }
}

/// Returns the error code of the write that cancelled the transaction.
fn cancelled_for<R>(error: &SdkError<Refused, R>) -> Option<&str> {
    let Refused::TransactionCanceledException(cancelled) = error.as_service_error()? else {
        return None;
    };
    let mut codes = cancelled.cancellation_reasons().iter();
    codes.find_map(|reason| reason.code().filter(|code| *code != "None"))
}

const NAME: &str = "name";
const ADD: &str = "ADD amount :amount";
const TIMEOUT: Duration = Duration::from_secs(10);
const CREATION: Duration = Duration::from_secs(60);
