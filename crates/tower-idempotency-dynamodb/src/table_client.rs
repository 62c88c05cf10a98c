//! The clients of a table, with the settings of the store.

use aws_sdk_dynamodb::Client;

use crate::options::DynamoDbOptions;

/// Clients of a table. Each module adds the calls of its topic.
pub(crate) struct TableClient {
    /// Client for store calls, with the timeout and attempts of the options.
    pub(crate) client: Client,
    /// Client for the table and for listings, as the application configured it. Its attempts have a timeout.
    pub(crate) admin_client: Client,
    pub(crate) table: String,
    pub(crate) options: DynamoDbOptions,
}
