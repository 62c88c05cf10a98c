//! Protocols of servers.

/// Protocol that the server follows.
///
/// Decides on the form of the key header, and on the meaning of responses without a known code. The layer knows the codes
/// of all protocols, regardless of this setting. For requests in an outbox, see
/// [`with_protocol`](crate::IdempotencyKeyLayer::with_protocol).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Protocol {
    /// `tower-idempotency` with its preset `Recommended`: a plain key, and problem details (RFC 9457) with a code.
    #[default]
    TowerIdempotency,
    /// The draft draft-ietf-httpapi-idempotency-key-header-07: a quoted key (RFC 9651), and 409 while the first request is
    /// executed.
    ///
    /// The preset `Ietf` of `tower-idempotency` records 403 and 424. A gateway may send 403 too. So both leave the outcome
    /// [`Unknown`](crate::Outcome::Unknown). A 422 counts as the rejection of a key that another request has used.
    Ietf,
    /// Stripe's API: a plain key, `{"error":{..}}`, and 409 while the first request is executed.
    ///
    /// A 424 may be recorded, so it leaves the outcome [`Unknown`](crate::Outcome::Unknown).
    Stripe,
    /// The Agentic Commerce Protocol: a plain key, and codes that begin with `idempotency_`.
    Acp,
    /// The Ruby gem idempo, and `tower-idempotency` with its preset `Idempo`: a plain key, and errors without a code.
    ///
    /// Set [`with_lifetime`](crate::RetryLayer::with_lifetime) below 30 s, after which these servers delete a record. A 409 and
    /// a 429 may belong to an earlier attempt, so they leave the outcome [`Unknown`](crate::Outcome::Unknown). So do rejections
    /// such as 401, 403 and 413, because these servers record them.
    Idempo,
}
