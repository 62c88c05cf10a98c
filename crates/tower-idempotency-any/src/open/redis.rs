//! Opens the store of a Redis URL.

use tower_idempotency_redis::{ConnectError, ConnectErrorKind, RedisOptions};

use super::refuse_split_password;
use crate::{AnyStore, OpenError, OpenOptions};

/// Connects to a server.
pub(super) async fn open_redis(url: &str, options: &OpenOptions) -> Result<AnyStore, OpenError> {
    let parsed = RedisUrl::parse(url, options)?;
    let url = format!("{}{}", parsed.address, parsed.suffix);
    let connected = parsed.options.connect(&url).await;
    let form = "redis://:PASSWORD@HOST:PORT/DB";
    Ok(connected.map_err(|error| redis_error(&error, form))?.into())
}

/// Connects to a cluster. The URL is `redis+cluster://HOST:PORT,HOST:PORT`, and `scheme` that of the nodes.
pub(super) async fn open_redis_cluster(
    url: &str,
    scheme: &str,
    options: &OpenOptions,
) -> Result<AnyStore, OpenError> {
    let parsed = RedisUrl::parse(url, options)?;
    let nodes = parsed.nodes(scheme)?;
    let connected = parsed.options.connect_cluster(nodes).await;
    let form = "redis+cluster://HOST:PORT,HOST:PORT";
    Ok(connected.map_err(|error| redis_error(&error, form))?.into())
}

/// The parts of a URL.
struct RedisUrl<'a> {
    /// The URL up to its parameters.
    address: &'a str,
    /// The parameters for the driver, and the fragment.
    suffix: String,
    options: RedisOptions,
}

impl<'a> RedisUrl<'a> {
    /// Parses a URL. The parameter of this crate replaces the setting of the options. The driver gets its own parameter.
    fn parse(url: &'a str, options: &OpenOptions) -> Result<Self, OpenError> {
        let mut redis = RedisOptions::new().with_completed_index(options.has_completed_index);
        if let Some(timeout) = options.timeout {
            redis = redis.with_timeout(timeout);
        }
        if let Some(prefix) = &options.prefix {
            redis = redis.with_prefix(prefix);
        }
        let (rest, fragment) = match url.split_once('#') {
            Some((rest, fragment)) => (rest, Some(fragment)),
            None => (url, None),
        };
        // Without TLS the driver ignores any fragment, even if it is the rest of a password.
        if fragment.is_some_and(|fragment| fragment != INSECURE) {
            return Err(OpenError::url(FRAGMENT));
        }
        let (address, query) = rest.split_once('?').unwrap_or((rest, ""));
        if query.contains('?') {
            return Err(OpenError::url(QUESTION_MARKS));
        }
        refuse_split_password(url)?;
        let mut suffix = String::new();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            if name.contains('%') {
                return Err(OpenError::url(ENCODED_NAME));
            }
            if name == "completed-index" {
                let expected = "true or false after completed-index=";
                let has_index = value.parse().map_err(|_| OpenError::url(expected))?;
                redis = redis.with_completed_index(has_index);
            } else if name == "protocol" {
                suffix.push(if suffix.is_empty() { '?' } else { '&' });
                suffix.push_str(pair);
            } else {
                // The driver would ignore it.
                return Err(OpenError::url(PARAMETERS));
            }
        }
        if let Some(fragment) = fragment {
            suffix.push('#');
            suffix.push_str(fragment);
        }
        Ok(Self {
            address,
            suffix,
            options: redis,
        })
    }

    /// Returns the URLs of the nodes of a cluster. Each node gets the parameters and the fragment, because the driver refuses
    /// nodes that differ.
    fn nodes(&self, scheme: &str) -> Result<Vec<String>, OpenError> {
        let Some((_, nodes)) = self.address.split_once("://") else {
            return Err(OpenError::url(NODES));
        };
        if self.suffix.contains(',') {
            return Err(OpenError::url(PARAMETERS_BEFORE_NODE));
        }
        let nodes: Vec<_> = nodes.split(',').collect();
        // A comma in a password splits it. The driver would connect to a host with the name of the user.
        let has_credentials = |node: &&str| node.contains('@');
        if nodes.iter().any(has_credentials) && !nodes.iter().all(has_credentials) {
            return Err(OpenError::url(SPLIT_CREDENTIALS));
        }
        Ok(nodes
            .into_iter()
            .map(|node| format!("{scheme}://{node}{}", self.suffix))
            .collect())
    }
}

