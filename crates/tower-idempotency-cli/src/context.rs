//! The store and the settings of a call.

use std::{future::Future, time::Duration};

use tokio::time::timeout;
use tower_idempotency::{
    Store as _,
    inspect::{InspectError, Inspector},
};
use tower_idempotency_any::{AnyStore, OpenErrorKind, OpenOptions};

use crate::{
    cli::Global,
    failure::{Exit, Failure},
    output::Output,
};

pub(crate) struct Context {
    pub(crate) store: Inspector,
    /// The same store, for what [`Inspector`] cannot do.
    pub(crate) any: AnyStore,
    /// The name of the store, such as `postgres`.
    pub(crate) name: &'static str,
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
        // The store reports its timeout first: it knows the reason.
        let options = OpenOptions::new().with_timeout(global.timeout * 9 / 10);
        // A typing error in the URL must not create a table.
        let mut options = options.with_creation(false);
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
            store: Inspector::new(store.clone()),
            any: store,
            output: Output::new(global),
            timeout: global.timeout,
        })
    }

    /// Checks the store, within the timeout.
    pub(crate) async fn check(&self) -> Result<(), Failure> {
        match timeout(self.timeout, Box::pin(self.any.check())).await {
            Ok(checked) => checked.map_err(|error| Failure::failed(error.to_string())),
            Err(_) => Err(no_reply(self.timeout)),
        }
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

fn no_reply(timeout: Duration) -> Failure {
    let timeout = humantime::format_duration(timeout);
    Failure::failed(format!("the store did not reply within {timeout}"))
}
