//! The Lua scripts, one per store method. Each runs atomically on the server and uses the server's clock.

use redis::{Cmd, ToRedisArgs};

/// The scripts, with the hashes under which the server caches them.
pub(crate) struct Scripts {
    pub(crate) acquire: Script,
    pub(crate) renew: Script,
    pub(crate) complete: Script,
    pub(crate) release: Script,
    pub(crate) is_in_progress: Script,
}

/// A script that accesses one key.
pub(crate) struct Script {
    code: &'static str,
    sha: String,
}

/// The form in which a command names its script.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ScriptForm {
    /// By hash (`EVALSHA`): the server has to have the script in its cache.
    Hash,
    /// By source code (`EVAL`): the server caches the script.
    Code,
}

impl Scripts {
    pub(crate) fn new() -> Self {
        Self {
            acquire: Script::new(include_str!("scripts/acquire.lua")),
            renew: Script::new(include_str!("scripts/renew.lua")),
            complete: Script::new(include_str!("scripts/complete.lua")),
            release: Script::new(include_str!("scripts/release.lua")),
            is_in_progress: Script::new(include_str!("scripts/look.lua")),
        }
    }

    pub(crate) fn all(&self) -> [&Script; 5] {
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
        }
    }

    /// Returns the command that runs the script.
    pub(crate) fn run_command(
        &self,
        form: ScriptForm,
        key: &str,
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
        command.arg(1).arg(key).arg(arguments);
        command
    }

    /// Returns the command that loads the script into the server's cache.
    pub(crate) fn load_command(&self) -> Cmd {
        let mut command = redis::cmd("SCRIPT");
        command.arg("LOAD").arg(self.code);
        command
    }
}
