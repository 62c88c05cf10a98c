//! Effects that count: to add is not idempotent, and two additions are told from one.

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

/// Numbers in a table of their own, each under a name, and a marker for each token that was added under.
#[derive(Clone, Debug)]
pub struct Tally {
    /// Sends again what was not answered.
    client: Client,
    /// Sends nothing a second time of its own accord.
    unrepeated: Client,
    table: String,
}

impl Tally {
    /// In this table.
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

    /// How long a call may take, with all that the SDK sends again. Default: 10 s.
    ///
    /// Without one a server that accepts and says nothing would keep an update in progress for ever: its lease is renewed
    /// for as long as its work runs.
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

    /// Makes the table unless it is there, and waits until it can be used.
    ///
    /// # Errors
    ///
    /// When the database cannot be reached, or refuses.
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

    /// Adds to a number, and says whether it was added now: under one token it is added once, however often it is asked
    /// for, and however much later.
    ///
    /// The addition and a marker of the token are one transaction, which fails where the marker is. The token of a call
    /// that DynamoDB itself offers is known for ten minutes only, and the SDK gives each call another.
    ///
    /// # Errors
    ///
    /// As [`Unadded`] says, of the last time it was sent. Whoever asks again under the token adds nothing twice.
    pub async fn add(&self, name: &str, amount: u32, token: &str) -> Result<bool, Unadded> {
        // Markers live beside the numbers, under names that no number has.
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

    /// Adds to a number, and cannot tell whether that was done before. It is sent once: what a client of the SDK sends
    /// again after an answer was lost is added again.
    ///
    /// # Errors
    ///
    /// As [`Unadded`] says.
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

    /// The number now; 0 if there is none.
    ///
    /// # Errors
    ///
    /// When the database cannot be reached, or refuses.
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

/// What is wrong with the one of a transaction's writes that is the reason why none happened.
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
