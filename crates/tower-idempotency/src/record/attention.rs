//! Records of executions that need an operator.

use std::{borrow::Cow, fmt};

use super::{
    ATTENTION, ExecutionTrace, PREFIX, Record, RecordError, VERSION, error::Problem, payload,
};

/// Failure of an execution that only an operator can resolve. No retry may repeat the execution.
///
/// A handler attaches it to its response as an extension. Work of `run_once` returns it as
/// [`WorkError::NeedsAttention`](crate::run_once::WorkError::NeedsAttention). The caller gets the handler's response. The
/// layer records this failure instead of that response, with any status. Each retry gets 409 `outcome-unknown` with the
/// code, and nothing is executed until an operator resolves the failure. The record is stored for
/// [`Ttl::MAX`](crate::Ttl::MAX), regardless of the retention setting. In the repository,
/// `docs/operations/needs-attention.md` explains how to find and resolve such entries.
///
/// The *code* is for programs, and clients see it. It is a constant word that the service defines. The *reason* is for
/// operators, and appears only in the record.
///
/// The layer ignores the failure, with a warning, if the handler has already committed its response in a transaction,
/// because that response stays the outcome. The same holds if the layer executes without a lease during an outage. Without
/// a key the failure has no effect, because there are no retries to reject. If the store cannot store the reason, the layer
/// stores only the code.
///
/// The layer finds the failure by its type, so it ignores one of another version of this crate. If crates of a program depend on
/// several versions, `cargo tree -d` lists them.
///
/// ```
/// use axum::{Extension, Router, body::Body, http::{Request, StatusCode}, response::IntoResponse, routing::post};
/// use tower::ServiceExt;
/// use tower_idempotency::{IdempotencyLayer, MemoryStore, NeedsAttention};
///
/// const REFUND_FAILED: NeedsAttention = NeedsAttention::new("refund-failed");
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let cancel = async || {
///     // The seat is sold to another customer, and the provider refuses the refund.
///     let attention = REFUND_FAILED.with_reason("refund re_7: provider responded 500 five times");
///     (StatusCode::BAD_GATEWAY, Extension(attention), "we will be in touch").into_response()
/// };
/// let app: Router = Router::new()
///     .route("/cancel", post(cancel))
///     .route_layer(IdempotencyLayer::new(MemoryStore::new()));
///
/// let ask = || Request::post("/cancel").header("idempotency-key", "c-1").body(Body::empty());
/// let first = app.clone().oneshot(ask()?).await?;
/// assert_eq!(first.status(), StatusCode::BAD_GATEWAY);
/// let retry = app.oneshot(ask()?).await?;
/// assert_eq!(retry.status(), StatusCode::CONFLICT);
/// # let body = axum::body::to_bytes(retry.into_body(), 1024).await?;
/// # let body = String::from_utf8(body.to_vec())?;
/// assert!(body.contains(r#""reason":"refund-failed""#) && !body.contains("re_7"));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct NeedsAttention {
    code: Cow<'static, str>,
    reason: Cow<'static, str>,
    /// Trace of the execution, if this failure was read from a record.
    trace: Option<ExecutionTrace>,
}

impl NeedsAttention {
    /// Creates a failure with this code and no reason.
    ///
    /// # Panics
    ///
    /// If the code is not 1 to 64 of `a` to `z`, `0` to `9` and `-`. Declare a constant, so that the panic occurs at
    /// compile time. A panic of a handler would release the key.
    #[must_use]
    pub const fn new(code: &'static str) -> Self {
        assert!(
            is_code(code.as_bytes()),
            "a code is 1 to 64 of a-z, 0-9 and -"
        );
        Self {
            code: Cow::Borrowed(code),
            reason: Cow::Borrowed(""),
            trace: None,
        }
    }

    /// Replaces the code. An operator's tool uses it to keep the reason and the trace of a record.
    ///
    /// # Panics
    ///
    /// Like [`new`](Self::new).
    #[must_use]
    pub fn with_code(self, code: &'static str) -> Self {
        Self {
            code: Self::new(code).code,
            ..self
        }
    }

