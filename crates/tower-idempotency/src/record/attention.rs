//! The record of an execution that somebody has to look at.

use std::{borrow::Cow, fmt};

use bytes::Bytes;

use super::{ATTENTION, PREFIX, Record, RecordError, VERSION, error::Problem, payload};

/// An execution failed in a way that no retry may repeat and no program can put right: somebody has to look at it.
///
/// A handler attaches it to its response, as an extension; `run_once` takes it in
/// [`WorkError::NeedsAttention`](crate::run_once::WorkError::NeedsAttention). The caller gets what the handler answers. What is
/// kept, whatever the status, is not that answer but this: each retry is refused with 409 `outcome-unknown` and the code,
/// and nothing is executed, until an operator resolves it. It is kept for [`Ttl::MAX`](crate::Ttl::MAX), whatever
/// retention is set. The page of each store in the repository's `docs` says how such entries are found and resolved.
///
/// The *code* is for programs, and clients see it: a word of the service's own, fixed as it is written. The *reason* is for
/// operators, who find it in the record, and goes nowhere else.
///
/// It is ignored with a warning after the handler has committed its answer in a transaction, as that stays the outcome, and
/// where the layer executes without a lease in an outage; without a key, as there are no retries to refuse. Where a store
/// cannot keep as little as a reason, it keeps the code.
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
///     // The seat is given away, and the provider neither refunds nor says why.
///     let attention = REFUND_FAILED.with_reason("refund re_7: provider answered 500 five times");
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
}

impl NeedsAttention {
    /// With this code, and no reason.
    ///
    /// # Panics
    ///
    /// When the code is not 1 to 64 of `a` to `z`, `0` to `9` and `-`. At compile time in a constant, so make it one: a
    /// panic of a handler frees its key, at the worst moment.
    #[must_use]
    pub const fn new(code: &'static str) -> Self {
        assert!(
            is_code(code.as_bytes()),
            "a code is 1 to 64 of a-z, 0-9 and -"
        );
        Self {
            code: Cow::Borrowed(code),
            reason: Cow::Borrowed(""),
        }
    }

    /// What an operator should know, cut at 1,024 bytes. Default: nothing.
    ///
    /// It is kept in the clear, beside the answers of others: no more of a client in it than is needed to help.
    #[must_use]
    pub fn with_reason(self, reason: impl Into<String>) -> Self {
        let mut reason = reason.into();
        let mut end = REASON.min(reason.len());
        while !reason.is_char_boundary(end) {
            end -= 1;
        }
        reason.truncate(end);
        Self {
            reason: Cow::Owned(reason),
            ..self
        }
    }

    /// The code.
    #[must_use]
    pub fn code(&self) -> &str {
        &self.code
    }

    /// What an operator should know; empty if nothing was said.
    #[must_use]
    pub fn reason(&self) -> &str {
        &self.reason
    }

    /// What a record says that is one of this kind: for the tools of operators, and for stores that show operators what is
    /// in them. Nobody may decide by it what a request is answered.
    ///
    /// Of any other record it looks at two bytes. Whether a record is damaged cannot be told without its key's id, and is
    /// not: what it finds is for people.
    #[must_use]
    pub fn in_record(record: &[u8]) -> Option<Self> {
        let (&[version, flags, ..], rest) = record.split_first_chunk::<PREFIX>()?;
        if (version, flags) != (VERSION, ATTENTION) {
            return None;
        }
        let (code, rest) = split(rest).ok()?;
        let (_, reason) = payload::attention(rest).unwrap_or_default();
        Some(Self {
            code: Cow::Owned(code.to_owned()),
            reason: Cow::Owned(reason.to_owned()),
        })
    }

    /// Appends the code as a record has it: its length in one byte, and then the code.
    pub(super) fn write_code(&self, record: &mut Vec<u8>) {
        record.push(u8::try_from(self.code.len()).expect("a code has at most 64 bytes"));
        record.extend_from_slice(self.code.as_bytes());
    }
}

/// Shows no reason: it is not for logs.
impl fmt::Debug for NeedsAttention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NeedsAttention")
            .field("code", &self.code)
            .finish_non_exhaustive()
    }
}

/// Reads what follows the prefix of a record of this kind.
pub(super) fn decode(rest: &Bytes) -> Result<Record, RecordError> {
    let (code, payload) = split(rest)?;
    let (status, reason) = payload::attention(payload)?;
    Ok(Record::Attention {
        status,
        attention: NeedsAttention {
            code: Cow::Owned(code.to_owned()),
            reason: Cow::Owned(reason.to_owned()),
        },
    })
}

/// The code, and what follows it.
fn split(rest: &[u8]) -> Result<(&str, &[u8]), RecordError> {
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

/// The most bytes of a reason: a record of it is then smaller than any store's limit.
const REASON: usize = 1024;
