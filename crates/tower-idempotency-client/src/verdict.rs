//! The decision about an attempt: done, retry or unknown.

use std::{error::Error as StdError, time::Duration};

use http::{HeaderMap, StatusCode};

use crate::{
    grpc::{GrpcStatus, is_grpc},
    problem::{Code, Form},
    protocol::Protocol,
    retry_after::retry_after,
};

/// Decision about an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verdict {
    /// The response is that of the operation. A retry would not change it.
    Definite,
    /// The same request may be sent again, under the same key.
    Retry {
        /// Shortest delay, which the server requests. `None` if it requests none.
        after: Option<Duration>,
        /// Cause, which decides on the length of the delay, on the cost of the retry, and on the outcome. With
        /// [`Cause::NotSent`], or with [`Cause::Throttled`] for a response, the attempt counts as not executed.
        cause: Cause,
    },
    /// The attempt may have been executed, and a retry would not show if it was.
    Unknown,
}

/// Cause of a retry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Cause {
    /// The client could not connect. No byte of the request was sent.
    ///
    /// A function that returns this cause for a request that was sent lets the caller delete the key too early. A request
    /// without a key may then be executed twice.
    NotSent,
    /// The request was sent, and failed or got no response.
    Transient,
    /// The server limits requests, and did not execute this one.
    ///
    /// Without a response, only the delay and the cost of the retry are those of this cause. An attempt that was sent may have
    /// been executed.
    Throttled,
    /// The server executes the first request with this key.
    InProgress,
}

impl Cause {
    /// Returns the name, which is a label of a metric.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::NotSent => "not_sent",
            Self::Transient => "transient",
            Self::Throttled => "throttled",
            Self::InProgress => "in_progress",
        }
    }
}

/// Result of an attempt, for a function of [`RetryLayer::with_verdict`](crate::RetryLayer::with_verdict).
#[derive(Clone, Copy, Debug)]
pub struct Attempt<'a> {
    pub(crate) result: Result<Head<'a>, &'a (dyn StdError + Send + Sync + 'static)>,
}

/// Head of a response, and the code of its body.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Head<'a> {
    pub(crate) status: StatusCode,
    pub(crate) headers: &'a HeaderMap,
    pub(crate) code: &'a Code,
}

impl<'a> Head<'a> {
    /// Returns the code in the body, if it was read.
    fn code_text(&self) -> Option<&'a str> {
        match self.code {
            Code::Read(problem) => problem.code.as_deref(),
            Code::Missing | Code::Unreadable => None,
        }
    }
}

impl<'a> Attempt<'a> {
    /// Returns status and headers of the response, or `None` if there is none.
    #[must_use]
    pub fn response(&self) -> Option<(StatusCode, &'a HeaderMap)> {
        let head = self.result.as_ref().ok()?;
        Some((head.status, head.headers))
    }

    /// Returns the code in the body of an error response. It is the member `code` of problem details (RFC 9457), or
    /// `error.code` of other JSON. A `code` of other JSON counts if it begins with `idempotency_`, or if the type of the body
    /// is one of `tower-idempotency`.
    #[must_use]
    pub fn code(&self) -> Option<&'a str> {
        self.result.as_ref().ok()?.code_text()
    }

    /// Returns the error of the inner service, or `None` if there is a response.
    #[must_use]
    pub fn error(&self) -> Option<&'a (dyn StdError + Send + Sync + 'static)> {
        self.result.err()
    }
}

/// Verdict on an attempt, and the state of the attempt after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Judgement {
    pub(crate) verdict: Verdict,
    pub(crate) fate: Fate,
}

/// State of one attempt, independent of earlier attempts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// The server executed the request, or replayed its response.
    Definite,
    /// The server rejected the request before it executed it. An earlier attempt may have been executed.
    Rejected,
    /// The request may have been executed.
    Open,
    /// Like [`Open`](Self::Open), until the trailers of the response show the status of the call.
    Awaited,
}

impl Judgement {
    pub(crate) const DEFINITE: Self = Self {
        verdict: Verdict::Definite,
        fate: Fate::Definite,
    };
    const REJECTED: Self = Self {
        verdict: Verdict::Definite,
        fate: Fate::Rejected,
    };
    /// The server may have recorded the response, or a layer in front of it rejected the request. A retry would not change it.
    const AMBIGUOUS: Self = Self {
        verdict: Verdict::Definite,
        fate: Fate::Open,
    };
    const UNKNOWN: Self = Self {
        verdict: Verdict::Unknown,
        fate: Fate::Open,
    };
    const AWAITED: Self = Self {
        verdict: Verdict::Unknown,
        fate: Fate::Awaited,
    };

