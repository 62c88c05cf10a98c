//! Stores from a URL.

use std::{env, net::Ipv6Addr, time::Duration};

use aws_config::{BehaviorVersion, Region, SdkConfig};
use aws_sdk_dynamodb::{Client, config::Credentials};

use crate::{
    error::{DynamoDbError, DynamoDbErrorKind},
    https::https_client,
    options::DynamoDbOptions,
    store::DynamoDbStore,
};

impl DynamoDbStore {
    /// Connects to the table of a URL, such as `dynamodb://payments-idempotency`, with the default [`DynamoDbOptions`]. Creates
    /// the table if it does not exist.
    ///
    /// See [`DynamoDbOptions::connect`] for the form of the URL and the credentials.
    ///
    /// # Errors
    ///
    /// [`DynamoDbError`] of the kind [`Address`](DynamoDbErrorKind::Address) if the URL is invalid, and the errors of
    /// [`create_table`](Self::create_table).
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the table may or may not have been created. Call again to continue.
    pub async fn connect(url: &str) -> Result<Self, DynamoDbError> {
        DynamoDbOptions::new().connect(url).await
    }
}

impl DynamoDbOptions {
    /// Connects to the table of a URL, such as `dynamodb://payments-idempotency?shards=32`. Creates the table if it does not
    /// exist, as [`create_table`](DynamoDbStore::create_table) does.
    ///
    /// Instead of a name, the URL may have the ARN of a table. Each parameter is optional, and replaces the setting:
    ///
    /// | parameter | sets |
    /// |---|---|
    /// | `endpoint=URL` | the endpoint, such as `http://127.0.0.1:8000`; default: that of the region |
    /// | `skew=DURATION` | [`with_clock_skew`](Self::with_clock_skew), such as `500ms` |
    /// | `shards=N` | [`with_index_shards`](Self::with_index_shards) |
    /// | `completed-index=BOOL` | [`with_completed_index`](Self::with_completed_index): `true` or `false` |
    ///
    /// An endpoint has a host, and optionally a port and a path. It has no `%`.
    ///
    /// Region and credentials come from sources of the AWS SDK, in this order:
    ///
    /// 1. the environment
    /// 2. the profile files, with keys or a role
    /// 3. a web identity token
    /// 4. the role of the container, and that of the instance
    ///
    /// This crate enables neither the SSO nor the `credential_process` of a profile. The client is an [`https_client`]. To use
    /// other credentials or another client, create the client and call [`store`](Self::store).
    ///
    /// An endpoint of plain HTTP is not AWS, so placeholders replace missing settings. If the environment has no
    /// `AWS_ACCESS_KEY_ID`, this applies to the credentials. If it has neither `AWS_REGION` nor `AWS_DEFAULT_REGION`, this
    /// applies to the region. Other sources are then not read.
    ///
    /// ```no_run
    /// use tower_idempotency_dynamodb::DynamoDbOptions;
    ///
    /// # async fn f() -> Result<(), tower_idempotency_dynamodb::DynamoDbError> {
    /// let options = DynamoDbOptions::new().with_attempts(5);
    /// let store = options.connect("dynamodb://keys?endpoint=http://127.0.0.1:8000").await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`DynamoDbError`] of the kind [`Address`](DynamoDbErrorKind::Address) if the URL is invalid, and the errors of
    /// [`create_table`](DynamoDbStore::create_table). The error of an invalid URL contains no part of the URL.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the table may or may not have been created. Call again to continue.
    pub async fn connect(self, url: &str) -> Result<DynamoDbStore, DynamoDbError> {
        let store = self.store_from_url(url).await?;
        store.create_table().await?;
        Ok(store)
    }

    /// Creates a store on the table of a URL, like [`connect`](Self::connect), but makes no call to DynamoDB. Use it in
    /// programs that must not create a table.
    ///
    /// It reads the region from its source. If no source has a region, the first call of the store fails.
    ///
    /// # Errors
    ///
    /// [`DynamoDbError`] of the kind [`Address`](DynamoDbErrorKind::Address) if the URL is invalid.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, there are no effects.
    pub async fn store_from_url(self, url: &str) -> Result<DynamoDbStore, DynamoDbError> {
        let address = Address::parse(url, self)?;
        let config = load_config(address.endpoint).await;
        Ok(address.options.store(&Client::new(&config), address.table))
    }
}

/// The parts of a URL.
struct Address<'a> {
    table: &'a str,
    endpoint: Option<&'a str>,
    options: DynamoDbOptions,
}

