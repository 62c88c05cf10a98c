//! Setters about responses: recording, replays, traces, and the errors of the layer itself.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Response, StatusCode};

use crate::{
    error::{ConfigError, Error},
    layer::IdempotencyLayer,
    response::problem,
    response::rules::{ErrorResponse, Unrecordable},
    store::Ttl,
};

/// Recording: which responses are recorded, and for how long.
impl IdempotencyLayer {
    /// Sets the predicate that returns `true` for the statuses that the layer records. Default: 2xx, 3xx and 4xx, except the
    /// statuses below.
    ///
    /// | status | reason why it is not recorded by default |
    /// |---|---|
    /// | 401, 407 | corrected by `Authorization`, `Proxy-Authorization` or another credential |
    /// | 403 | corrected by another permission of the caller |
    /// | 406 | corrected by `Accept` and the other headers of content negotiation |
    /// | 408, 425, 429 | temporary: the request can succeed later without a change |
    /// | 411, 413, 431 | corrected by `Content-Length`, smaller headers, or a higher limit of the service |
    /// | 412, 428 | corrected by `If-Match` or `If-Unmodified-Since` |
    /// | 415 | corrected by `Content-Encoding`, or by parameters of `Content-Type` |
    /// | 416, 417, 426 | corrected by `Range` or `Content-Range`, `Expect`, `Upgrade` |
    /// | 419, 440 | corrected by a new anti-forgery token (Laravel), or by a new login (IIS) |
    /// | 421 | corrected by a connection to another server |
    /// | 423, 424 | corrected by the header `If`, or by the end of another operation |
    /// | 5xx | the handler failed |
    ///
    /// The fingerprint covers none of these headers: the corrected request is the same request, under the same key. It must
    /// not get the old rejection.
    ///
    /// The layer never records 1xx, 307 and 308, regardless of the predicate. With 307 and 308 the client repeats the
    /// request at another URL, under the same key. The statuses 301 and 302 are recorded, because they are common responses
    /// to a form. If a client follows such a redirect with the same method (PUT, PATCH or DELETE), it gets 422 `key-reused`.
    ///
    /// After a status that is not recorded, the layer releases the key and a retry executes again. If you record the status
    /// of a temporary failure, retries get that failure for the complete retention.
    ///
    /// The presets record 402, the usual response to a declined card. If the service asks for a payment in a header, as in x402,
    /// exclude 402. Otherwise the request with the payment gets the recorded 402.
    pub fn with_recorded_statuses(
        self,
        is_recorded: impl Fn(StatusCode) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.set(|config| config.response.recorded_statuses = Arc::new(is_recorded))
    }

    /// Sets the treatment of responses that are too large or streamed. Default: [`Unrecordable::Tombstone`].
    ///
    /// A response also counts as too large if it exceeds the rest of the [byte limit](Self::with_max_buffered). This
    /// happens while clients of the same caller do not read earlier responses.
    ///
    /// With [`Unrecordable::Release`], every retry repeats the effects of such a request.
    pub fn with_unrecordable(self, unrecordable: Unrecordable) -> Self {
        self.set(|config| config.response.unrecordable = unrecordable)
    }

    /// Sets how long records are stored unless the handler specifies it. Default: 24 h.
    ///
    /// If it is shorter than the time in which clients retry, late retries execute again.
    pub fn with_retention(self, retention: Ttl) -> Self {
        self.set(|config| config.response.retention = retention)
    }

    /// Sets the longest retention that a handler can specify. Default: 365 days.
    ///
    /// This does not limit the [default retention](Self::with_retention). If it is too long, one faulty handler can fill the
    /// store.
    pub fn with_max_retention(self, retention: Ttl) -> Self {
        self.set(|config| config.response.max_retention = retention)
    }

    /// Sets the size in bytes above which records are compressed. Default:
    /// [`Store::compress_above`](crate::Store::compress_above) of the store.
    ///
    /// | store | bytes | reason |
    /// |---|---|---|
    /// | memory, SQLite | 8 KiB | compressing 1 KiB of JSON takes ten times as long as storing it |
    /// | Redis, PostgreSQL, MySQL | 1 KiB | saves about two thirds of most records |
    /// | DynamoDB | 512 | the service charges for bytes |
    ///
    /// `usize::MAX` disables compression. A store that charges for bytes then charges for all of them.
    pub fn with_compression_above(self, bytes: usize) -> Self {
        self.set(|config| config.response.compress_above = bytes)
    }
}