/// Returns the error of a store that did not connect. The source of an invalid address may quote the address.
fn redis_error(error: &ConnectError, form: &str) -> OpenError {
    match error.kind() {
        ConnectErrorKind::Address => OpenError::url(format_args!("an address of the form {form}")),
        _ => OpenError::unusable("redis", error),
    }
}

/// The fragment with which the driver does not verify certificates, if the program enables that feature of the driver.
const INSECURE: &str = "insecure";
const FRAGMENT: &str =
    "no # but that of #insecure at the end of the URL: write %23 for a # in a password";
const QUESTION_MARKS: &str =
    "one ? in the URL, and & between its parameters: write %3F for a ? in a password";
const ENCODED_NAME: &str = "the name of each parameter without a %";
const PARAMETERS: &str = "only completed-index and protocol after the ? of the URL";
const NODES: &str = "nodes, as in redis+cluster://HOST:PORT,HOST:PORT";
const SPLIT_CREDENTIALS: &str =
    "the user and the password before each node: write %2C for a comma in a password";
const PARAMETERS_BEFORE_NODE: &str = "the parameters after the last node, \
                                      as in redis+cluster://HOST:PORT,HOST:PORT?completed-index=true";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::OpenErrorKind;

    /// Returns the URL for the driver, and `true` if the store has the index of completed entries.
    fn parse(url: &str, options: &OpenOptions) -> (String, bool) {
        let parsed = RedisUrl::parse(url, options).ok().unwrap();
        let debug = format!("{:?}", parsed.options);
        let has_index = debug.contains("has_completed_index: true");
        assert_ne!(has_index, debug.contains("has_completed_index: false"));
        (format!("{}{}", parsed.address, parsed.suffix), has_index)
    }

    /// The driver gets its parameters in their order, and the fragment.
    #[test]
    fn url_sets_completed_index() {
        for (url, for_driver, has_index) in [
            ("redis://host/0", "redis://host/0", false),
            ("redis://host/0?", "redis://host/0", false),
            (
                "redis://host/0?completed-index=true",
                "redis://host/0",
                true,
            ),
            ("redis://host?completed-index=true", "redis://host", true),
            (
                "redis://host/0?protocol=2&completed-index=true&protocol=3",
                "redis://host/0?protocol=2&protocol=3",
                true,
            ),
            (
                "redis://host/0?completed-index=true&protocol=resp3",
                "redis://host/0?protocol=resp3",
                true,
            ),
            (
                "redis://host/0?protocol=resp3&completed-index=true",
                "redis://host/0?protocol=resp3",
                true,
            ),
            (
                "redis://host/0?&&completed-index=true&",
                "redis://host/0",
                true,
            ),
            (
                "redis://host/0?protocol&protocol=",
                "redis://host/0?protocol&protocol=",
                false,
            ),
            // The last one counts.
            (
                "redis://host/0?completed-index=false&completed-index=true",
                "redis://host/0",
                true,
            ),
            (
                "redis://host/0?completed-index=true&completed-index=false",
                "redis://host/0",
                false,
            ),
            // The driver decodes the address and the values of its parameters.
            (
                "redis://:p%23s%3Fw@host/0?completed-index=true&protocol=%26",
                "redis://:p%23s%3Fw@host/0?protocol=%26",
                true,
            ),
            (
                "rediss://host/0#insecure",
                "rediss://host/0#insecure",
                false,
            ),
            (
                "rediss://host/0?completed-index=true#insecure",
                "rediss://host/0#insecure",
                true,
            ),
            (
                "rediss://host?protocol=resp3&completed-index=true#insecure",
                "rediss://host?protocol=resp3#insecure",
                true,
            ),
        ] {
            let parsed = parse(url, &OpenOptions::new());
            assert_eq!(parsed, (for_driver.to_owned(), has_index), "{url}");
        }
    }

    #[test]
    fn url_replaces_completed_index_of_options() {
        for (in_options, url, has_index) in [
            (true, "redis://host/0", true),
            (true, "redis://host/0?completed-index=false", false),
            (true, "redis+cluster://a:1,b:2", true),
            (true, "redis+cluster://a:1,b:2?completed-index=false", false),
            (false, "redis+cluster://a:1,b:2?completed-index=true", true),
        ] {
            let options = OpenOptions::new().with_completed_index(in_options);
            assert_eq!(parse(url, &options).1, has_index, "{url}");
        }
    }

    /// The driver needs equal parameters for all nodes.
    #[test]
    fn each_node_gets_parameters_and_fragment() {
        for (url, scheme, nodes) in [
            (
                "redis+cluster://a:1,b:2",
                "redis",
                ["redis://a:1", "redis://b:2"],
            ),
            (
                "redis+cluster://a:1,b:2?completed-index=true",
                "redis",
                ["redis://a:1", "redis://b:2"],
            ),
            (
                "rediss+cluster://a:1,b:2?completed-index=true&protocol=resp3#insecure",
                "rediss",
                [
                    "rediss://a:1?protocol=resp3#insecure",
                    "rediss://b:2?protocol=resp3#insecure",
                ],
            ),
            (
                "redis+cluster://:a%2Cb@a:1,:a%2Cb@b:2",
                "redis",
                ["redis://:a%2Cb@a:1", "redis://:a%2Cb@b:2"],
            ),
        ] {
            let parsed = RedisUrl::parse(url, &OpenOptions::new()).ok().unwrap();
            assert_eq!(parsed.nodes(scheme).unwrap(), nodes, "{url}");
        }
    }

    /// Each URL that no driver gets. The password is part of no text.
    #[test]
    fn refused_urls_have_these_texts() {
        let value = "expected true or false after completed-index=";
        let name = "expected the name of each parameter without a %";
        let parameters = "expected only completed-index and protocol after the ? of the URL";
        let fragment = "expected no # but that of #insecure at the end of the URL: write %23 for a # in a password";
        let question_marks = "expected one ? in the URL, and & between its parameters: write %3F for a ? in a password";
        for (url, text) in [
            ("redis://:hush@host?completed-index=hush", value),
            ("redis://:hush@host?completed-index=", value),
            ("redis://:hush@host?completed-index", value),
            ("redis://:hush@host?completed-index=TRUE", value),
            ("redis://:hush@host?completed-index=%74rue", value),
            ("redis://:hush@host?completed-index=true=", value),
            (
                "redis://:hush@host?completed-index=true&completed-index=",
                value,
            ),
            ("redis://:hush@host?completed%2Dindex=true", name),
            ("redis://:hush@host?%63ompleted-index=true", name),
            ("redis://:hush@host?completed_index=true", parameters),
            ("redis://:hush@host?protocol=resp3&db=3", parameters),
            ("redis+cluster://:hush@a:1,b:2?prefix=hush:", parameters),
            ("redis://:hush@host?hush", parameters),
            (
                "redis://:hush@host?a=1?completed-index=true",
                question_marks,
            ),
            (
                "redis://:hush@host?completed-index=true?a=1",
                question_marks,
            ),
            (
                "redis://:hush?hush@host?completed-index=true",
                question_marks,
            ),
            ("rediss://:hush@host?completed-index=true#hush", fragment),
            ("rediss://:hush@host#", fragment),
            ("rediss://:hush@host#Insecure", fragment),
            ("rediss://:hush@host#insecure#insecure", fragment),
            (
                "rediss://:hush@host#insecure?completed-index=true",
                fragment,
            ),
            ("redis://:1#hush@host/0?completed-index=true", fragment),
            ("redis+cluster://:hush@a:1#insecure,:hush@b:2", fragment),
        ] {
            let error = RedisUrl::parse(url, &OpenOptions::new()).err().expect(url);
            assert_eq!(error.kind(), OpenErrorKind::Url);
            assert_eq!(error.to_string(), text, "{url}");
        }
        let after_nodes = "expected the parameters after the last node, \
                           as in redis+cluster://HOST:PORT,HOST:PORT?completed-index=true";
        let credentials = "expected the user and the password before each node: write %2C for a comma in a password";
        for (url, text) in [
            (
                "redis+cluster://:hush@a:1?protocol=resp3,:hush@b:2",
                after_nodes,
            ),
            // The driver would connect to the host `app`.
            ("redis+cluster://app:1,hush@a:1", credentials),
            ("redis+cluster://app:1,hush@a:1,app:1,hush@b:2", credentials),
            ("redis+cluster://:hush,hush@a:1", credentials),
            ("redis+cluster://:hush@a:1,b:2", credentials),
        ] {
            let parsed = RedisUrl::parse(url, &OpenOptions::new()).ok().unwrap();
            let error = parsed.nodes("redis").expect_err(url);
            assert_eq!(error.kind(), OpenErrorKind::Url);
            assert_eq!(error.to_string(), text, "{url}");
        }
    }
}
