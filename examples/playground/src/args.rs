//! The command line, and the layer it describes.

use std::{path::PathBuf, time::Duration};

use axum::http::HeaderName;
use clap::{Parser, ValueEnum};
use tower_idempotency::{
    ConcurrentRequests, ExecutionFailure, IdempotencyLayer, MemoryStore, MissingKey, OrphanPolicy,
    Preset, Principal, Ttl,
};
use tower_idempotency_any::AnyStore;

/// A server that shows every behaviour of tower-idempotency.
///
/// The preset determines every setting without an option here.
#[derive(Debug, Parser)]
#[command(version)]
pub(crate) struct Args {
    /// The address to listen on; port 0 selects a free port.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:3000")]
    pub(crate) listen: String,

    /// The store of leases and records: memory, redis://HOST:PORT/DB, redis+cluster://HOST:PORT,.., postgres://..,
    /// mysql://.., sqlite:PATH, rediss://HOST:PORT/DB (needs the feature tls) or dynamodb://TABLE?endpoint=URL (needs the
    /// feature dynamodb).
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

    /// The state in which a panic, an error or a broken body leaves the key.
    #[arg(long, value_enum)]
    failure: Option<Failure>,

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
    TakeOver,
    Refuse,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Failure {
    Release,
    Orphan,
    NeedsAttention,
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

    /// Opens the selected store, and creates the layer on it. The error is a sentence for the user.
    pub(crate) async fn open(&self) -> Result<(AnyStore, IdempotencyLayer), String> {
        let preset = match self.preset {
            PresetName::Recommended => Preset::Recommended,
            PresetName::Ietf => Preset::Ietf,
            PresetName::Stripe => Preset::Stripe,
            PresetName::Idempo => Preset::Idempo,
        };
        let store = match self.store.as_str() {
            // The page shows the operation of each key.
            "memory" => MemoryStore::new().with_details().into(),
            url => AnyStore::open(url)
                .await
                .map_err(|error| error.to_string())?,
        };
        let layer = self.apply_options(store.layer(preset));
        Ok((store, layer))
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
                Orphans::TakeOver => OrphanPolicy::TakeOver,
                Orphans::Refuse => OrphanPolicy::Refuse,
            });
        }
        if let Some(failure) = self.failure {
            layer = layer.with_failure(match failure {
                Failure::Release => ExecutionFailure::Release,
                Failure::Orphan => ExecutionFailure::Orphan,
                Failure::NeedsAttention => ExecutionFailure::NeedsAttention,
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

    #[tokio::test]
    async fn unusable_store_is_reported_in_one_sentence() {
        for (store, sentence) in [
            (
                "mongodb://:hush@localhost",
                "expected the URL of a store: memory, redis,",
            ),
            (
                "postgres://app:hush@127.0.0.1:1/app",
                "cannot use the postgres store: ",
            ),
        ] {
            let args = Args::parse_from(["playground", "--store", store]);
            let refusal = args.open().await.map(|_| ()).expect_err("no such store");
            assert!(refusal.starts_with(sentence), "{refusal}");
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
            ["--failure", "keep"],
            ["--preset", "none"],
            ["--request-limit", "-1"],
        ] {
            let parsed = Args::try_parse_from(["playground", flag[0], flag[1]]);
            assert!(parsed.is_err(), "{flag:?}");
        }
    }
}