/// Replay: headers of replayed responses.
impl IdempotencyLayer {
    /// Sets the predicate that returns `true` for the response headers and trailers that are replayed. Default:
    /// [`replayed_by_default`](crate::replayed_by_default).
    ///
    /// Extend the default like this:
    ///
    /// ```
    /// use http::header::SET_COOKIE;
    /// use tower_idempotency::{IdempotencyLayer, MemoryStore, replayed_by_default};
    ///
    /// let layer = IdempotencyLayer::new(MemoryStore::new())
    ///     .with_replayed_headers(|name| name == SET_COOKIE || replayed_by_default(name));
    /// ```
    ///
    /// - Hop-by-hop fields, `Content-Length` and the control headers are never replayed.
    /// - A value that is marked as sensitive is marked in the replay too.
    /// - The extensions of a response are not replayed. That includes a custom reason phrase, which hyper stores there.
    ///
    /// If you replay a header that belongs to one response, such as a session cookie, every client that retries the request
    /// gets it.
    pub fn with_replayed_headers(
        self,
        is_replayed: impl Fn(&HeaderName) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.set(|config| config.response.replayed_headers = Arc::new(is_replayed))
    }

    /// Sets the header that marks replays, or `None`. Default: [`IDEMPOTENT_REPLAYED`](crate::IDEMPOTENT_REPLAYED) with the
    /// value `true`.
    ///
    /// The marker replaces a header of the same name in the recorded response. Without a marker, clients cannot recognize
    /// replays.
    pub fn with_replay_marker(self, marker: Option<(HeaderName, HeaderValue)>) -> Self {
        self.set(|config| config.response.replay_marker = marker)
    }
}

/// Traces: links from replays to executions.
impl IdempotencyLayer {
    /// Sets if a record stores the `traceparent` of its request (W3C Trace Context), and replays link to it. Default:
    /// `false`.
    ///
    /// A replay then has the trace of the execution as `execution_trace_id` in its event and in the span `idempotency`, and
    /// as the extension [`ExecutionTrace`](crate::ExecutionTrace). So has a rejection because of a tombstone or of
    /// [`NeedsAttention`](crate::NeedsAttention). No response header carries it.
    ///
    /// - A malformed value is not stored, and neither are several values. Each record with a trace is 69 bytes larger.
    /// - `run_once` has no request and stores no trace. An orphan has no record, and so no trace.
    /// - A client chooses its `traceparent`, so the links of its retries can lead to the trace of another request. If
    ///   untrusted clients reach the service, let a proxy replace the header.
    /// - A reader of the store or of the logs can see which trace an entry belongs to.
    ///
    /// Retries that reach a process without the setting have no link.
    pub fn with_trace_links(self, has_trace_links: bool) -> Self {
        self.set(|config| config.response.has_trace_links = has_trace_links)
    }
}

/// Errors: the form of the responses that the layer itself creates.
impl IdempotencyLayer {
    /// Sets the function that renders errors. Default: `application/problem+json` (RFC 9457).
    ///
    /// The layer sends the returned status and headers unchanged. If the status is a success, clients mistake a rejected
    /// request for a completed one.
    pub fn with_error_response(
        self,
        render: impl Fn(&Error) -> Response<Bytes> + Send + Sync + 'static,
    ) -> Self {
        self.set(|config| config.response.error_response = ErrorResponse::Custom(Arc::new(render)))
    }

    /// Sets the documentation that errors link to, as problem+json with `Link: <url>; rel="describedby"`. Default: the draft
    /// that defines the key header.
    ///
    /// Replaces [`with_error_response`](Self::with_error_response) and the error bodies of the preset. Clients of a preset
    /// that expect those bodies then cannot parse the errors.
    ///
    /// # Errors
    ///
    /// Returns an error if the URL contains an angle bracket, or a character other than visible ASCII.
    pub fn with_described_by(self, url: &str) -> Result<Self, ConfigError> {
        let described_by = problem::described_by(url).ok_or_else(|| {
            ConfigError::new(
                "a URL of visible ASCII without angle brackets",
                "another character".to_owned(),
            )
        })?;
        Ok(self.set(|config| {
            config.response.error_response = ErrorResponse::ProblemJson { described_by }
        }))
    }

    /// Sets the value of `Retry-After` in errors that are temporary, in whole seconds rounded up. Default: 1 s. Errors of gRPC
    /// calls have `grpc-retry-pushback-ms`, in whole milliseconds rounded up.
    ///
    /// Errors about a body that did not arrive (`body-timeout`, `body-unreadable`) and about an unreadable record have no
    /// `Retry-After`.
    ///
    /// If it is too short, the retries of clients overload a service that is already busy.
    pub fn with_retry_after(self, after: Duration) -> Self {
        self.set(|config| config.response.retry_after = after)
    }
}
