//! The store `dynamodb://TABLE?endpoint=URL&skew=DURATION`. Creates the table if it is missing.

use std::env;

use aws_config::{BehaviorVersion, Region, SdkConfig};
use tower_idempotency_dynamodb::{
    DynamoDbOptions, DynamoDbStore,
    aws_sdk_dynamodb::{Client, config::Credentials},
    https_client,
};

pub(crate) async fn store(url: &str) -> Result<DynamoDbStore, String> {
    let address = Address::parse(url)?;
    let store = address
        .options
        .store(&Client::new(&sdk(address.endpoint).await), address.table);
    let created = store.create_table().await;
    created.map_err(|error| format!("cannot use the dynamodb store: {error}"))?;
    Ok(store)
}

struct Address<'a> {
    table: &'a str,
    endpoint: Option<&'a str>,
    options: DynamoDbOptions,
}

impl<'a> Address<'a> {
    fn parse(url: &'a str) -> Result<Self, String> {
        let rest = url.strip_prefix("dynamodb://").unwrap_or_default();
        let (table, query) = rest.split_once('?').unwrap_or((rest, ""));
        if table.is_empty() {
            return Err("expected a table, as in dynamodb://TABLE?endpoint=URL".to_owned());
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
                    let skew =
                        humantime::parse_duration(skew).map_err(|error| error.to_string())?;
                    address.options = address.options.with_clock_skew(skew);
                }
                _ => return Err("expected endpoint=URL or skew=DURATION after the ?".to_owned()),
            }
        }
        Ok(address)
    }
}

/// Loads region and credentials from the default sources. An endpoint of plain HTTP is not AWS. For such an endpoint,
/// placeholders replace credentials and region that are missing from the environment.
async fn sdk(endpoint: Option<&str>) -> SdkConfig {
    let mut loader = aws_config::defaults(BehaviorVersion::latest()).http_client(https_client());
    if let Some(endpoint) = endpoint {
        loader = loader.endpoint_url(endpoint);
        if endpoint.starts_with("http://") && env::var_os("AWS_ACCESS_KEY_ID").is_none() {
            let placeholder =
                Credentials::new("playground", "playground", None, None, "playground");
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
        let url = "dynamodb://keys?endpoint=http://127.0.0.1:8000&skew=50ms";
        let address = Address::parse(url).ok().unwrap();
        assert_eq!(address.endpoint, Some("http://127.0.0.1:8000"));
        let skew = format!("{:?}", Duration::from_millis(50));
        assert!(format!("{:?}", address.options).contains(&skew));
    }

    #[test]
    fn invalid_address_is_rejected_with_reason() {
        for (url, reason) in [
            ("dynamodb://", "expected a table"),
            (
                "dynamodb://?endpoint=http://127.0.0.1:8000",
                "expected a table",
            ),
            (
                "dynamodb://keys?table=hush",
                "expected endpoint=URL or skew",
            ),
            ("dynamodb://keys?skew=soon", "expected number"),
        ] {
            let error = Address::parse(url).err().unwrap();
            assert!(error.starts_with(reason), "{error}");
            assert!(!error.contains("hush"), "{error}");
        }
    }
}