    /// Sets the information for operators, cut at 1,024 bytes. Default: empty.
    ///
    /// The reason is stored in clear text with the records of other requests. Include no more client data than
    /// operators need.
    #[must_use]
    pub fn with_reason(self, reason: impl Into<String>) -> Self {
        let mut reason = reason.into();
        let mut end = MAX_REASON_BYTES.min(reason.len());
        while !reason.is_char_boundary(end) {
            end -= 1;
        }
        reason.truncate(end);
        Self {
            reason: Cow::Owned(reason),
            ..self
        }
    }

    /// Returns the code.
    #[must_use]
    pub fn code(&self) -> &str {
        &self.code
    }

    /// Returns the information for operators; empty by default.
    #[must_use]
    pub fn reason(&self) -> &str {
        &self.reason
    }

    /// Reads the code, the reason and the trace from a record of this kind. Intended for operators' tools and for stores
    /// that show their entries to operators. No decision about a request may depend on the result.
    ///
    /// A resolution that stores the result again keeps the trace.
    ///
    /// Returns `None` for any other record, after it has read two bytes. Does not detect damage, because the checksum
    /// covers the key ID.
    #[must_use]
    pub fn in_record(record: &[u8]) -> Option<Self> {
        let (&[version, flags, ..], rest) = record.split_first_chunk::<PREFIX>()?;
        if (version, flags) != (VERSION, ATTENTION) {
            return None;
        }
        let (code, rest) = split_code(rest).ok()?;
        let (_, reason) = payload::decode_attention(rest).unwrap_or_default();
        Some(Self {
            code: Cow::Owned(code.to_owned()),
            reason: Cow::Owned(reason.to_owned()),
            trace: payload::traceparent(rest),
        })
    }

    /// Returns the trace of the execution, if this failure was read from a record that has one.
    pub(crate) fn trace(&self) -> Option<&ExecutionTrace> {
        self.trace.as_ref()
    }

    /// Appends the code in its encoded form: its length in one byte, then the code.
    pub(super) fn write_code(&self, record: &mut Vec<u8>) {
        record.push(u8::try_from(self.code.len()).expect("a code has at most 64 bytes"));
        record.extend_from_slice(self.code.as_bytes());
    }
}

/// Shows no reason, because the reason must not appear in logs.
impl fmt::Debug for NeedsAttention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NeedsAttention")
            .field("code", &self.code)
            .finish_non_exhaustive()
    }
}

/// Decodes the bytes after the prefix of a record of this kind.
pub(super) fn decode(rest: &[u8]) -> Result<Record, RecordError> {
    let (code, payload) = split_code(rest)?;
    let (status, reason) = payload::decode_attention(payload)?;
    Ok(Record::Attention {
        status,
        attention: NeedsAttention {
            code: Cow::Owned(code.to_owned()),
            reason: Cow::Owned(reason.to_owned()),
            trace: None,
        },
    })
}

/// Returns the trace in the bytes after the prefix of a record of this kind.
pub(super) fn traceparent(rest: &[u8]) -> Option<ExecutionTrace> {
    let (_, payload) = split_code(rest).ok()?;
    payload::traceparent(payload)
}

/// Splits the bytes into the code and the payload.
fn split_code(rest: &[u8]) -> Result<(&str, &[u8]), RecordError> {
    let split = rest.split_first();
    let split = split.and_then(|(&length, rest)| rest.split_at_checked(usize::from(length)));
    match split {
        Some((code, rest)) if is_code(code) => match std::str::from_utf8(code) {
            Ok(code) => Ok((code, rest)),
            Err(_) => Err(Problem::Code.into()),
        },
        Some(_) | None => Err(Problem::Code.into()),
    }
}

const fn is_code(code: &[u8]) -> bool {
    let mut at = 0;
    while at < code.len() {
        if !matches!(code[at], b'a'..=b'z' | b'0'..=b'9' | b'-') {
            return false;
        }
        at += 1;
    }
    !code.is_empty() && code.len() <= 64
}

/// The maximum size of a reason in bytes. The record is then smaller than any store's limit.
const MAX_REASON_BYTES: usize = 1024;
