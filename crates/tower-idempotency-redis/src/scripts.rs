//! The Lua scripts, one per store method. Each runs atomically on the server and uses the server's clock.

use redis::{Cmd, ToRedisArgs};

use crate::connection::Delivery;

/// The scripts, with the hashes under which the server caches them.
pub(crate) struct Scripts {
    pub(crate) acquire: Script,
    pub(crate) renew: Script,
    pub(crate) complete: Script,
    pub(crate) release: Script,
    pub(crate) is_in_progress: Script,
    /// Tries commands whose failure neither an acquire nor a release of a new key reports. Only the check runs it.
    pub(crate) rights: Script,
    pub(crate) operators: OperatorScripts,
}

/// The scripts for operators. A store that is not inspected never loads them.
pub(crate) struct OperatorScripts {
    pub(crate) page: Script,
    pub(crate) present: Script,
    pub(crate) read: Script,
    pub(crate) resolve: Script,
    pub(crate) reindex: Script,
}

/// A script that accesses an entry and its indexes.
pub(crate) struct Script {
    code: &'static str,
    sha: String,
    pub(crate) delivery: Delivery,
}

/// The form in which a command names its script.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ScriptForm {
    /// By hash (`EVALSHA`): the server has to have the script in its cache.
    Hash,
    /// By source code (`EVAL`): the server caches the script.
    Code,
}

/// Includes a script that uses the functions of `index.lua`.
macro_rules! with_index {
    ($path:literal) => {
        concat!(include_str!("scripts/index.lua"), include_str!($path))
    };
}

/// Includes a script that uses the functions of `completed.lua`.
macro_rules! with_completed {
    ($path:literal) => {
        concat!(include_str!("scripts/completed.lua"), include_str!($path))
    };
}

/// Includes a script that uses the functions of `index.lua` and `completed.lua`.
macro_rules! with_all_indexes {
    ($path:literal) => {
        concat!(
            include_str!("scripts/index.lua"),
            include_str!("scripts/completed.lua"),
            include_str!($path)
        )
    };
}

/// Includes a script that uses the functions of `index.lua` and `ranges.lua`.
macro_rules! with_ranges {
    ($path:literal) => {
        concat!(
            include_str!("scripts/index.lua"),
            include_str!("scripts/ranges.lua"),
            include_str!($path)
        )
    };
}

impl Scripts {
    pub(crate) fn new() -> Self {
        Self {
            // The node may execute an attempt without a reply after the entry was released. If the store sent the script again
            // by itself, the layer would not release the entry again.
            acquire: Script::new(with_index!("scripts/acquire.lua"))
                .with_delivery(Delivery::AtMostOnce),
            renew: Script::new(with_index!("scripts/renew.lua")),
            complete: Script::new(with_completed!("scripts/complete.lua")),
            release: Script::new(with_index!("scripts/release.lua")),
            is_in_progress: Script::new(include_str!("scripts/is_in_progress.lua")),
            rights: Script::new(include_str!("scripts/rights.lua")),
            operators: OperatorScripts {
                page: Script::new(with_ranges!("scripts/page.lua")),
                present: Script::new(with_ranges!("scripts/present.lua")),
                read: Script::new(include_str!("scripts/read.lua")),
                // A script that has deleted an entry finds none when it runs again. It would report that it changed nothing.
                resolve: Script::new(with_all_indexes!("scripts/resolve.lua"))
                    .with_delivery(Delivery::AtMostOnce),
                reindex: Script::new(with_all_indexes!("scripts/reindex.lua")),
            },
        }
    }

    /// Returns the scripts that the layer needs, which are loaded when the store connects.
    pub(crate) fn layer_scripts(&self) -> [&Script; 5] {
        [
            &self.acquire,
            &self.renew,
            &self.complete,
            &self.release,
            &self.is_in_progress,
        ]
    }
}

impl Script {
    fn new(code: &'static str) -> Self {
        Self {
            code,
            sha: redis::Script::new(code).get_hash().to_owned(),
            delivery: Delivery::AtLeastOnce,
        }
    }

    fn with_delivery(mut self, delivery: Delivery) -> Self {
        self.delivery = delivery;
        self
    }

    /// Returns the command that runs the script.
    pub(crate) fn run_command(
        &self,
        form: ScriptForm,
        keys: &[&str],
        arguments: impl ToRedisArgs,
    ) -> Cmd {
        let mut command = match form {
            ScriptForm::Hash => {
                let mut command = redis::cmd("EVALSHA");
                command.arg(&self.sha);
                command
            }
            ScriptForm::Code => {
                let mut command = redis::cmd("EVAL");
                command.arg(self.code);
                command
            }
        };
        command.arg(keys.len()).arg(keys).arg(arguments);
        command
    }

    /// Returns the command that loads the script into the server's cache.
    pub(crate) fn load_command(&self) -> Cmd {
        let mut command = redis::cmd("SCRIPT");
        command.arg("LOAD").arg(self.code);
        command
    }
}
