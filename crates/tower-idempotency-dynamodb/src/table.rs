//! The table: its required schema, and its creation.

use std::time::Duration;

use aws_sdk_dynamodb::{
    error::{ProvideErrorMetadata, SdkError},
    operation::{
        create_table::CreateTableError, describe_table::DescribeTableError,
        update_time_to_live::UpdateTimeToLiveError,
    },
    types::{
        AttributeDefinition, BillingMode, GlobalSecondaryIndex, GlobalSecondaryIndexDescription,
        IndexStatus, KeySchemaElement, KeyType, Projection, ProjectionType, ScalarAttributeType,
        TableDescription, TableStatus, TimeToLiveSpecification, TimeToLiveStatus,
    },
};
use tokio::time::{Instant, sleep};

use crate::{
    error::{DynamoDbError, DynamoDbErrorKind},
    item::INDEX,
    store::DynamoDbStore,
    table_client::TableClient,
};

impl DynamoDbStore {
    /// Creates the table if it does not exist, waits until it is usable, and enables the deletion of expired items.
    ///
    /// A new table has on-demand billing and the index. This method is for development and tests:
    /// `docs/stores/dynamodb.md` in the repository has equivalents for CloudFormation and Terraform. It checks an existing
    /// table, and changes nothing but the TTL setting.
    ///
    /// # Errors
    ///
    /// [`DynamoDbError`] if the service does not reply or refuses the call, or if the table is not usable within two
    /// minutes. Also if the existing table has another key or a TTL on another attribute than `ttl`. Also if it has no index, or
    /// another one, although [`with_index_shards`](crate::DynamoDbOptions::with_index_shards) is not 0.
    ///
    /// # Cancellation
    ///
    /// A dropped call may or may not have created the table. Call again to continue.
    pub async fn create_table(&self) -> Result<(), DynamoDbError> {
        let inner = &*self.inner;
        inner.create_if_absent().await?;
        let deadline = Instant::now() + USABLE_TIMEOUT;
        while !inner.make_usable().await? {
            if Instant::now() >= deadline {
                let message = "expected the table to become usable within two minutes";
                return Err(DynamoDbError::new(DynamoDbErrorKind::Unusable, message));
            }
            sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }
}

impl TableClient {
    async fn create_if_absent(&self) -> Result<(), DynamoDbError> {
        let index = GlobalSecondaryIndex::builder()
            .index_name(INDEX)
            .key_schema(key("listed", KeyType::Hash)?)
            .key_schema(key("since", KeyType::Range)?)
            .projection(
                Projection::builder()
                    .projection_type(ProjectionType::Include)
                    .set_non_key_attributes(Some(PROJECTED_ATTRIBUTES.map(str::to_owned).into()))
                    .build(),
            )
            .build()
            .map_err(|_| incomplete_description())?;
        let create = self
            .admin_client
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
                // The table exists, or another process is creating it.
                Some(CreateTableError::ResourceInUseException(_)) => Ok(()),
                _ => Err(DynamoDbError::from_table_call(&error)),
            },
        }
    }

    /// Takes the next steps towards a usable table. Returns `true` if the table is usable and TTL is enabled.
    async fn make_usable(&self) -> Result<bool, DynamoDbError> {
        let Some(table) = self.describe().await? else {
            // The new table is not visible yet, or another process has deleted the table.
            self.create_if_absent().await?;
            return Ok(false);
        };
        match table.table_status() {
            Some(TableStatus::Active | TableStatus::Updating) => {
                Self::check_key(&table)?;
                self.check_index(&table)?;
                // The status is `Updating` while the index is being created. The index then accepts writes and no queries.
                if self.options.shards > 0 && is_index_changing(&table) {
                    return Ok(false);
                }
                self.enable_ttl().await
            }
            _ => Ok(false),
        }
    }

    pub(crate) async fn describe(&self) -> Result<Option<TableDescription>, DynamoDbError> {
        let describe = self.admin_client.describe_table().table_name(&self.table);
        match Box::pin(describe.send()).await {
            Ok(described) => match described.table {
                Some(table) => Ok(Some(table)),
                None => Err(DynamoDbError::unusable("a description of the table")),
            },
            Err(error) => match error.as_service_error() {
                Some(DescribeTableError::ResourceNotFoundException(_)) => Ok(None),
                _ => Err(DynamoDbError::from_table_call(&error)),
            },
        }
    }

    /// Checks that the table has the key of this store.
    pub(crate) fn check_key(table: &TableDescription) -> Result<(), DynamoDbError> {
        let keys = table.key_schema().iter();
        let keys: Vec<_> = keys.map(KeySchemaElement::attribute_name).collect();
        let is_binary = |it: &AttributeDefinition| {
            it.attribute_name() == "id" && *it.attribute_type() == ScalarAttributeType::B
        };
        if keys != ["id"] || !table.attribute_definitions().iter().any(is_binary) {
            return Err(DynamoDbError::unusable(
                "a table with the partition key `id` of type B",
            ));
        }
        Ok(())
    }

    /// Checks that the table has the index of this store, unless the options turn it off.
    pub(crate) fn check_index(&self, table: &TableDescription) -> Result<(), DynamoDbError> {
        if self.options.shards == 0 {
            return Ok(());
        }
        let Some(index) = index(table) else {
            return Err(DynamoDbError::unusable("a table with the index `listed`"));
        };
        let has_key = |name: &str, kind: &KeyType, attribute: &ScalarAttributeType| {
            let mut keys = index.key_schema().iter();
            let mut attributes = table.attribute_definitions().iter();
            keys.any(|it| it.attribute_name() == name && it.key_type() == kind)
                && attributes
                    .any(|it| it.attribute_name() == name && it.attribute_type() == attribute)
        };
        if !has_key("listed", &KeyType::Hash, &ScalarAttributeType::S)
            || !has_key("since", &KeyType::Range, &ScalarAttributeType::N)
        {
            return Err(DynamoDbError::unusable(
                "an index `listed` with the keys `listed` of type S and `since` of type N",
            ));
        }
        match missing_attribute(index) {
            None => Ok(()),
            Some(missing) => {
                let expected = format!("an index `listed` with the attribute `{missing}`");
                Err(DynamoDbError::unusable(&expected))
            }
        }
    }

    /// Returns `true` if the service deletes expired items.
    pub(crate) async fn is_ttl_enabled(&self) -> Result<bool, DynamoDbError> {
        let describe = self
            .admin_client
            .describe_time_to_live()
            .table_name(&self.table);
        let described = Box::pin(describe.send()).await;
        let described = described.map_err(|error| DynamoDbError::from_table_call(&error))?;
        let Some(ttl) = described.time_to_live_description else {
            return Ok(false);
        };
        match ttl.time_to_live_status() {
            Some(TimeToLiveStatus::Enabled | TimeToLiveStatus::Enabling) => {}
            _ => return Ok(false),
        }
        // A table has one TTL attribute. With another one, the service would never delete expired items of this store.
        match ttl.attribute_name() {
            Some(TTL_ATTRIBUTE) | None => Ok(true),
            Some(_) => Err(DynamoDbError::unusable("a TTL on the attribute `ttl`")),
        }
    }

    /// Enables the deletion of expired items. Returns `false` if the service cannot do so yet, because it updates the table.
    async fn enable_ttl(&self) -> Result<bool, DynamoDbError> {
        if self.is_ttl_enabled().await? {
            return Ok(true);
        }
        let specification = TimeToLiveSpecification::builder()
            .attribute_name(TTL_ATTRIBUTE)
            .enabled(true)
            .build()
            .map_err(|_| incomplete_description())?;
        let update = self
            .admin_client
            .update_time_to_live()
            .table_name(&self.table)
            .time_to_live_specification(specification);
        match Box::pin(update.send()).await {
            Ok(_) => Ok(true),
            Err(error) => match error.as_service_error() {
                Some(UpdateTimeToLiveError::ResourceInUseException(_)) => Ok(false),
                // Another process may have enabled TTL meanwhile. The same error code also means that TTL was disabled a
                // moment before, a change that takes the service some time.
                _ if may_be_enabled_already(&error) && self.is_ttl_enabled().await? => Ok(true),
                _ => Err(DynamoDbError::from_table_call(&error)),
            },
        }
    }
}

