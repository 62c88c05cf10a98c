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
/// What is not given is as the preset says.
#[derive(Debug, Parser)]
#[command(version)]
pub(crate) struct Args {
    /// Where to listen; port 0 picks a free port.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:3000")]
    pub(crate) listen: String,

    /// Where leases and records live: memory, redis://HOST:PORT/DB, redis+cluster://HOST:PORT,.., postgres://.., mysql://.., sqlite:PATH,
    /// rediss://HOST:PORT/DB (with the feature tls) or dynamodb://TABLE?endpoint=URL (with the feature dynamodb).
    #[arg(long, default_value = "memory")]
    store: String,

    /// The set of decisions to start from.
    #[arg(long, value_enum, default_value_t = PresetName::Recommended)]
    preset: PresetName,

    /// How long a record lives, as in 24h.
    #[arg(long, value_name = "DURATION", value_parser = ttl)]
    retention: Option<Ttl>,

    /// How long a lease lasts unless it is renewed, as in 15s.
    #[arg(long, value_name = "DURATION", value_parser = ttl)]
    lease: Option<Ttl>,

    /// What becomes of a key whose execution ended without an outcome.
    #[arg(long, value_enum)]
    orphans: Option<Orphans>,

    /// What a duplicate is answered while the first request is being executed.
    #[arg(long, value_enum)]
    in_flight: Option<Duplicates>,

    /// How long `--in-flight wait` waits.
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration)]
    #[arg(requires = "in_flight", default_value = "10s")]
    wait: Duration,

    /// Refuse requests without a key.
    #[arg(long)]
    require_key: bool,

    /// Whose key it is: authorization, or header:NAME.
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
    /// What becomes of another request under a key that was used.
    pub(crate) fn another_request(&self) -> &'static str {
        match self.preset {
            PresetName::Recommended | PresetName::Ietf => "422",
            PresetName::Stripe => "400",
            PresetName::Idempo => "201, as with this preset it is a request of its own",
        }
    }

    /// The layer on the chosen store, or a sentence that says why there is none.
    pub(crate) async fn layer(&self) -> Result<IdempotencyLayer, String> {
        let preset = match self.preset {
            PresetName::Recommended => Preset::Recommended,
            PresetName::Ietf => Preset::Ietf,
            PresetName::Stripe => Preset::Stripe,
            PresetName::Idempo => Preset::Idempo,
        };
        // Of a store only the scheme is shown: the rest may hold a password.
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
        Ok(self.decide(layer))
    }

    fn decide(&self, mut layer: IdempotencyLayer) -> IdempotencyLayer {
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
    RedisStore::connect(url).await.map_err(whole_story)
}

/// `redis+cluster://HOST:PORT,HOST:PORT`: some of the nodes.
async fn redis_cluster(url: &str) -> Result<RedisStore, String> {
    let nodes = url.trim_start_matches("redis+cluster://").split(',');
    let nodes = nodes.map(|node| format!("redis://{node}"));
    let store = RedisOptions::new().connect_cluster(nodes).await;
    store.map_err(whole_story)
}

/// What an error says, and what its sources say.
pub(crate) fn whole_story(error: impl Error) -> String {
    let mut story = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let chapter = error.to_string();
        if !story.contains(&chapter) {
            story = format!("{story}: {chapter}");
        }
        source = error.source();
    }
    story
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
    async fn a_server_with_tls_that_cannot_be_reached_is_told_without_its_password() {
        let refusal = refusal("rediss://:hush@127.0.0.1:1/0").await;
        assert!(refusal.starts_with("cannot reach the server"), "{refusal}");
        assert!(!refusal.contains("hush"), "{refusal}");
    }

    /// By whatever name it goes: the store is what refuses, for nobody is there.
    #[tokio::test]
    async fn databases_have_two_names() {
        for (store, said) in [
            (
                "postgresql://app:hush@127.0.0.1:1/app",
                "the postgres store",
            ),
            ("mariadb://app:hush@127.0.0.1:1/app", "the mysql store"),
        ] {
            let refusal = refusal(store).await;
            let expected = format!("cannot use {said}: ");
            assert!(refusal.starts_with(&expected), "{refusal}");
            assert!(!refusal.contains("hush"), "{refusal}");
        }
    }

    #[tokio::test]
    async fn an_unknown_store_is_told_what_was_expected() {
        let refusal = refusal("mongodb://localhost").await;
        assert!(refusal.starts_with("expected a store of memory, redis,"));
        assert!(refusal.ends_with("found mongodb"));
    }

    #[tokio::test]
    async fn a_server_that_cannot_be_reached_is_told_without_its_password() {
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
    async fn a_database_that_cannot_be_used_is_told_without_its_password() {
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
    fn nonsense_is_refused_by_every_flag_that_has_a_form() {
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
