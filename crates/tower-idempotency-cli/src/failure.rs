//! Failures of a command, and exit codes.

use std::{error::Error, fmt, io};

use tower_idempotency::{
    inspect::{InspectError, InspectErrorKind},
    store::StoreError,
};
use tower_idempotency_console::{audit::changes_nothing, describe::printable};

/// The result of a command, which determines the exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    Done,
    Failed,
    Usage,
    NotFound,
    /// The entry has changed since it was seen.
    Changed,
    /// `list --fail-if-any` found entries.
    NotEmpty,
    /// The store does not list the state, or does not need the command.
    Unsupported,
    /// A signal ended a change: SIGHUP.
    HungUp,
    /// A signal ended a change or `watch`: SIGINT.
    Interrupted,
    /// A signal ended a change: SIGTERM.
    Terminated,
    BrokenPipe,
}

impl Exit {
    /// Returns this result, or the failure of its output. If the reader of the output has ended, that is no failure.
    pub(crate) fn after(self, printed: Result<(), Failure>) -> Result<Self, Failure> {
        match printed {
            Err(failure) if !failure.is_broken_pipe() => Err(failure),
            Ok(()) | Err(_) => Ok(self),
        }
    }

    /// Returns the exit code, as `--help` documents it.
    pub(crate) const fn code(self) -> u8 {
        match self {
            Self::Done | Self::BrokenPipe => 0,
            Self::Failed => 1,
            Self::Usage => 2,
            Self::NotFound => 3,
            Self::Changed => 4,
            Self::NotEmpty => 5,
            Self::Unsupported => 6,
            Self::HungUp => 129,
            Self::Interrupted => 130,
            Self::Terminated => 143,
        }
    }
}

/// A sentence for the operator. Contains no password.
#[derive(Debug)]
pub(crate) struct Failure {
    exit: Exit,
    message: String,
    /// `true` if it is certain that the store has changed nothing.
    is_unchanged: bool,
}

impl Failure {
    pub(crate) fn new(exit: Exit, message: impl Into<String>) -> Self {
        let message = message.into();
        // A driver may report several lines. A sentence has one.
        let words: Vec<_> = message.split_whitespace().collect();
        Self {
            exit,
            message: printable(&words.join(" ")),
            is_unchanged: false,
        }
    }

    pub(crate) fn failed(message: impl Into<String>) -> Self {
        Self::new(Exit::Failed, message)
    }

    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::new(Exit::Usage, message)
    }

    /// Returns the outcome of a change that ended with this failure, for the audit log.
    pub(crate) fn outcome(&self) -> String {
        let outcome = if self.is_unchanged {
            "failed"
        } else {
            "unknown"
        };
        format!("{outcome}: {self}")
    }

    /// Adds that the decision may have been applied, or that nothing was changed.
    pub(crate) fn of_decision(self) -> Self {
        let end = if self.is_unchanged {
            "nothing was changed"
        } else {
            "the decision may have been applied: see the entry"
        };
        self.with_end(end)
    }

    /// Marks the failure as one that certainly changed nothing in the store.
    pub(crate) fn unchanged(self) -> Self {
        Self {
            is_unchanged: true,
            ..self
        }
    }

    /// Adds a clause to the message.
    pub(crate) fn with_end(self, end: &str) -> Self {
        Self {
            message: format!("{}; {end}", self.message),
            ..self
        }
    }

    pub(crate) fn exit(&self) -> Exit {
        self.exit
    }

    pub(crate) fn is_broken_pipe(&self) -> bool {
        self.exit == Exit::BrokenPipe
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// Output that cannot be written.
impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        let exit = match error.kind() {
            io::ErrorKind::BrokenPipe => Exit::BrokenPipe,
            _ => Exit::Failed,
        };
        Self::new(exit, format!("cannot write the output: {error}"))
    }
}

impl From<InspectError> for Failure {
    fn from(error: InspectError) -> Self {
        let exit = match error.kind() {
            InspectErrorKind::Unsupported => Exit::Unsupported,
            InspectErrorKind::WrongState | InspectErrorKind::InvalidPage => Exit::Usage,
            _ => Exit::Failed,
        };
        Self {
            is_unchanged: changes_nothing(&error),
            ..Self::new(exit, with_causes(&error))
        }
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        Self::failed(with_causes(&error))
    }
}

/// Returns the messages of an error and its sources, each once.
fn with_causes(error: &dyn Error) -> String {
    let mut message = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let cause = error.to_string();
        if !message.contains(&cause) {
            message = format!("{message}: {cause}");
        }
        source = error.source();
    }
    message
}
