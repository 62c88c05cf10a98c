//! The table: what it has to look like, and how it is made.

use std::time::Duration;

use aws_sdk_dynamodb::{
    error::{ProvideErrorMetadata, SdkError},
    operation::{
        create_table::CreateTableError, describe_table::DescribeTableError,
        update_time_to_live::UpdateTimeToLiveError,
    },
    types::{
        AttributeDefinition, BillingMode, GlobalSecondaryIndex, IndexStatus, KeySchemaElement,
        KeyType, Projection, ProjectionType, ScalarAttributeType, TableDescription, TableStatus,
        TimeToLiveSpecification, TimeToLiveStatus,
    },
};
use tokio::time::{Instant, sleep};

use crate::{DynamoDbError, DynamoDbErrorKind, DynamoDbStore, list::INDEX, store::Inner};

impl DynamoDbStore {
    /// Makes the table unless it is there, with its index and paid by request, waits until it can be used, and turns on
    /// the collection of what is over.
    ///
    /// For development and tests; `docs/dynamodb.md` in the repository has the same for CloudFormation and Terraform. A
    /// table that is there is looked at and, but for the collection, left as it is.
    ///
    /// # Errors
    ///
    /// [`DynamoDbError`] when the service does not answer or refuses, the table that is there has another key, no index
    /// although entries are listed, or a TTL on another attribute than `ttl`, or it cannot be used within two minutes.
    ///
    /// # Cancellation
    ///
    /// A call that is dropped may leave the table made or not, and may be made again.
    pub async fn create_table(&self) -> Result<(), DynamoDbError> {
        let inner = &*self.inner;
        inner.create().await?;
        let deadline = Instant::now() + PATIENCE;
        while !inner.is_usable().await? {
            if Instant::now() >= deadline {
                let message = "expected the table to become usable, found that it does not";
                return Err(DynamoDbError::new(DynamoDbErrorKind::Unusable, message));
            }
            sleep(PAUSE).await;
        }
        Ok(())
    }
}

impl Inner {
    async fn create(&self) -> Result<(), DynamoDbError> {
        let index = GlobalSecondaryIndex::builder()
            .index_name(INDEX)
            .key_schema(key("listed", KeyType::Hash)?)
            .key_schema(key("since", KeyType::Range)?)
            .projection(
                Projection::builder()
                    .projection_type(ProjectionType::Include)
                    .set_non_key_attributes(Some(SHOWN.map(str::to_owned).into()))
                    .build(),
            )
            .build()
            .map_err(|_| incomplete())?;
        let create = self
            .theirs
            .create_table()
            .table_name(&self.table)
            .billing_mode(BillingMode::PayPerRequest)
            .attribute_definitions(attribute("id", ScalarAttributeType::B)?)
            .attribute_definitions(attribute("listed", ScalarAttributeType::S)?)
            .attribute_definitions(attribute("since", ScalarAttributeType::N)?)
            .key_schema(key("id", KeyType::Hash)?)
            .global_secondary_indexes(index);
        match Box::pin(create.send()).await {
            Ok(_) => Ok(()),
            Err(error) => match error.as_service_error() {
                // It is there, or somebody makes it at this moment.
                Some(CreateTableError::ResourceInUseException(_)) => Ok(()),
                _ => Err(DynamoDbError::of_table(&error)),
            },
        }
    }

    /// Whether the table can be used, and the service collects what is over.
    async fn is_usable(&self) -> Result<bool, DynamoDbError> {
        let Some(table) = self.describe().await? else {
            // It is not seen yet, or somebody was deleting it.
            self.create().await?;
            return Ok(false);
        };
        match table.table_status() {
            Some(TableStatus::Active | TableStatus::Updating) => {
                self.check(&table)?;
                // A table is being updated also for as long as its index is being made, which takes writes and no queries.
                if self.options.shards > 0 && is_on_its_way(&table) {
                    return Ok(false);
                }
                self.collect().await
            }
            _ => Ok(false),
        }
    }

    async fn describe(&self) -> Result<Option<TableDescription>, DynamoDbError> {
        let describe = self.theirs.describe_table().table_name(&self.table);
        match Box::pin(describe.send()).await {
            Ok(described) => match described.table {
                Some(table) => Ok(Some(table)),
                None => Err(DynamoDbError::unusable("a description of the table")),
            },
            Err(error) => match error.as_service_error() {
                Some(DescribeTableError::ResourceNotFoundException(_)) => Ok(None),
                _ => Err(DynamoDbError::of_table(&error)),
            },
        }
    }