    /// Returns the judgement of a verdict that a function of the caller has made.
    pub(crate) const fn of(verdict: Verdict) -> Self {
        match verdict {
            Verdict::Definite => Self::DEFINITE,
            Verdict::Retry { after, cause } => Self::retry(after, cause),
            Verdict::Unknown => Self::UNKNOWN,
        }
    }

    /// Returns the judgement of a verdict that a function of the caller has made on an error. The request may have been sent.
    ///
    /// Without a response, no server has reported that it limits requests.
    pub(crate) const fn of_error_by_caller(verdict: Verdict) -> Self {
        let judgement = Self::of(verdict);
        match verdict {
            Verdict::Retry {
                cause: Cause::Throttled,
                ..
            } => Self {
                fate: Fate::Open,
                ..judgement
            },
            Verdict::Definite | Verdict::Retry { .. } | Verdict::Unknown => judgement,
        }
    }

    /// Returns the judgement of an attempt without a response.
    pub(crate) const fn of_error(is_sent: bool) -> Self {
        Self::retry(
            None,
            if is_sent {
                Cause::Transient
            } else {
                Cause::NotSent
            },
        )
    }

    /// Returns the judgement of a response: by its code, else by the protocol, else by its status.
    ///
    /// If its code cannot be read, the response may be one of a server that executes the first request.
    ///
    /// A header in which the server requests or rejects a retry overrides the other rules.
    pub(crate) fn of_response(head: Head<'_>, protocol: Protocol) -> Self {
        let after = retry_after(head.headers);
        let judged = by_replay_marker(head)
            .or_else(|| by_grpc_status(head))
            .or_else(|| by_code(head, after))
            .or_else(|| by_protocol(head, protocol, after))
            .or_else(|| by_unreadable_code(head, after))
            .unwrap_or_else(|| by_status(head.status, after));
        let is_retry = matches!(judged.verdict, Verdict::Retry { .. });
        match should_retry(head) {
            Some(false) if is_retry => Self {
                verdict: Verdict::Unknown,
                ..judged
            },
            Some(true) if !is_retry => Self::retry(after, Cause::Transient),
            Some(_) | None => judged,
        }
    }

    /// Returns the judgement of a gRPC call by its status.
    ///
    /// A code shows less than a status of HTTP: a server also reports a message that is too large as `RESOURCE_EXHAUSTED`.
    pub(crate) fn of_grpc(status: &GrpcStatus) -> Self {
        let after = status.delay;
        let by_reason = status.reason.as_deref();
        let by_reason = by_reason.and_then(|reason| by_known_code(reason, after));
        let judged = by_reason.unwrap_or_else(|| match status.code {
            // Servers record PERMISSION_DENIED. An authentication in front of the server may send it too.
            7 => Self::AMBIGUOUS,
            // UNAUTHENTICATED, like 401.
            16 => Self::REJECTED,
            8 => Self {
                fate: Fate::Open,
                ..Self::retry(after, Cause::Throttled)
            },
            _ if status.is_outcome() => Self::DEFINITE,
            _ => Self::retry(after, Cause::Transient),
        });
        match judged.verdict {
            Verdict::Retry { .. } if status.is_final => Self {
                verdict: Verdict::Unknown,
                ..judged
            },
            Verdict::Definite | Verdict::Retry { .. } | Verdict::Unknown => judged,
        }
    }

    const fn retry(after: Option<Duration>, cause: Cause) -> Self {
        Self {
            verdict: Verdict::Retry { after, cause },
            fate: match cause {
                Cause::NotSent | Cause::Throttled => Fate::Rejected,
                Cause::Transient | Cause::InProgress => Fate::Open,
            },
        }
    }
}

/// Returns `true` if a code in the body can change the judgement of a response.
///
/// Most responses with 404, 405 and 431 do not come from the proxy, and their codes do not count. The proxy sends its own as
/// problem details. The code of a replay counts only with 409, the status of `outcome-unknown`.
pub(crate) fn depends_on_code(status: StatusCode, headers: &HeaderMap) -> bool {
    (status.is_server_error()
        || matches!(status.as_u16(), 400 | 408 | 409 | 413 | 422 | 429)
        || has_only_codes_of_proxy(status) && Form::of(status, headers) == Some(Form::Problem))
        && (status == StatusCode::CONFLICT || !is_replay(headers))
}

