//! The error of a call, and the classification of inner errors.

use std::{error::Error as StdError, fmt, io};

use crate::operation::{Operation, Outcome};

/// Error of any inner service.
pub(crate) type BoxError = Box<dyn StdError + Send + Sync>;

/// Error of a call without a response: the last attempt failed, or no attempt was allowed.
///
/// [`outcome`](Self::outcome) shows if the client may delete the key. Neither the error nor its text contains the key.
///
/// The error of the inner service, or of the outbox, is in the chain of [sources](StdError::source). Search the whole chain: a
/// private type with the same text may precede it.
#[derive(Debug)]
pub struct Error {
    reason: Reason,
    operation: Option<Operation>,
    outcome: Outcome,
    source: Option<LastError>,
}

/// Error of the last attempt of a call. It does not show the outcome of earlier attempts.
///
/// An error of another crate may wrap the [`Error`], and return the source of the [`Error`] as its own. Then
/// [`is_not_sent`] finds this type instead, and does not judge by the last attempt.
struct LastError(BoxError);

impl fmt::Debug for LastError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl fmt::Display for LastError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl StdError for LastError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        Some(&*self.0)
    }
}

/// Reason why a call has no response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    /// The last attempt failed.
    Failed,
    /// The attempt of an outer `RetryLayer` failed. The source decides if it was sent.
    Attempt,
    /// The key header and the operation of the request have different keys, or the header cannot be read. Nothing was sent.
    OtherKey,
    /// The inner service is not ready for the next attempt. Before the first one, the error has no operation.
    NotReady,
    /// The deadline of the call passed.
    Deadline,
    /// The server may have deleted the record of an earlier attempt.
    Expired,
    /// The time of the first attempt is in the future.
    WrongClock,
    /// The outbox did not store the request, and nothing was sent.
    NotStored,
}

impl Error {
    pub(crate) fn new(
        reason: Reason,
        operation: Option<Operation>,
        outcome: Outcome,
        source: Option<BoxError>,
    ) -> Self {
        let source = match source.map(|source| source.downcast::<Self>()) {
            // The error comes from an inner `RetryLayer`, which sent the request once for this one.
            Some(Ok(inner)) if inner.is_single_attempt() => inner.source,
            // The outcome of an inner series is that of all its attempts.
            Some(Ok(inner)) => Some(LastError(inner)),
            Some(Err(source)) => Some(LastError(source)),
            None => None,
        };
        Self {
            reason,
            operation,
            outcome,
            source,
        }
    }

    /// Returns `true` if the inner service was not ready before the first attempt.
    ///
    /// An error after the first attempt has no operation either if the request has no key. Such a request is sent again only if
    /// it was not sent before, or if its method is safe.
    fn is_unready(&self) -> bool {
        self.reason == Reason::NotReady && self.operation.is_none()
    }

    /// Returns `true` if the source shows the outcome: the error is that of one attempt, or no attempt was made.
    fn is_single_attempt(&self) -> bool {
        self.reason == Reason::Attempt || self.is_unready()
    }

    /// Returns the error with another outcome.
    pub(crate) fn with_outcome(self, outcome: Outcome) -> Self {
        Self { outcome, ..self }
    }

