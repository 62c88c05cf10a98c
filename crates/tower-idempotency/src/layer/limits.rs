//! Setters of limits: bodies, requests in flight and buffered bytes.

use std::time::Duration;

#[cfg(feature = "rate")]
use std::{num::NonZeroU32, sync::Arc};

use crate::layer::IdempotencyLayer;
#[cfg(feature = "rate")]
use crate::rate::FreshKeyRate;

/// Limits: bodies, requests in flight and buffered bytes.
impl IdempotencyLayer {
    /// Sets the size in bytes of the largest request body. Default: 2 MiB, like axum.
    ///
    /// Applies to requests with a key. Larger bodies get 413. The layer does not read a body whose announced length exceeds
    /// the limit, and reads no other body beyond it. Does not apply with
    /// [`FingerprintBy::head_only`](crate::FingerprintBy::head_only).
    ///
    /// If you raise the limit, also raise axum's `DefaultBodyLimit`, which limits extractors independently. If the limit is
    /// too high, requests in flight use up memory: each may hold that many bytes.
    pub fn with_request_limit(self, bytes: usize) -> Self {
        self.set(|config| config.request.body_limit = bytes)
    }

    /// Sets how long the layer waits for the complete request body. Default: 30 s.
    ///
    /// After that, the request gets 408. Does not apply with [`FingerprintBy::head_only`](crate::FingerprintBy::head_only).
    ///
    /// If it is too short, clients with slow connections always get 408. If it is too long, they hold permits for
    /// [requests in flight](Self::with_max_in_flight).
    pub fn with_body_timeout(self, timeout: Duration) -> Self {
        self.set(|config| config.request.body_timeout = timeout)
    }

    /// Sets the size in bytes of the largest response body that is recorded. Default: 4 MiB.
    ///
    /// Larger responses are treated according to [`with_unrecordable`](Self::with_unrecordable).
    ///
    /// If the limit is too low, retries of completed requests get an error instead of the response. If it is too high,
    /// requests in flight use up memory: each may hold that many bytes.
    ///
    /// The limit also applies to compressed records. They may inflate to the limit + 1 MiB, or to 16 MiB if that is more.
    /// Retries of a larger record, stored under a higher limit, get 503 `store-unavailable` until it expires.
    pub fn with_response_limit(self, bytes: usize) -> Self {
        self.set(|config| config.response.body_limit = bytes)
    }

    /// Sets how long the layer buffers a response before it counts as streamed. Default: 10 s.
    ///
    /// The timeout limits the total time for a response of unknown length, and each stall of one of known length.
    ///
    /// The client receives nothing during this time. If it is too long, streams seem to hang. If it is too short, slow
    /// responses are not recorded.
    pub fn with_collect_timeout(self, timeout: Duration) -> Self {
        self.set(|config| config.response.collect_timeout = timeout)
    }

    /// Sets how many requests may be arriving, and how many may be executing, at the same time. Default: 10,000 each.
    ///
    /// A request counts as arriving in three states: the layer reads its body, acquires its lease, or waits for another
    /// request. Replays and rejected duplicates are never executing. An execution counts until it ends, even after its
    /// client has disconnected. If the disconnected clients of one caller use more than half of the limit of executions,
    /// that caller gets no new executions.
    ///
    /// The limits apply to this layer and all its clones, and every caller has a share in each limit:
    /// - A caller that holds at most an eighth can use all of it.
    /// - A caller that holds more leaves the last quarter to the others. It gets 429 `caller-limit`, also if the limit is
    ///   used up.
    /// - If the limit is used up, all other callers get 503 `overloaded`.
    ///
    /// The [principal](Self::with_principal) identifies a caller. All requests without a principal count as one caller, and
    /// so do all executions by [`run_once`](Self::run_once). Place the layer inside the
    /// authentication: a client that can choose its principal can take any number of shares.
    ///
    /// Releases of leases after a store failure count separately, up to the same number.
    ///
    /// If the limit is too low, the layer rejects requests that the service could serve; with 0, it rejects all. If it is
    /// too high, requests use up memory during a burst.
    pub fn with_max_in_flight(self, requests: usize) -> Self {
        self.set(|config| config.limits.max_in_flight = requests)
    }

    /// Sets how many fresh keys each caller may send per second, and how many in a burst. Default: no limit.
    ///
    /// A key is fresh if its request is executed and is no takeover. Replays and other duplicates are not limited, and
    /// neither are [`run_once`](Self::run_once) and [`take_over`](Self::take_over). A request beyond the rate gets 429
    /// `caller-limit` with `Retry-After`; nothing is executed or recorded. The rate applies to this process.
    ///
    /// If the rate is too low, honest callers get 429 during bursts.
    #[cfg(feature = "rate")]
    pub fn with_fresh_key_rate(self, per_second: NonZeroU32, burst: NonZeroU32) -> Self {
        let rate = Arc::new(FreshKeyRate::new(per_second, burst));
        self.set(|config| config.limits.fresh_keys = Some(rate))
    }

    /// Sets how many bytes of request bodies and of response bodies the layer may hold. Default: 128 MiB each.
    ///
    /// - A request body counts until the handler has dropped it. A request that exceeds the limit gets 503 `overloaded`.
    /// - A response body counts until the client has read it, also if it is a replay. A first response that exceeds the
    ///   limit counts as too large ([`with_unrecordable`](Self::with_unrecordable)). While the limit is used up, a replay is not
    ///   sent, and the client gets 503 `overloaded`. Replays of one record share their bytes.
    ///
    /// Bodies of at most 8 KiB do not count. If the limit is below 8 MiB, the bound is 1/1024 of it. The limits apply to
    /// this layer and all its clones. Callers have shares in them like in [`with_max_in_flight`](Self::with_max_in_flight),
    /// so that slow clients of one caller affect no other caller.
    ///
    /// If a limit is too low, the layer rejects requests or does not record responses, although memory is free. A
    /// body above 3/4 of the limit never fits. If the limits exceed the available memory, the system may kill the
    /// process.
    ///
    /// If you lower a limit, it applies to retries of earlier requests too. A recorded response above 3/4 of it is not replayed:
    /// its retries get 503 `store-unavailable` without `Retry-After` until the record expires. Retries with a larger request
    /// body are rejected with 429 `caller-limit` or 503 `overloaded`.
    pub fn with_max_buffered(self, request_bytes: usize, response_bytes: usize) -> Self {
        self.set(|config| {
            config.limits.max_request_bytes = request_bytes;
            config.limits.max_response_bytes = response_bytes;
        })
    }
}
