//! The store and the settings of a call.

use std::{future::Future, path::Path, time::Duration};

use tokio::time::timeout;
use tower_idempotency::{
    Store as _,
    inspect::{Inspect as _, InspectError, Inspector, State},
};
use tower_idempotency_any::{AnyStore, OpenErrorKind, OpenOptions};
use tower_idempotency_console::audit::AuditLog;

use crate::{
    cli::Global,
    failure::{Exit, Failure},
    output::{Output, printable},
};

pub(crate) struct Context {
    pub(crate) store: Inspector,
    /// The same store, for its check, its repair and its audit table, which [`Inspector`] lacks.
    pub(crate) any: AnyStore,
    /// The name of the store, such as `postgres`.
    pub(crate) name: &'static str,
    /// The name of the store in the audit log: its URL without credentials and settings, and its table or prefix.
    pub(crate) store_name: String,
    pub(crate) output: Output,
    timeout: Duration,
}

impl Context {
    /// Opens the store, which must exist.
    pub(crate) async fn open(global: &Global) -> Result<Self, Failure> {
        let Some(url) = &global.store else {
            return Err(Failure::usage(
                "expected a store: set --store or IDEMPOTENCY_STORE",
            ));
        };
        // The timeout of the store ends first, because its error contains the reason.
        let options = OpenOptions::new().with_timeout(global.timeout.saturating_mul(9) / 10);
        // A typing error in the URL must not create a table.
        let mut options = options.with_create_if_missing(false);
        if let Some(table) = &global.table {
            options = options.with_table(table.as_str());
        }
        if let Some(prefix) = &global.prefix {
            options = options.with_prefix(prefix.as_str());
        }
        let opened = timeout(global.timeout, Box::pin(options.open(url))).await;
        let opened = opened.map_err(|_| no_reply(global.timeout))?;
        let store = opened.map_err(|error| {
            let exit = match error.kind() {
                OpenErrorKind::Url | OpenErrorKind::NotBuilt => Exit::Usage,
                _ => Exit::Failed,
            };
            Failure::new(exit, error.to_string())
        })?;
        Ok(Self {
            name: store.name(),
            store_name: store_name(url, store.name(), global),
            store: Inspector::new(store.clone()),
            any: store,
            output: Output::new(global),
            timeout: global.timeout,
        })
    }

    /// Returns the audit log of `--audit` and `--audit-table`. Returns `None` if neither is set.
    pub(crate) fn audit_log(
        &self,
        file: Option<&Path>,
        has_table: bool,
    ) -> Result<Option<AuditLog>, Failure> {
        if !has_table {
            return Ok(file.map(AuditLog::new));
        }
        let log = AuditLog::in_table(self.any.clone())
            .map_err(|error| Failure::usage(format!("expected --audit FILE: {error}")))?;
        let log = log.with_timeout(self.timeout);
        Ok(Some(match file {
            Some(file) => log.with_file(file),
            None => log,
        }))
    }

    /// Checks the store, within the timeout.
    pub(crate) async fn check(&self) -> Result<(), Failure> {
        match timeout(self.timeout, Box::pin(self.any.check())).await {
            Ok(checked) => checked.map_err(|error| Failure::failed(error.to_string())),
            Err(_) => Err(no_reply(self.timeout)),
        }
    }

    /// Fails if the store does not list entries in this state.
    pub(crate) fn expect_listed(&self, state: State) -> Result<(), Failure> {
        if self.store.abilities().can_list(state) {
            return Ok(());
        }
        let mut message = format!("the {} store does not list {state} entries", self.name);
        let setting = self.store.abilities().setting_to_list(state);
        if setting.is_some_and(|it| it.contains("with_completed_index")) {
            message.push_str(": set completed-index=true in its URL, and in the service");
        }
        Err(Failure::new(Exit::Unsupported, message))
    }

    /// Makes a call, within the timeout.
    pub(crate) async fn call<T>(
        &self,
        call: impl Future<Output = Result<T, InspectError>>,
    ) -> Result<T, Failure> {
        match timeout(self.timeout, call).await {
            Ok(result) => Ok(result?),
            Err(_) => Err(no_reply(self.timeout)),
        }
    }
}

/// Returns the URL without credentials and settings, and the table or the prefix.
fn store_name(url: &str, name: &str, global: &Global) -> String {
    let without_settings = url.split(['?', '#']).next().unwrap_or_default();
    let credentials = without_settings.rsplit_once('@');
    // A path has no credentials.
    let credentials = credentials.filter(|_| url.contains("://"));
    let (before, location) = credentials.unwrap_or(("", without_settings));
    // An `@` in the rest may end a password that contains `?` or `#`.
    let is_plain = !url[without_settings.len()..].contains('@');
    let location = if is_plain { location } else { "" };
    let mut text = match (before.split_once(':'), location) {
        (_, "") => name.to_owned(),
        (Some((scheme, _)), location) => format!("{scheme}://{location}"),
        (None, location) => location.to_owned(),
    };
    for (kind, setting) in [("table", &global.table), ("prefix", &global.prefix)] {
        if let Some(setting) = setting {
            text = format!("{text} {kind} {setting}");
        }
    }
    printable(&text)
}

fn no_reply(timeout: Duration) -> Failure {
    let timeout = humantime::format_duration(timeout);
    Failure::failed(format!("the store did not reply within {timeout}"))
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::Cli;

    #[test]
    fn store_name_has_no_credentials() {
        let cli = Cli::parse_from(["idempotency", "stats", "--table", "keys"]);
        let name = |url| store_name(url, "postgres", &cli.global);
        for (url, expected) in [
            (
                "postgres://app:hush@db:5432/app?password=hush",
                "postgres://db:5432/app table keys",
            ),
            ("postgres://db/app", "postgres://db/app table keys"),
            (
                "postgres://app:hu@sh@db/app",
                "postgres://db/app table keys",
            ),
            ("postgres://app:hu?sh@db/app", "postgres table keys"),
            ("postgres://db/app?password=hu@sh", "postgres table keys"),
            ("redis://:hush@cache/0", "redis://cache/0 table keys"),
            (
                "sqlite:/var/a@b.db?mode=ro",
                "sqlite:/var/a@b.db table keys",
            ),
        ] {
            assert_eq!(name(url), expected);
        }
    }
}