/// Returns `true` for a status with which only the proxy sends a code. It has not sent such a request to the upstream.
fn has_only_codes_of_proxy(status: StatusCode) -> bool {
    matches!(status.as_u16(), 404 | 405 | 431)
}

/// Returns `true` if the response is marked as a replay.
fn is_replay(headers: &HeaderMap) -> bool {
    headers.get(REPLAYED).is_some_and(|marker| marker == "true")
}

/// Judges a replay. Only a recorded response is marked, so a retry would get the same one.
///
/// A recorded 5xx is the response of the key, but does not show if the operation was executed. The same is true of a recorded
/// failure of gRPC, and of an `outcome-unknown` that the server got from another one. A code that cannot be read may be that one.
fn by_replay_marker(head: Head<'_>) -> Option<Judgement> {
    let is_unknown = || {
        let status = GrpcStatus::of(head.headers).filter(|_| is_grpc(head.headers));
        let reason = status.as_ref().and_then(|status| status.reason.as_deref());
        head.status.is_server_error()
            || status.as_ref().is_some_and(|status| !status.is_outcome())
            || reason.or(head.code_text()) == Some("outcome-unknown")
            // The code of a replay is read only with 409.
            || matches!(head.code, Code::Unreadable)
    };
    is_replay(head.headers).then(|| match is_unknown() {
        true => Judgement::UNKNOWN,
        false => Judgement::DEFINITE,
    })
}

/// Judges a gRPC response. The status of a response with a message is in its trailers.
fn by_grpc_status(head: Head<'_>) -> Option<Judgement> {
    if !is_grpc(head.headers) {
        return None;
    }
    match GrpcStatus::of(head.headers) {
        Some(status) => Some(Judgement::of_grpc(&status)),
        // The server records it like `PERMISSION_DENIED`.
        None if head.status == StatusCode::FORBIDDEN => Some(Judgement::AMBIGUOUS),
        None => head.status.is_success().then_some(Judgement::AWAITED),
    }
}

fn by_code(head: Head<'_>, after: Option<Duration>) -> Option<Judgement> {
    let Code::Read(problem) = head.code else {
        return None;
    };
    // A handler may have sent the same code after its effect, or forwarded that of another service.
    if head.status.is_server_error() && !problem.has_type_of_layer {
        return None;
    }
    let code = problem.code.as_deref();
    let known = code.and_then(|code| by_known_code(code, after));
    known.or_else(
        || match (problem.error_type.as_deref(), problem.retryable) {
            // Another request has used the key.
            (Some("idempotency_error"), _) if head.status == StatusCode::BAD_REQUEST => {
                Some(Judgement::REJECTED)
            }
            // A later version of the layer may send other codes.
            (_, Some(true)) => Some(Judgement::retry(after, Cause::Transient)),
            (_, Some(false)) => Some(Judgement::UNKNOWN),
            _ => None,
        },
    )
}

fn by_known_code(code: &str, after: Option<Duration>) -> Option<Judgement> {
    Some(match code {
        "in-progress" | "idempotency_in_flight" | "idempotency_key_in_use" => {
            Judgement::retry(after, Cause::InProgress)
        }
        // Without a delay, the execution ended without an outcome, and an operator has to resolve it.
        "outcome-unknown" => match after {
            Some(_) => Judgement::retry(after, Cause::Transient),
            None => Judgement::UNKNOWN,
        },
        "response-not-retained" => Judgement::DEFINITE,
        // One transaction had no effect. An earlier phase, or a call to another service, may have had one.
        "unfinished-transaction" => Judgement::UNKNOWN,
        // Without a delay, the server cannot read the entry of the request or its record.
        "store-unavailable" => match after {
            Some(_) => Judgement::retry(after, Cause::Throttled),
            None => Judgement::UNKNOWN,
        },
        "overloaded" | "draining" | "caller-limit" => Judgement::retry(after, Cause::Throttled),
        // The proxy has not sent the request.
        "body-timeout" | "body-unreadable" | "upstream-unreachable" => Judgement {
            fate: Fate::Rejected,
            ..Judgement::retry(after, Cause::Transient)
        },
        // Another request has used the key. This one was not executed, but an earlier attempt may be that other request.
        "key-reused" | "idempotency_conflict" => Judgement::REJECTED,
        "missing-key"
        | "malformed-key"
        | "key-too-long"
        | "body-too-large"
        | "principal-ambiguous"
        | "principal-missing"
        | "not-unary"
        | "no-route"
        | "connect-not-supported"
        | "bad-host"
        | "bad-path"
        | "bad-method"
        | "bad-length"
        | "too-many-headers"
        | "idempotency_key_required" => Judgement::REJECTED,
        _ => return None,
    })
}