impl<'a> Address<'a> {
    /// Parses a URL. Its parameters replace settings of the options.
    fn parse(url: &'a str, options: DynamoDbOptions) -> Result<Self, DynamoDbError> {
        let rest = url.strip_prefix("dynamodb://").unwrap_or_default();
        let (table, query) = rest.split_once('?').unwrap_or((rest, ""));
        if !is_table(table) {
            return Err(invalid("a table, as in dynamodb://TABLE?endpoint=URL"));
        }
        let mut address = Self {
            table,
            endpoint: None,
            options,
        };
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            address = match pair.split_once('=') {
                Some(("endpoint", endpoint)) => address.with_endpoint(endpoint)?,
                Some((name, value)) => address.with_setting(name, value)?,
                None => return Err(invalid(PARAMETERS)),
            };
        }
        Ok(address)
    }

    fn with_endpoint(mut self, endpoint: &'a str) -> Result<Self, DynamoDbError> {
        if !is_endpoint(endpoint) {
            let expected = "an HTTP or HTTPS URL without credentials after endpoint=";
            return Err(invalid(expected));
        }
        self.endpoint = Some(endpoint);
        Ok(self)
    }

    fn with_setting(mut self, name: &str, value: &str) -> Result<Self, DynamoDbError> {
        self.options = match name {
            "skew" => {
                let skew: Duration = humantime::parse_duration(value)
                    .map_err(|_| invalid("a duration after skew=, as in skew=500ms"))?;
                self.options.with_clock_skew(skew)
            }
            "shards" => {
                let expected = "a number up to 65535 after shards=, as in shards=32";
                let shards = value.parse().map_err(|_| invalid(expected))?;
                self.options.with_index_shards(shards)
            }
            "completed-index" => {
                let expected = "true or false after completed-index=";
                let has_index = value.parse().map_err(|_| invalid(expected))?;
                self.options.with_completed_index(has_index)
            }
            _ => return Err(invalid(PARAMETERS)),
        };
        Ok(self)
    }
}

/// Returns the error of a URL that is not as expected. It contains no part of the URL, which may have a password.
fn invalid(expected: &str) -> DynamoDbError {
    DynamoDbError::new(DynamoDbErrorKind::Address, format!("expected {expected}"))
}

/// Returns `true` for the name or the ARN of a table. The service would quote other text, such as credentials, in its error.
fn is_table(text: &str) -> bool {
    let is_arn = text.starts_with("arn:");
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
    !text.is_empty()
        && text
            .bytes()
            .all(|it| is_part(it) || (is_arn && b":/".contains(&it)))
}

/// Returns `true` for a URL of an endpoint: a host, and optionally a port and a path. The SDK would quote other text, such as
/// credentials, in its error. So nothing is escaped, and a colon separates only a port.
fn is_endpoint(text: &str) -> bool {
    let rest = text.strip_prefix("http://");
    let Some(rest) = rest.or_else(|| text.strip_prefix("https://")) else {
        return false;
    };
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    let (is_host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (address, port) = rest.split_once(']').unwrap_or_default();
            (address.parse::<Ipv6Addr>().is_ok(), port)
        }
        None => {
            let end = authority.find(':').unwrap_or(authority.len());
            let (host, port) = authority.split_at(end);
            (!host.is_empty() && host.bytes().all(is_part), port)
        }
    };
    let has_valid_port = port.is_empty() || port.strip_prefix(':').is_some_and(is_port);
    is_host && has_valid_port && path.bytes().all(|it| it == b'/' || is_part(it))
}

fn is_port(text: &str) -> bool {
    text.bytes().all(|it| it.is_ascii_digit()) && text.parse::<u16>().is_ok()
}

/// The settings that are missing, and that placeholders replace. Only a plain HTTP endpoint gets placeholders, since it is not
/// AWS.
#[derive(Debug, PartialEq, Eq)]
struct Placeholders {
    credentials: bool,
    region: bool,
}

impl Placeholders {
    /// Returns the placeholders for settings that the environment lacks. `is_set` returns `true` for each of its variables.
    fn of(endpoint: &str, is_set: impl Fn(&str) -> bool) -> Self {
        let is_local = endpoint.starts_with("http://");
        let has_region = is_set("AWS_REGION") || is_set("AWS_DEFAULT_REGION");
        Self {
            credentials: is_local && !is_set("AWS_ACCESS_KEY_ID"),
            region: is_local && !has_region,
        }
    }
}

/// Loads region and credentials from their sources, or sets [`Placeholders`].
async fn load_config(endpoint: Option<&str>) -> SdkConfig {
    let mut loader = aws_config::defaults(BehaviorVersion::latest()).http_client(https_client());
    if let Some(endpoint) = endpoint {
        loader = loader.endpoint_url(endpoint);
        let placeholders = Placeholders::of(endpoint, |name| env::var_os(name).is_some());
        if placeholders.credentials {
            let placeholder = Credentials::new("local", "local", None, None, "local");
            loader = loader.credentials_provider(placeholder);
        }
        if placeholders.region {
            loader = loader.region(Region::from_static("us-east-1"));
        }
    }
    Box::pin(loader.load()).await
}

