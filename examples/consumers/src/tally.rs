//! Effects that count: to add is not idempotent, and two additions are told from one.

use tower_idempotency::run_once::Failed;
use tower_idempotency_dynamodb::aws_sdk_dynamodb::{
    Client, Config,
    config::retry::RetryConfig,
    operation::{
        create_table::CreateTableError, transact_write_items::TransactWriteItemsError as Refused,
        update_item::UpdateItemError,
    },
    types::{
        AttributeDefinition, AttributeValue, BillingMode, KeySchemaElement, KeyType,
        ScalarAttributeType, TransactWriteItem, Update,
    },
};

use crate::Failure;

/// Numbers in a table of their own, each under a name.
#[derive(Clone, Debug)]
pub struct Tally {
    client: Client,
    /// Sends nothing a second time of its own accord.
    once: Client,
    table: String,
}

impl Tally {
    /// In this table.
    #[must_use]
    pub fn new(client: &Client, table: impl Into<String>) -> Self {
        let once = Config::to_builder(client.config()).retry_config(RetryConfig::disabled());
        Self {
            client: client.clone(),
            once: Client::from_conf(once.build()),
            table: table.into(),
        }
    }

    /// Makes the table unless it is there.
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
        match made.send().await {
            Ok(_) => Ok(()),
            Err(error) => match error.into_service_error() {
                CreateTableError::ResourceInUseException(_) => Ok(()),
                error => Err(error.into()),
            },
        }
    }

    /// Its table.
    #[must_use]
    pub fn table(&self) -> &str {
        &self.table
    }

    /// Adds to a number. Under one token it is added once, however often it is asked for.
    ///
    /// DynamoDB knows a token for ten minutes, and all tables of an account have their tokens together. Of a longer one the
    /// first 36 characters count.
    ///
    /// # Errors
    ///
    /// [`Failed::Release`] when nothing was added, [`Failed::Hold`] when nobody knows: whoever comes next may ask again.
    pub async fn add(&self, name: &str, amount: u32, token: &str) -> Result<(), Failed<Failure>> {
        let token = token.get(..36).unwrap_or(token);
        let addition = Update::builder()
            .table_name(&self.table)
            .key(NAME, AttributeValue::S(name.to_owned()))
            .update_expression("ADD amount :amount")
            .expression_attribute_values(":amount", AttributeValue::N(amount.to_string()))
            .build()
            .map_err(|error| Failed::Release(error.into()))?;
        let adding = self
            .client
            .transact_write_items()
            .client_request_token(token)
            .transact_items(TransactWriteItem::builder().update(addition).build());
        match adding.send().await {
            Ok(_) => Ok(()),
            Err(error) => match error.into_service_error() {
                // As when two additions to one number meet.
                refused @ Refused::TransactionCanceledException(_) => {
                    Err(Failed::Release(refused.into()))
                }
                unknown => Err(Failed::Hold(unknown.into())),
            },
        }
    }

    /// Adds to a number, and cannot tell whether that was done before. It is sent once: what a client of the SDK sends
    /// again after an answer was lost is added again.
    ///
    /// # Errors
    ///
    /// Whether it was added is not known then, unless `is_certain` says so.
    pub async fn add_unchecked(&self, name: &str, amount: u32) -> Result<(), Unadded> {
        let adding = self
            .once
            .update_item()
            .table_name(&self.table)
            .key(NAME, AttributeValue::S(name.to_owned()))
            .update_expression("ADD amount :amount")
            .expression_attribute_values(":amount", AttributeValue::N(amount.to_string()));
        match adding.send().await {
            Ok(_) => Ok(()),
            Err(error) => {
                let error = error.into_service_error();
                Err(Unadded {
                    is_certain: matches!(
                        error,
                        UpdateItemError::ProvisionedThroughputExceededException(_)
                            | UpdateItemError::RequestLimitExceeded(_)
                    ),
                    error: error.into(),
                })
            }
        }
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

/// Why an addition failed.
#[derive(Debug)]
pub struct Unadded {
    /// Whether it is certain that nothing was added.
    pub is_certain: bool,
    /// What was said.
    pub error: Failure,
}

const NAME: &str = "name";