    /// Returns the outcome of the operation at the time of the error.
    ///
    /// The error of a service that is not ready before the first attempt belongs to no operation, and its outcome is
    /// [`Outcome::Unknown`]. [`Operation::outcome`] then returns that of the caller's operation.
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        self.outcome
    }

    /// Returns the operation. Returns `None` for a request without a key, and if the inner service was not ready before the
    /// first attempt.
    ///
    /// To send the request again under the same key, put a clone of it into the extensions.
    #[must_use]
    pub fn operation(&self) -> Option<&Operation> {
        self.operation.as_ref()
    }

    /// Returns `true` if the lifetime of the key ended before a response arrived.
    ///
    /// The server may have deleted its record, so no further attempt is safe. The client reports the operation to its
    /// operator. If the outcome is [`Outcome::NotExecuted`], the client can send the operation again: the outbox has removed the
    /// request, and no recovery had sent it.
    ///
    /// Returns `false` if nothing was sent because the time of the first attempt is more than a minute in the future. A clock is
    /// then wrong. After its correction, a recovery sends the request, and so does a call with the operation restored again.
    #[must_use]
    pub fn is_expired(&self) -> bool {
        self.reason == Reason::Expired
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.reason {
            Reason::OtherKey => {
                "request not sent, because its header and its operation have different keys, or the header cannot be read"
            }
            Reason::Failed | Reason::Attempt => "no response to the last attempt",
            Reason::NotReady => "no further request sent, because the inner service is not ready",
            Reason::Deadline => "deadline of the call passed without a response",
            Reason::Expired => "lifetime of the key ended without a response",
            Reason::WrongClock => {
                "no further request sent, because a clock is wrong: the first attempt is in the future"
            }
            Reason::NotStored => "request not sent, because the outbox did not store it",
        })?;
        f.write_str(match self.outcome {
            Outcome::NotExecuted => ", the operation was not executed",
            Outcome::Definite => ", the operation has a response",
            Outcome::ResponseLost => ", the operation has a response, which was lost",
            Outcome::Unknown => ", the operation may have been executed",
        })
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        let source = self.source.as_ref()?;
        let shows_outcome = self.outcome == Outcome::NotExecuted || self.is_single_attempt();
        Some(if shows_outcome { &*source.0 } else { source })
    }
}

/// Returns `true` if the error proves that no byte of the request was sent, or that no attempt of an inner series was
/// executed.
///
/// `ConnectionRefused` does not count inside the error of an open connection: a proxy or a tunnel may fail with it after the
/// request was sent. For an [`Error`], its outcome counts, because its source is the error of the last attempt only. If another
/// error hides the [`Error`], its source decides, unless that is a [`LastError`], which proves nothing.
pub(crate) fn is_not_sent(error: &(dyn StdError + 'static)) -> bool {
    let mut next = Some(error);
    let mut may_be_open_connection = false;
    while let Some(error) = next {
        // The source of this error is that of the error inside it.
        #[cfg(feature = "reqwest")]
        if let Some(error) = error.downcast_ref::<reqwest_middleware::Error>() {
            next = match error {
                reqwest_middleware::Error::Middleware(error) => error.chain().next(),
                reqwest_middleware::Error::Reqwest(error) => Some(error),
            };
            continue;
        }
        if error.is::<LastError>() {
            return false;
        }
        if let Some(error) = error.downcast_ref::<Error>() {
            if error.reason != Reason::Attempt {
                return error.outcome == Outcome::NotExecuted || error.is_unready();
            }
        } else if let Some(error) = error.downcast_ref::<io::Error>() {
            if error.kind() == io::ErrorKind::ConnectionRefused && !may_be_open_connection {
                return true;
            }
        } else if let Some(is_connect) = is_connect(error) {
            return is_connect;
        } else {
            // Without the feature, this may be the error of an open connection of hyper.
            may_be_open_connection = cfg!(not(feature = "hyper-util"));
        }
        // The source of an I/O error is that of the error inside it.
        let inner = error
            .downcast_ref::<io::Error>()
            .and_then(io::Error::get_ref);
        next = match inner {
            Some(inner) => Some(inner),
            None => error.source(),
        };
    }
    false
}

/// Returns `true` for an error of a client that could not connect, and `false` for any other error of a client. Returns
/// `None` for an error that wraps another one.
fn is_connect(error: &(dyn StdError + 'static)) -> Option<bool> {
    #[cfg(feature = "reqwest")]
    if let Some(error) = error.downcast_ref::<reqwest::Error>() {
        return Some(error.is_connect());
    }
    #[cfg(feature = "hyper-util")]
    {
        if let Some(error) = error.downcast_ref::<hyper_util::client::legacy::Error>() {
            return Some(error.is_connect());
        }
        if error.is::<hyper::Error>() {
            return Some(false);
        }
    }
    let _ = error;
    None
}

#[cfg(test)]
mod tests;