/// Judges a 409, the 422 of the draft, and rejections that servers of this protocol record.
///
/// By the 422, a server of the draft rejects a key that another request has used. Applications use 409 for conflicts that no
/// retry resolves. The errors of idempo have no code: its 409 may be an `outcome-unknown`, and its 429 an `in-progress`.
fn by_protocol(head: Head<'_>, protocol: Protocol, after: Option<Duration>) -> Option<Judgement> {
    match (protocol, head.status) {
        (Protocol::Ietf | Protocol::Stripe, StatusCode::CONFLICT) => {
            Some(Judgement::retry(after, Cause::InProgress))
        }
        (Protocol::Ietf, StatusCode::UNPROCESSABLE_ENTITY)
            if !matches!(head.code, Code::Unreadable) =>
        {
            Some(Judgement::REJECTED)
        }
        (Protocol::Idempo, StatusCode::CONFLICT) if !matches!(head.code, Code::Unreadable) => {
            Some(match after {
                Some(_) => Judgement::retry(after, Cause::Transient),
                None => Judgement::UNKNOWN,
            })
        }
        (Protocol::Idempo, StatusCode::TOO_MANY_REQUESTS) => Some(Judgement {
            fate: Fate::Open,
            ..Judgement::retry(after, Cause::Throttled)
        }),
        (Protocol::Ietf, StatusCode::FORBIDDEN | StatusCode::FAILED_DEPENDENCY)
        | (Protocol::Stripe, StatusCode::FAILED_DEPENDENCY) => Some(Judgement::AMBIGUOUS),
        (Protocol::Idempo, status)
            if status.is_client_error()
                && REJECTIONS.contains(&status.as_u16())
                && (has_only_codes_of_proxy(status) || !matches!(head.code, Code::Unreadable)) =>
        {
            Some(Judgement::AMBIGUOUS)
        }
        _ => None,
    }
}

/// Judges a response whose code cannot be read. The code may mean that the server executes the first request, unless only the
/// proxy sends codes with this status.
fn by_unreadable_code(head: Head<'_>, after: Option<Duration>) -> Option<Judgement> {
    let may_be_of_server = !has_only_codes_of_proxy(head.status);
    (matches!(head.code, Code::Unreadable) && may_be_of_server).then(|| Judgement {
        fate: Fate::Open,
        ..match head.status {
            StatusCode::TOO_MANY_REQUESTS => Judgement::retry(after, Cause::Throttled),
            _ => Judgement::retry(after, Cause::Transient),
        }
    })
}

fn by_status(status: StatusCode, after: Option<Duration>) -> Judgement {
    match status.as_u16() {
        429 => Judgement::retry(after, Cause::Throttled),
        // The server waits for the end of the TLS handshake (RFC 8470) before it executes anything.
        425 => Judgement {
            fate: Fate::Rejected,
            ..Judgement::retry(after, Cause::Transient)
        },
        408 | 500.. => Judgement::retry(after, Cause::Transient),
        code if REJECTIONS.contains(&code) => Judgement::REJECTED,
        _ => Judgement::DEFINITE,
    }
}

/// Returns the server's request for or against a retry, if there is one.
fn should_retry(head: Head<'_>) -> Option<bool> {
    if !head.status.is_client_error() && !head.status.is_server_error() {
        return None;
    }
    let value = SHOULD_RETRY
        .into_iter()
        .find_map(|name| head.headers.get(name))?;
    match value.as_bytes() {
        b"true" => Some(true),
        b"false" => Some(false),
        _ => None,
    }
}

/// Statuses of a layer or proxy in front of the idempotency layer, which does not record them with the preset `Recommended`.
///
/// The rules of the other protocols precede them.
///
/// The layer does not record 307 and 308 either: they require the same request at another URL. 419 (Laravel) and 440 (IIS)
/// reject an expired anti-forgery token or login.
const REJECTIONS: [u16; 20] = [
    307, 308, 401, 403, 406, 407, 411, 412, 413, 415, 416, 417, 419, 421, 423, 424, 426, 428, 431,
    440,
];

/// Header that marks a replay, in this project, in Stripe's API and in the Agentic Commerce Protocol.
const REPLAYED: &str = "idempotent-replayed";

/// Headers in which a server requests or rejects a retry.
const SHOULD_RETRY: [&str; 3] = ["stripe-should-retry", "x-should-retry", "should-retry"];
