//! The store `dynamodb://TABLE?endpoint=URL&skew=DURATION&shards=N`. Creates the table if it is missing, unless the options
//! say otherwise.

use std::env;

use aws_config::{BehaviorVersion, Region, SdkConfig};
use tower_idempotency_dynamodb::{
    DynamoDbOptions, DynamoDbStore,
    aws_sdk_dynamodb::{Client, config::Credentials},
    https_client,
};

use crate::{OpenError, OpenOptions};

pub(crate) async fn open(url: &str, options: &OpenOptions) -> Result<DynamoDbStore, OpenError> {
    let mut address = Address::parse(url)?;
    if let Some(timeout) = options.timeout {
        address.options = address.options.with_timeout(timeout);
    }
    let sdk = load_config(address.endpoint).await;
    let store = address.options.store(&Client::new(&sdk), address.table);
    if options.creates {
        let created = store.create_table().await;
        created.map_err(|error| OpenError::unusable("dynamodb", &error))?;
    }
    Ok(store)
}

struct Address<'a> {
    table: &'a str,
    endpoint: Option<&'a str>,
    options: DynamoDbOptions,
}

impl<'a> Address<'a> {
    fn parse(url: &'a str) -> Result<Self, OpenError> {
        let rest = url.strip_prefix("dynamodb://").unwrap_or_default();
        let (table, query) = rest.split_once('?').unwrap_or((rest, ""));
        if table.is_empty() {
            let expected = "a table, as in dynamodb://TABLE?endpoint=URL";
            return Err(OpenError::url(expected));
        }
        let mut address = Self {
            table,
            endpoint: None,
            options: DynamoDbOptions::new(),
        };
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            match pair.split_once('=') {
                Some(("endpoint", endpoint)) => address.endpoint = Some(endpoint),
                Some(("skew", skew)) => {
                    let skew = humantime::parse_duration(skew)
                        .map_err(|_| OpenError::url("a duration after skew=, as in skew=500ms"))?;
                    address.options = address.options.with_clock_skew(skew);
                }
                Some(("shards", shards)) => {
                    let expected = "a number up to 65535 after shards=, as in shards=32";
                    let shards = shards.parse().map_err(|_| OpenError::url(expected))?;
                    address.options = address.options.with_index_shards(shards);
                }
                Some(_) | None => {
                    return Err(OpenError::url(
                        "endpoint=URL, skew=DURATION or shards=N after the ?",
                    ));
                }
            }
        }
        Ok(address)
    }
}

/// Loads region and credentials from the default sources. A plain HTTP endpoint is not AWS: placeholders then replace a
/// region and credentials that are missing from the environment.
async fn load_config(endpoint: Option<&str>) -> SdkConfig {
    let mut loader = aws_config::defaults(BehaviorVersion::latest()).http_client(https_client());
    if let Some(endpoint) = endpoint {
        loader = loader.endpoint_url(endpoint);
        if endpoint.starts_with("http://") && env::var_os("AWS_ACCESS_KEY_ID").is_none() {
            let placeholder = Credentials::new("local", "local", None, None, "local");
            loader = loader.credentials_provider(placeholder);
            if env::var_os("AWS_REGION").is_none() {
                loader = loader.region(Region::from_static("us-east-1"));
            }
        }
    }
    loader.load().await
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn address_has_table_and_optional_settings() {
        let address = Address::parse("dynamodb://keys").ok().unwrap();
        assert_eq!((address.table, address.endpoint), ("keys", None));
        let url = "dynamodb://keys?endpoint=http://127.0.0.1:8000&skew=50ms&shards=32";
        let address = Address::parse(url).ok().unwrap();
        assert_eq!(address.endpoint, Some("http://127.0.0.1:8000"));
        let skew = format!("{:?}", Duration::from_millis(50));
        let options = format!("{:?}", address.options);
        assert!(options.contains(&skew), "{options}");
        assert!(options.contains("shards: 32"), "{options}");
    }

    #[test]
    fn invalid_address_is_rejected_with_reason() {
        let table = "expected a table, as in dynamodb://TABLE?endpoint=URL";
        let shards = "expected a number up to 65535 after shards=, as in shards=32";
        for (url, text) in [
            ("dynamodb:", table),
            ("dynamodb://", table),
            ("dynamodb://?endpoint=http://127.0.0.1:8000", table),
            (
                "dynamodb://keys?table=hush",
                "expected endpoint=URL, skew=DURATION or shards=N after the ?",
            ),
            (
                "dynamodb://keys?skew=hush",
                "expected a duration after skew=, as in skew=500ms",
            ),
            ("dynamodb://keys?shards=hush", shards),
            ("dynamodb://keys?shards=65536", shards),
        ] {
            let error = Address::parse(url).err().unwrap();
            assert_eq!(error.to_string(), text, "{url}");
        }
    }
}