const PARAMETERS: &str =
    "endpoint=URL, skew=DURATION, shards=N or completed-index=BOOL after the ?";

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str) -> Result<Address<'_>, DynamoDbError> {
        Address::parse(url, DynamoDbOptions::new().with_index_shards(3))
    }

    #[test]
    fn address_has_table_and_optional_settings() {
        let address = parse("dynamodb://keys").ok().unwrap();
        assert_eq!((address.table, address.endpoint), ("keys", None));
        let options = &address.options;
        assert_eq!((options.shards, options.has_completed_index), (3, false));

        let url = "dynamodb://keys?endpoint=http://127.0.0.1:8000&skew=50ms&shards=32&completed-index=true";
        let address = parse(url).ok().unwrap();
        assert_eq!(address.endpoint, Some("http://127.0.0.1:8000"));
        let options = &address.options;
        assert_eq!(options.clock.skew, Duration::from_millis(50));
        assert_eq!((options.shards, options.has_completed_index), (32, true));
    }

    #[test]
    fn endpoint_has_host_and_optional_port_and_path() {
        for endpoint in [
            "http://127.0.0.1:8000",
            "http://localhost:8000/",
            "http://[::1]:8000",
            "https://[2001:db8::1]",
            "https://dynamodb.eu-central-1.amazonaws.com",
            "https://vpce-1.example:443/path/of_the.service",
        ] {
            assert!(is_endpoint(endpoint), "{endpoint}");
        }
    }

    #[test]
    fn placeholders_replace_missing_settings() {
        let placeholders = |credentials, region| Placeholders {
            credentials,
            region,
        };
        let (key, region, default) = ("AWS_ACCESS_KEY_ID", "AWS_REGION", "AWS_DEFAULT_REGION");
        let cases: [(&str, &[&str], Placeholders); 6] = [
            ("http://host", &[], placeholders(true, true)),
            ("http://host", &[key], placeholders(false, true)),
            ("http://host", &[region], placeholders(true, false)),
            ("http://host", &[default], placeholders(true, false)),
            ("http://host", &[key, region], placeholders(false, false)),
            ("https://host", &[], placeholders(false, false)),
        ];
        for (endpoint, variables, expected) in cases {
            let found = Placeholders::of(endpoint, |name| variables.contains(&name));
            assert_eq!(found, expected, "{endpoint} {variables:?}");
        }
    }

    #[test]
    fn address_accepts_arn() {
        let arn = "arn:aws:dynamodb:eu-central-1:123456789012:table/payments.keys_1";
        let url = format!("dynamodb://{arn}");
        assert_eq!(parse(&url).ok().unwrap().table, arn);
    }

    #[test]
    fn invalid_address_is_rejected_with_reason() {
        let table = "expected a table, as in dynamodb://TABLE?endpoint=URL";
        let parameters =
            "expected endpoint=URL, skew=DURATION, shards=N or completed-index=BOOL after the ?";
        let endpoint = "expected an HTTP or HTTPS URL without credentials after endpoint=";
        let shards = "expected a number up to 65535 after shards=, as in shards=32";
        let index = "expected true or false after completed-index=";
        for (url, text) in [
            ("", table),
            ("redis://keys", table),
            ("dynamodb:", table),
            ("dynamodb:keys", table),
            ("dynamodb://", table),
            ("dynamodb://?endpoint=http://127.0.0.1:8000", table),
            ("dynamodb://hush:hush@keys", table),
            ("dynamodb://hush:hush", table),
            ("dynamodb://hush/hush", table),
            ("dynamodb://keys?table=hush", parameters),
            ("dynamodb://keys?hush", parameters),
            ("dynamodb://keys?endpoint=", endpoint),
            ("dynamodb://keys?endpoint=http://", endpoint),
            ("dynamodb://keys?endpoint=hush", endpoint),
            ("dynamodb://keys?endpoint=https://hush:hush@host", endpoint),
            ("dynamodb://keys?endpoint=https://host/hush hush", endpoint),
            ("dynamodb://keys?endpoint=https://app:hush%40host", endpoint),
            ("dynamodb://keys?endpoint=https://app:hush:8000", endpoint),
            ("dynamodb://keys?endpoint=https://hush%40host", endpoint),
            ("dynamodb://keys?endpoint=https://host/hush:hush", endpoint),
            ("dynamodb://keys?endpoint=https://[hush]:8000", endpoint),
            ("dynamodb://keys?endpoint=https://[::1", endpoint),
            ("dynamodb://keys?endpoint=https://[::1]hush", endpoint),
            ("dynamodb://keys?endpoint=https://:8000", endpoint),
            ("dynamodb://keys?endpoint=https://host:", endpoint),
            ("dynamodb://keys?endpoint=https://host:+80", endpoint),
            ("dynamodb://keys?endpoint=https://host:65536", endpoint),
            (
                "dynamodb://keys?skew=hush",
                "expected a duration after skew=, as in skew=500ms",
            ),
            ("dynamodb://keys?shards=hush", shards),
            ("dynamodb://keys?shards=65536", shards),
            ("dynamodb://keys?completed-index=hush", index),
            ("dynamodb://keys?completed-index", parameters),
        ] {
            let error = parse(url).err().unwrap();
            assert_eq!(error.to_string(), text, "{url}");
            assert_eq!(error.kind(), DynamoDbErrorKind::Address, "{url}");
            assert!(!format!("{error:?}").contains("hush"), "{url}");
        }
    }
}
