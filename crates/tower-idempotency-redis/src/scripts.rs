//! One script a method: each is one atomic step at the server, by the server's clock.

use redis::{Cmd, ToRedisArgs};

/// The scripts, and the hashes the server knows them by.
pub(crate) struct Scripts {
    pub(crate) acquire: Script,
    pub(crate) renew: Script,
    pub(crate) complete: Script,
    pub(crate) release: Script,
    pub(crate) look: Script,
}

/// One script over one key.
pub(crate) struct Script {
    code: &'static str,
    sha: String,
}

/// How the server is to find the script.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum By {
    /// It has it already.
    Sha,
    /// It comes along.
    Code,
}

impl Scripts {
    pub(crate) fn new() -> Self {
        Self {
            acquire: Script::new(include_str!("scripts/acquire.lua")),
            renew: Script::new(include_str!("scripts/renew.lua")),
            complete: Script::new(include_str!("scripts/complete.lua")),
            release: Script::new(include_str!("scripts/release.lua")),
            look: Script::new(include_str!("scripts/look.lua")),
        }
    }

    pub(crate) fn all(&self) -> [&Script; 5] {
        [
            &self.acquire,
            &self.renew,
            &self.complete,
            &self.release,
            &self.look,
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

    /// The command that runs it.
    pub(crate) fn call(&self, by: By, key: &str, arguments: impl ToRedisArgs) -> Cmd {
        let mut command = match by {
            By::Sha => {
                let mut command = redis::cmd("EVALSHA");
                command.arg(&self.sha);
                command
            }
            By::Code => {
                let mut command = redis::cmd("EVAL");
                command.arg(self.code);
                command
            }
        };
        command.arg(1).arg(key).arg(arguments);
        command
    }

    /// The command that teaches it to the server.
    pub(crate) fn load(&self) -> Cmd {
        let mut command = redis::cmd("SCRIPT");
        command.arg("LOAD").arg(self.code);
        command
    }
}