/// Returns `true` if the index is being created or deleted.
fn is_index_changing(table: &TableDescription) -> bool {
    let status = index(table).and_then(|it| it.index_status());
    matches!(status, Some(IndexStatus::Creating | IndexStatus::Deleting))
}

fn index(table: &TableDescription) -> Option<&GlobalSecondaryIndexDescription> {
    let mut indexes = table.global_secondary_indexes().iter();
    indexes.find(|it| it.index_name() == Some(INDEX))
}

/// Returns an attribute that a listing needs and that the index does not include.
fn missing_attribute(index: &GlobalSecondaryIndexDescription) -> Option<&'static str> {
    // An endpoint without projections includes all attributes.
    let projection = index.projection()?;
    let included = match projection.projection_type() {
        None | Some(ProjectionType::All) => return None,
        Some(ProjectionType::Include) => projection.non_key_attributes(),
        Some(_) => &[],
    };
    let is_missing = |name: &&str| !included.iter().any(|it| it == name);
    PROJECTED_ATTRIBUTES.into_iter().find(is_missing)
}

/// Returns `true` if another process may have enabled TTL meanwhile. The service reports that with a general error code.
fn may_be_enabled_already<E: ProvideErrorMetadata, R>(error: &SdkError<E, R>) -> bool {
    let reported = error.as_service_error();
    reported.and_then(ProvideErrorMetadata::code) == Some("ValidationException")
}

fn attribute(name: &str, kind: ScalarAttributeType) -> Result<AttributeDefinition, DynamoDbError> {
    let definition = AttributeDefinition::builder().attribute_name(name);
    definition
        .attribute_type(kind)
        .build()
        .map_err(|_| incomplete_description())
}

fn key(name: &str, kind: KeyType) -> Result<KeySchemaElement, DynamoDbError> {
    let element = KeySchemaElement::builder().attribute_name(name);
    element
        .key_type(kind)
        .build()
        .map_err(|_| incomplete_description())
}

/// Returns the error of an SDK builder that lacks a value. This module sets all values.
fn incomplete_description() -> DynamoDbError {
    DynamoDbError::unusable("a complete description of the table")
}

/// Attributes that the index includes in addition to the keys.
const PROJECTED_ATTRIBUTES: [&str; 7] = [
    "expires",
    "generation",
    "lease_ends",
    "operation",
    "owner",
    "reason",
    "token",
];

/// Attribute with the time from which the service may delete an item.
const TTL_ATTRIBUTE: &str = "ttl";

/// Limit of the wait until the table is usable.
const USABLE_TIMEOUT: Duration = Duration::from_secs(120);
const POLL_INTERVAL: Duration = Duration::from_millis(200);
