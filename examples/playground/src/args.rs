//! The command line, and the layer it describes.

use std::{error::Error, path::PathBuf, time::Duration};

use axum::http::HeaderName;
use clap::{Parser, ValueEnum};
use tower_idempotency::{
    ConcurrentRequests, IdempotencyLayer, MemoryStore, MissingKey, OrphanPolicy, Preset, Principal,
    Ttl,
};
use tower_idempotency_redis::{RedisOptions, RedisStore};

use crate::sql;

/// A server that shows every behaviour of tower-idempotency.
///
/// The preset determines every setting without an option here.
#[derive(Debug, Parser)]
#[command(version)]
pub(crate) struct Args {
    /// The address to listen on; port 0 selects a free port.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:3000")]
    pub(crate) listen: String,

    /// The store of leases and records: memory, redis://HOST:PORT/DB, redis+cluster://HOST:PORT,.., postgres://.., mysql://..,
    /// sqlite:PATH, rediss://HOST:PORT/DB (needs the feature tls) or dynamodb://TABLE?endpoint=URL (needs the feature dynamodb).
    #[arg(long, default_value = "memory")]
    store: String,

    /// The preset whose settings the other options change.
    #[arg(long, value_enum, default_value_t = PresetName::Recommended)]
    preset: PresetName,

    /// The retention of records, as in 24h.
    #[arg(long, value_name = "DURATION", value_parser = ttl)]
    retention: Option<Ttl>,

    /// The duration of a lease that is not renewed, as in 15s.
    #[arg(long, value_name = "DURATION", value_parser = ttl)]
    lease: Option<Ttl>,

    /// The policy for a key whose execution ended without an outcome.
    #[arg(long, value_enum)]
    orphans: Option<Orphans>,

    /// The response to a duplicate that arrives while the first request is executed.
    #[arg(long, value_enum)]
    in_flight: Option<Duplicates>,

    /// The longest wait of `--in-flight wait`.
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration)]
    #[arg(requires = "in_flight", default_value = "10s")]
    wait: Duration,

    /// Reject requests without a key.
    #[arg(long)]
    require_key: bool,

    /// The owner of a key, from a request header: authorization, or header:NAME.
    #[arg(long, value_parser = principal)]
    principal: Option<Principal>,

    /// The largest request body under a key.
    #[arg(long, value_name = "BYTES")]
    request_limit: Option<usize>,

    /// The largest response body that is recorded.
    #[arg(long, value_name = "BYTES")]
    response_limit: Option<usize>,

    /// Append a line `PID n METHOD PATH KEY` to this file for every execution.
    #[arg(long, value_name = "FILE")]
    pub(crate) effects: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum PresetName {
    Recommended,
    Ietf,
    Stripe,
    Idempo,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Orphans {
    Reexecute,
    Refuse,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Duplicates {
    Conflict,
    TooManyRequests,
    Wait,
}

impl Args {
    /// Returns the response to another request under a used key, for the printed lines.
    pub(crate) fn another_request(&self) -> &'static str {
        match self.preset {
            PresetName::Recommended | PresetName::Ietf => "422",
            PresetName::Stripe => "400",
            PresetName::Idempo => "201, because this preset treats it as a new request",
        }
    }

    /// Creates the layer on the selected store. The error is a sentence for the user.
    pub(crate) async fn layer(&self) -> Result<IdempotencyLayer, String> {
        let preset = match self.preset {
            PresetName::Recommended => Preset::Recommended,
            PresetName::Ietf => Preset::Ietf,
            PresetName::Stripe => Preset::Stripe,
            PresetName::Idempo => Preset::Idempo,
        };
        // Only the scheme of a store is shown, because the rest may contain a password.
        let layer = match self.store.split(':').next().unwrap_or_default() {
            "memory" => IdempotencyLayer::with_preset(MemoryStore::new(), preset),
            "redis" => IdempotencyLayer::with_preset(redis(&self.store).await?, preset),
            #[cfg(feature = "tls")]
            "rediss" => IdempotencyLayer::with_preset(redis(&self.store).await?, preset),
            #[cfg(not(feature = "tls"))]
            "rediss" => {
                return Err("TLS is not built into this playground: \
                     run it with cargo run -p playground --features tls"
                    .to_owned());
            }
            "redis+cluster" => {
                IdempotencyLayer::with_preset(redis_cluster(&self.store).await?, preset)
            }
            "postgres" | "postgresql" => {
                IdempotencyLayer::with_preset(sql::postgres(&self.store).await?, preset)
            }
            "mysql" | "mariadb" => {
                IdempotencyLayer::with_preset(sql::mysql(&self.store).await?, preset)
            }
            "sqlite" => IdempotencyLayer::with_preset(sql::sqlite(&self.store).await?, preset),
            #[cfg(feature = "dynamodb")]
            "dynamodb" => {
                let store = crate::dynamodb::store(&self.store).await?;
                IdempotencyLayer::with_preset(store, preset)
            }
            #[cfg(not(feature = "dynamodb"))]
            "dynamodb" => {
                return Err("the dynamodb store is not built into this playground: \
                     run it with cargo run -p playground --features dynamodb"
                    .to_owned());
            }
            scheme => {
                return Err(format!(
                    "expected a store of memory, redis, redis+cluster, postgres, mysql, sqlite or dynamodb, \
                     found {scheme}"
                ));
            }
        };
        Ok(self.apply_options(layer))
    }

    fn apply_options(&self, mut layer: IdempotencyLayer) -> IdempotencyLayer {
        if let Some(retention) = self.retention {
            layer = layer.with_retention(retention);
        }
        if let Some(lease) = self.lease {
            layer = layer.with_lease_ttl(lease);
        }
        if let Some(orphans) = self.orphans {
            layer = layer.with_orphan_policy(match orphans {
                Orphans::Reexecute => OrphanPolicy::TakeOver,
                Orphans::Refuse => OrphanPolicy::Refuse,
            });
        }
        if let Some(in_flight) = self.in_flight {
            layer = layer.with_concurrent_requests(match in_flight {
                Duplicates::Conflict => ConcurrentRequests::Conflict,
                Duplicates::TooManyRequests => ConcurrentRequests::TooManyRequests,
                Duplicates::Wait => ConcurrentRequests::Wait(self.wait),
            });
        }
        if self.require_key {
            layer = layer.with_missing_key(MissingKey::Reject);
        }
        if let Some(principal) = &self.principal {
            layer = layer.with_principal(principal.clone());
        }
        if let Some(bytes) = self.request_limit {
            layer = layer.with_request_limit(bytes);
        }
        if let Some(bytes) = self.response_limit {
            layer = layer.with_response_limit(bytes);
        }
        layer
    }
}

async fn redis(url: &str) -> Result<RedisStore, String> {
    RedisStore::connect(url).await.map_err(error_chain)
}

/// Connects to a cluster. The URL is `redis+cluster://HOST:PORT,HOST:PORT` and names some of the nodes.
async fn redis_cluster(url: &str) -> Result<RedisStore, String> {
    let nodes = url.trim_start_matches("redis+cluster://").split(',');
    let nodes = nodes.map(|node| format!("redis://{node}"));
    let store = RedisOptions::new().connect_cluster(nodes).await;
    store.map_err(error_chain)
}

/// Returns the messages of an error and its sources.
pub(crate) fn error_chain(error: impl Error) -> String {
    let mut chain = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let message = error.to_string();
        if !chain.contains(&message) {
            chain = format!("{chain}: {message}");
        }
        source = error.source();
    }
    chain
}