    /// Whether the table is one of ours.
    fn check(&self, table: &TableDescription) -> Result<(), DynamoDbError> {
        let keys = table.key_schema().iter();
        let keys: Vec<_> = keys.map(KeySchemaElement::attribute_name).collect();
        let is_binary = |it: &AttributeDefinition| {
            it.attribute_name() == "id" && *it.attribute_type() == ScalarAttributeType::B
        };
        if keys != ["id"] || !table.attribute_definitions().iter().any(is_binary) {
            return Err(DynamoDbError::unusable(
                "a table with the partition key id, of bytes",
            ));
        }
        let mut indexes = table.global_secondary_indexes().iter();
        if self.options.shards > 0 && !indexes.any(|it| it.index_name() == Some(INDEX)) {
            return Err(DynamoDbError::unusable("a table with the index listed"));
        }
        Ok(())
    }

    /// Whether the service collects what is over.
    async fn is_collected(&self) -> Result<bool, DynamoDbError> {
        let describe = self.theirs.describe_time_to_live().table_name(&self.table);
        let described = Box::pin(describe.send()).await;
        let described = described.map_err(|error| DynamoDbError::of_table(&error))?;
        let Some(found) = described.time_to_live_description else {
            return Ok(false);
        };
        match found.time_to_live_status() {
            Some(TimeToLiveStatus::Enabled | TimeToLiveStatus::Enabling) => {}
            _ => return Ok(false),
        }
        // A table has one such attribute: by another, what is over would stay for ever.
        match found.attribute_name() {
            Some(ENDS) | None => Ok(true),
            Some(_) => Err(DynamoDbError::unusable("a TTL on the attribute ttl")),
        }
    }

    /// Lets the service collect what is over; false where it does not yet, since the table is being updated.
    async fn collect(&self) -> Result<bool, DynamoDbError> {
        if self.is_collected().await? {
            return Ok(true);
        }
        let specification = TimeToLiveSpecification::builder()
            .attribute_name(ENDS)
            .enabled(true)
            .build()
            .map_err(|_| incomplete())?;
        let update = self
            .theirs
            .update_time_to_live()
            .table_name(&self.table)
            .time_to_live_specification(specification);
        match Box::pin(update.send()).await {
            Ok(_) => Ok(true),
            Err(error) => match error.as_service_error() {
                Some(UpdateTimeToLiveError::ResourceInUseException(_)) => Ok(false),
                // Unless it was turned off a moment before, and the service takes its time.
                _ if may_be_on(&error) && self.is_collected().await? => Ok(true),
                _ => Err(DynamoDbError::of_table(&error)),
            },
        }
    }
}

/// Whether the index comes or goes.
fn is_on_its_way(table: &TableDescription) -> bool {
    let mut indexes = table.global_secondary_indexes().iter();
    let index = indexes.find(|it| it.index_name() == Some(INDEX));
    let status = index.and_then(|it| it.index_status());
    matches!(status, Some(IndexStatus::Creating | IndexStatus::Deleting))
}

/// Whoever makes the table at the same moment may have been first: the service has no name of its own for that.
fn may_be_on<E: ProvideErrorMetadata, R>(error: &SdkError<E, R>) -> bool {
    let reported = error.as_service_error();
    reported.and_then(ProvideErrorMetadata::code) == Some("ValidationException")
}

fn attribute(name: &str, kind: ScalarAttributeType) -> Result<AttributeDefinition, DynamoDbError> {
    let definition = AttributeDefinition::builder().attribute_name(name);
    definition
        .attribute_type(kind)
        .build()
        .map_err(|_| incomplete())
}

fn key(name: &str, kind: KeyType) -> Result<KeySchemaElement, DynamoDbError> {
    let element = KeySchemaElement::builder().attribute_name(name);
    element.key_type(kind).build().map_err(|_| incomplete())
}

/// The builders of the SDK ask for what is always given here.
fn incomplete() -> DynamoDbError {
    DynamoDbError::unusable("a complete description of the table")
}

/// What the index shows besides its keys.
const SHOWN: [&str; 6] = [
    "expires",
    "generation",
    "lease_ends",
    "operation",
    "owner",
    "reason",
];

/// The attribute that says from when on the service may collect an item.
const ENDS: &str = "ttl";

const PATIENCE: Duration = Duration::from_secs(120);
const PAUSE: Duration = Duration::from_millis(200);
