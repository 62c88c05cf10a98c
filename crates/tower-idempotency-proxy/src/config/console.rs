//! The settings of the console on the admin port.

use std::path::{Path, PathBuf};

use toml::Spanned;

use super::{Admin, Config, ConfigError, ConsoleMode, Secret, check::Check};

/// The settings of the console on the admin port.
///
/// This crate serves no console itself. A program passes one to [`Proxy::with_console`](crate::Proxy::with_console).
#[derive(Clone, Debug)]
pub struct ConsoleConfig {
    can_resolve: bool,
    token: Option<Secret>,
    audit_file: Option<PathBuf>,
    has_audit_table: bool,
    title: String,
}

impl ConsoleConfig {
    /// Returns `true` if operators may resolve entries. A token and an audit log are then set.
    #[must_use]
    pub fn can_resolve(&self) -> bool {
        self.can_resolve
    }

    /// Returns the token of the operators. If there is no token, the configured address is a loopback address.
    #[must_use]
    pub fn token(&self) -> Option<&str> {
        self.token.as_ref().map(Secret::expose)
    }

    /// Returns the file of the audit log.
    #[must_use]
    pub fn audit_file(&self) -> Option<&Path> {
        self.audit_file.as_deref()
    }

    /// Returns `true` if the audit log is in a table of the SQL store, in addition to the file if there is one.
    #[must_use]
    pub fn has_audit_table(&self) -> bool {
        self.has_audit_table
    }

    /// Returns the heading of the pages: the namespace, or `Idempotency` if it is empty.
    #[must_use]
    pub fn title(&self) -> &str {
        &self.title
    }
}

impl Config {
    /// Returns the settings of the console on the admin port, or `None` if it is off.
    #[must_use]
    pub fn console(&self) -> Option<ConsoleConfig> {
        let Self(settings) = self;
        let admin = settings.admin.as_ref()?;
        let can_resolve = match admin.console.get_ref() {
            ConsoleMode::Off => return None,
            ConsoleMode::ReadOnly => false,
            ConsoleMode::Resolve => true,
        };
        let namespace = settings.identity.namespace.as_str();
        let title = if namespace.is_empty() {
            "Idempotency"
        } else {
            namespace
        };
        Some(ConsoleConfig {
            can_resolve,
            token: admin.token.clone(),
            audit_file: admin
                .audit_file
                .as_ref()
                .map(|file| PathBuf::from(file.get_ref())),
            has_audit_table: admin.has_audit_table(),
            title: title.to_owned(),
        })
    }
}

impl Admin {
    fn has_audit_table(&self) -> bool {
        let setting = self.audit_table.as_ref();
        setting.is_some_and(|setting| *setting.get_ref())
    }

    /// Checks the settings of the console, and reads its token.
    pub(super) fn check_console(&mut self, check: &Check<'_>) -> Result<(), ConfigError> {
        let mode = *self.console.get_ref();
        if mode == ConsoleMode::Off {
            // The other pages of the admin port need no token.
            for (name, span) in [
                ("token_file", self.token_file.as_ref().map(Spanned::span)),
                ("audit_file", self.audit_file.as_ref().map(Spanned::span)),
                ("audit_table", self.audit_table.as_ref().map(Spanned::span)),
            ] {
                if let Some(span) = span {
                    return check.fail(&span, format!("{name} has no effect without a console"));
                }
            }
            return Ok(());
        }
        let has_audit_log = self.audit_file.is_some() || self.has_audit_table();
        if mode == ConsoleMode::Resolve && !has_audit_log {
            let message = "console = \"resolve\" needs audit_file or audit_table, because each change needs an audit line";
            return check.fail(&self.console.span(), message);
        }
        match &self.token_file {
            Some(file) => {
                let token = check.read("token_file", file)?;
                let token = token.trim();
                if token.len() < MIN_TOKEN {
                    return check.fail(&file.span(), "the token is shorter than 16 bytes");
                }
                self.token = Some(Secret::from(token.to_owned()));
                Ok(())
            }
            None if mode == ConsoleMode::Resolve => {
                let message =
                    "console = \"resolve\" needs token_file: operators log in with their names";
                check.fail(&self.console.span(), message)
            }
            None if !self.address.ip().is_loopback() => {
                let message = format!(
                    "the console needs token_file, because {} is not loopback",
                    self.address
                );
                check.fail(&self.console.span(), message)
            }
            None => Ok(()),
        }
    }
}

/// Smallest length of a token, in bytes.
const MIN_TOKEN: usize = 16;