fn ttl(text: &str) -> Result<Ttl, String> {
    let duration = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    Ttl::try_from(duration).map_err(|error| error.to_string())
}

fn principal(text: &str) -> Result<Principal, String> {
    if text == "authorization" {
        return Ok(Principal::authorization());
    }
    text.strip_prefix("header:")
        .and_then(|name| name.parse::<HeaderName>().ok())
        .map(Principal::header)
        .ok_or_else(|| "expected authorization, or header: and the name of a header".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn refusal(store: &str) -> String {
        let args = Args::parse_from(["playground", "--store", store]);
        args.layer().await.expect_err("no such store")
    }

    #[cfg(feature = "tls")]
    #[tokio::test]
    async fn unreachable_tls_server_error_hides_password() {
        let refusal = refusal("rediss://:hush@127.0.0.1:1/0").await;
        assert!(refusal.starts_with("cannot reach the server"), "{refusal}");
        assert!(!refusal.contains("hush"), "{refusal}");
    }

    /// No server listens, so the error of each name has to come from its store.
    #[tokio::test]
    async fn databases_have_two_names() {
        for (store, subject) in [
            (
                "postgresql://app:hush@127.0.0.1:1/app",
                "the postgres store",
            ),
            ("mariadb://app:hush@127.0.0.1:1/app", "the mysql store"),
        ] {
            let refusal = refusal(store).await;
            let expected = format!("cannot use {subject}: ");
            assert!(refusal.starts_with(&expected), "{refusal}");
            assert!(!refusal.contains("hush"), "{refusal}");
        }
    }

    #[tokio::test]
    async fn unknown_store_error_lists_stores() {
        let refusal = refusal("mongodb://localhost").await;
        assert!(refusal.starts_with("expected a store of memory, redis,"));
        assert!(refusal.ends_with("found mongodb"));
    }

    #[tokio::test]
    async fn unreachable_server_error_hides_password() {
        for store in [
            "redis://:hush@127.0.0.1:1/0",
            "redis+cluster://:hush@127.0.0.1:1",
        ] {
            let refusal = refusal(store).await;
            assert!(refusal.starts_with("cannot reach the server"), "{refusal}");
            assert!(!refusal.contains("hush"), "{refusal}");
        }
    }

    #[tokio::test]
    async fn unusable_database_error_hides_password() {
        for store in [
            "postgres://app:hush@127.0.0.1:1/app",
            "postgres://app:hush@:hush",
            "mysql://app:hush@127.0.0.1:1/app",
            "mysql://app:hush@:hush",
            "sqlite:/no/such/directory/hush",
            "sqlite:",
        ] {
            let refusal = refusal(store).await;
            let scheme = store.split(':').next().unwrap();
            assert!(refusal.contains(scheme), "{refusal}");
            assert!(!refusal.contains("hush"), "{refusal}");
        }
    }

    #[test]
    fn flags_reject_malformed_values() {
        for flag in [
            ["--retention", "0s"],
            ["--retention", "a day"],
            ["--lease", "15"],
            ["--wait", "soon"],
            ["--principal", "cookie:session"],
            ["--principal", "header:"],
            ["--in-flight", "queue"],
            ["--orphans", "keep"],
            ["--preset", "none"],
            ["--request-limit", "-1"],
        ] {
            let parsed = Args::try_parse_from(["playground", flag[0], flag[1]]);
            assert!(parsed.is_err(), "{flag:?}");
        }
    }
}
