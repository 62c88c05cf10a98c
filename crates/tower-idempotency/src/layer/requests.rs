//! Setters about requests: coverage, key, fingerprint and principal.

use std::{ops::RangeInclusive, sync::Arc};

use http::{HeaderName, Method, request};

use crate::{
    digest::Secret,
    error::ConfigError,
    layer::IdempotencyLayer,
    request::fingerprint::FingerprintBy,
    request::key::{IDEMPOTENCY_KEY, KeyScope, KeySyntax},
    request::principal::Principal,
    request::rules::{KeyFrom, KeyReuse, MissingKey},
};

/// Requests that the layer covers.
impl IdempotencyLayer {
    /// Sets the methods that the layer covers. Default: all but the safe ones, which are GET, HEAD, OPTIONS, TRACE, QUERY,
    /// PROPFIND, REPORT and SEARCH.
    ///
    /// HEAD always passes through. CONNECT, gRPC and upgrades to another protocol pass through only if keys are optional:
    /// with [`MissingKey::PassThrough`] and a key from a header. A gRPC request is HTTP/2 or HTTP/3 with the media type
    /// `application/grpc` or `application/grpc+..`, but not `+json`. An upgrade is HTTP/1.1 with `Connection: upgrade`.
    ///
    /// If keys are required, put gRPC services and tunnels on routes without the layer, or exclude them with
    /// [`with_skip`](Self::with_skip). The layer reads a request body to its end, which such a stream does not have.
    ///
    /// The layer counts requests with a key that pass through in `idempotency_passed_through_total`.
    ///
    /// If a method is missing, requests with it execute on every retry. An empty list disables all protection.
    pub fn with_methods(self, methods: impl IntoIterator<Item = Method>) -> Self {
        let methods: Vec<_> = methods.into_iter().collect();
        self.with_methods_where(move |method| methods.contains(method))
    }

    /// Sets the predicate that returns `true` for the methods that the layer covers. Default: see
    /// [`with_methods`](Self::with_methods).
    ///
    /// If it returns `false` for an unsafe method, requests with that method execute on every retry.
    pub fn with_methods_where(
        self,
        is_covered: impl Fn(&Method) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.set(|config| config.request.methods = Arc::new(is_covered))
    }

    /// Sets the gRPC methods whose unary calls are protected. Default: none, so that gRPC calls pass through.
    ///
    /// A request is a gRPC call if its media type begins with `application/grpc`. A request to the path of a protected
    /// method with another HTTP method than POST is one too. Other requests keep the rules for HTTP, so one layer may serve
    /// both. Calls of other gRPC methods pass through, with or without a key.
    ///
    /// Without this setting, gRPC calls pass through only if keys are optional. If keys are required, the rules for HTTP
    /// apply, which ignore the code of gRPC.
    ///
    /// A call of a protected method differs from an HTTP request:
    ///
    /// - Its request must be one complete message. If it has a key, a second message is rejected with `INVALID_ARGUMENT`.
    /// - The code in the trailers decides if the response is recorded: see
    ///   [`GrpcMethods::with_recorded_codes`](crate::GrpcMethods::with_recorded_codes). A response that is not one of gRPC
    ///   is recorded by its status. A response with several messages reaches the client, and is
    ///   [unrecordable](Self::with_unrecordable).
    /// - Errors of the layer are those of [`grpc_response`](crate::grpc_response), whatever
    ///   [`with_error_response`](Self::with_error_response) is.
    /// - A replay has every `grpc-*` header and trailer, whatever [`with_replayed_headers`](Self::with_replayed_headers) is.
    /// - [`FingerprintBy::head_only`](crate::FingerprintBy::head_only) still buffers the message.
    /// - grpc-web is covered inside the layer that translates it, such as that of `tonic-web`. Outside, a call with a key is
    ///   rejected.
    ///
    /// If a method with effects is not protected, each retry of it executes again. If a stream is protected, its calls with
    /// a key fail. `docs/guide/grpc.md` explains the placement, deadlines and clients.
    #[cfg(feature = "grpc")]
    pub fn with_grpc(self, methods: crate::GrpcMethods) -> Self {
        self.set(|config| config.grpc = Some(methods))
    }

    /// Sets a predicate that returns `true` for requests that pass through, with or without a key. Default: none.
    ///
    /// Use it to disable the layer at run time, or for routes that need no protection. Below `Router::nest`, use the path
    /// from [`original_path_and_query`](crate::original_path_and_query).
    ///
    /// If the predicate returns `true` for too many requests, their retries execute again, without any warning.
    pub fn with_skip(self, skip: impl Fn(&request::Parts) -> bool + Send + Sync + 'static) -> Self {
        self.set(|config| config.request.skip = Some(Arc::new(skip)))
    }
}

/// Key: its source, its form, and requests without one.
impl IdempotencyLayer {
    /// Sets the header that carries the key. Default: [`IDEMPOTENCY_KEY`].
    ///
    /// A request with several lines of this header gets 400. Replaces a source that
    /// [`with_key_from`](Self::with_key_from) has set.
    ///
    /// Requests without this header count as requests without a key. If clients already send another header, set that one
    /// as the [alias](Self::with_header_alias).
    pub fn with_header(self, name: HeaderName) -> Self {
        self.set(|config| {
            let alias = match &config.request.key_from {
                KeyFrom::Header { alias, .. } => alias.clone(),
                KeyFrom::Service { .. } => None,
            };
            config.request.key_from = KeyFrom::Header { name, alias };
        })
    }

    /// Sets a second header, which is read if the first one is absent. Default: none.
    ///
    /// The same value in either header is the same key. Replaces a source that [`with_key_from`](Self::with_key_from) has
    /// set; the first header is then [`IDEMPOTENCY_KEY`].
    ///
    /// Do not use a header that a proxy generates for each attempt, such as a request ID. Every retry would have a new key
    /// and execute again.
    pub fn with_header_alias(self, alias: HeaderName) -> Self {
        self.set(|config| {
            let name = match &config.request.key_from {
                KeyFrom::Header { name, .. } => name.clone(),
                KeyFrom::Service { .. } => IDEMPOTENCY_KEY,
            };
            config.request.key_from = KeyFrom::Header {
                name,
                alias: Some(alias),
            };
        })
    }

    /// Sets a function that returns the key of a request, instead of the header and its alias. Default: none.
    ///
    /// Examples are the key of an entity, such as `payment-1234-refund`, or the event ID of a webhook. `scope` states if a
    /// key names one operation for all callers, as in these examples, or one operation for each caller. `None` counts as a
    /// missing key. The length limits apply to the key, the key syntax does not. Below `Router::nest`, use the path from
    /// [`original_path_and_query`](crate::original_path_and_query).
    ///
    /// The client spells the path, and routers decode escapes. A key from raw text is another key for each spelling: with
    /// the raw path as the key, `/payments/7/refund`, `/payments/%37/refund` and `/payments/07/refund` all execute. Parse
    /// the entity to a canonical form, return `None` for the rest, and set [`MissingKey::Reject`].
    ///
    /// The layer never records a 4xx response under such a key, regardless of the
    /// [recorded statuses](Self::with_recorded_statuses). The client cannot choose another key for its corrected request.
    /// Respond with [`NeedsAttention`](crate::NeedsAttention) if such a request must not be repeated.
    ///
    /// If two operations get the same key, the second one gets the replay of the first one, or 422. A key of the service
    /// never equals a key that a client sent.
    ///
    /// If you change the function or the scope, requests that get another key no longer find their records and execute
    /// again.
    ///
    /// ```
    /// use axum::{Router, body::Body, extract::Path, http::Request, routing::post};
    /// use tower::ServiceExt;
    /// use tower_idempotency::{IdempotencyLayer, KeyScope, MemoryStore, MissingKey, original_path_and_query};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let layer = IdempotencyLayer::new(MemoryStore::new())
    ///     .with_missing_key(MissingKey::Reject)
    ///     .with_key_from(KeyScope::AllCallers, |head| {
    ///         let path = original_path_and_query(head).split('?').next()?;
    ///         let id = path.strip_prefix("/payments/")?.strip_suffix("/refund")?;
    ///         id.parse::<u64>().ok().map(|id| format!("refund {id}"))
    ///     });
    /// let refund = async |Path(id): Path<u64>| format!("refunded {id}");
    /// let app: Router = Router::new().route("/payments/{id}/refund", post(refund)).route_layer(layer);
    ///
    /// let to = |path: &str| Request::post(path).body(Body::empty());
    /// assert_eq!(app.clone().oneshot(to("/payments/7/refund")?).await?.status(), 200);
    /// // Another spelling has the same key, and gets 422. An ID with escapes has no key, and gets 400.
    /// assert_eq!(app.clone().oneshot(to("/payments/07/refund")?).await?.status(), 422);
    /// assert_eq!(app.oneshot(to("/payments/%37/refund")?).await?.status(), 400);
    /// # Ok(())
    /// # }
    /// ```
    pub fn with_key_from(
        self,
        scope: KeyScope,
        key: impl Fn(&request::Parts) -> Option<String> + Send + Sync + 'static,
    ) -> Self {
        let key = Arc::new(key);
        self.set(|config| config.request.key_from = KeyFrom::Service { scope, key })
    }

    /// Sets the syntax of the key header. Default: [`KeySyntax::Lenient`].
    ///
    /// If you change it, the values that clients send become other keys: their retries no longer find the records and
    /// execute again.
    pub fn with_key_syntax(self, syntax: KeySyntax) -> Self {
        self.set(|config| config.request.key_rules.syntax = syntax)
    }

    /// Sets the allowed length of the decoded key in bytes. Default: `1..=255`.
    ///
    /// An empty key gets 400, even if the range contains 0.
    ///
    /// If the range is too narrow, valid keys get 400. An empty range rejects all keys.
    pub fn with_key_length(self, length: RangeInclusive<usize>) -> Self {
        self.set(|config| {
            config.request.key_rules.min = *length.start();
            config.request.key_rules.max = *length.end();
        })
    }

    /// Sets a predicate that keys must satisfy in addition to the syntax, such as being a UUID. Default: none.
    ///
    /// Other keys get 400 `malformed-key`. If the predicate is too strict, valid keys get this error too.
    ///
    /// A UUID of version 7 begins with its time. So the predicate can reject a retry whose record may have expired. Without the
    /// predicate, that retry would execute again. The clock of the client counts. Choose a maximal age below the shortest
    /// retention of a record. A first attempt with an older key is rejected too.
    ///
    /// ```
    /// use std::time::{Duration, SystemTime, UNIX_EPOCH};
    /// # use axum::{Router, body::Body, http::Request, routing::post};
    /// # use tower::ServiceExt;
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore};
    ///
    /// fn is_recent(key: &str) -> bool {
    ///     let hex = key.replace('-', "");
    ///     let (Some(time), Some("7"), 32) = (hex.get(..12), hex.get(12..13), hex.len()) else { return false };
    ///     let Ok(time) = u64::from_str_radix(time, 16) else { return false };
    ///     match SystemTime::now().duration_since(UNIX_EPOCH + Duration::from_millis(time)) {
    ///         Ok(age) => age < Duration::from_secs(23 * 60 * 60), // the retention is 24 h
    ///         Err(ahead) => ahead.duration() < Duration::from_secs(5 * 60), // the clocks differ
    ///     }
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).with_key_check(is_recent);
    /// # let app: Router = Router::new().route("/pay", post(async || "paid")).route_layer(layer);
    /// # let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
    /// # let hour = Duration::from_secs(60 * 60);
    /// # for (time, status) in [(now, 200), (now - 22 * hour, 200), (now - 24 * hour, 400), (now + hour, 400)] {
    /// #     let key = format!("{:012x}7abc8123456789abcdef", time.as_millis());
    /// #     let pay = Request::post("/pay").header("idempotency-key", key).body(Body::empty())?;
    /// #     assert_eq!(app.clone().oneshot(pay).await?.status(), status);
    /// # }
    /// # let pay = Request::post("/pay").header("idempotency-key", "8e03978e-40d5-43e8-bc93-6894a57f9324");
    /// # assert_eq!(app.oneshot(pay.body(Body::empty())?).await?.status(), 400);
    /// # Ok(())
    /// # }
    /// ```
    pub fn with_key_check(self, check: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        self.set(|config| config.request.key_check = Some(Arc::new(check)))
    }

    /// Sets the treatment of requests without a key. Default: [`MissingKey::PassThrough`].
    ///
    /// With the default, requests of clients that send no key execute on every retry.
    ///
    /// The default also lets gRPC calls without `with_grpc`, upgrades and CONNECT pass if they have a key. Other values cover
    /// them. So after a change to the default, retries of such recorded requests execute again.
    pub fn with_missing_key(self, missing: MissingKey) -> Self {
        self.set(|config| config.request.missing_key = missing)
    }

    /// Sets whether responses repeat the header that carried the key, as the Agentic Commerce Protocol demands. Default:
    /// `false`.
    ///
    /// The line is repeated as the client sent it, in first responses, replays and errors of the layer, unless the key is
    /// malformed. It replaces a header of the same name that the handler has set.
    ///
    /// A key is a secret of its caller: with `true`, logs of response headers and caches between client and service see it
    /// too.
    pub fn with_key_echo(self, echo: bool) -> Self {
        self.set(|config| config.request.echo_key = echo)
    }
}

/// Fingerprint and principal: the identity of a request.
impl IdempotencyLayer {
    /// Sets the namespace of the keys, for services that share a store. Default: empty.
    ///
    /// If two services have the same namespace, a request to one of them may get a record of the other one. That requires
    /// the same principal and key.
    ///
    /// If you change it, no record is found any more: retries execute again.
    pub fn with_namespace(self, namespace: impl Into<Arc<str>>) -> Self {
        let namespace = namespace.into();
        self.set(|config| config.request.namespace = namespace)
    }

    /// Sets a secret that keys all digests in the store (HMAC-SHA-256). Default: none, which means plain SHA-256.
    ///
    /// Without the secret, a reader of the store can test guesses of keys, principals and bodies. The digest of a body contains
    /// neither the key nor the principal. So set a secret if bodies can be guessed, also with random keys. Examples are a card
    /// number, a password and an amount in a small body.
    ///
    /// If you change it, no record is found any more: retries execute again.
    ///
    /// # Errors
    ///
    /// Returns an error if the secret is shorter than 16 bytes.
    pub fn with_secret(self, secret: impl AsRef<[u8]>) -> Result<Self, ConfigError> {
        let secret = Secret::new(secret.as_ref())?;
        Ok(self.set(|config| config.request.secret = Some(secret)))
    }

    /// Sets the principal, which separates the keys of different callers. Default: [`Principal::credentials`].
    ///
    /// If several callers share a principal, they may get each other's responses. If the principal changes between retries,
    /// for example with a refreshed token, the retry executes again. The layer warns once about callers without
    /// credentials, and at most once a minute about a recent request under another principal.
    ///
    /// If you change it, no record is found any more: retries execute again.
    pub fn with_principal(self, principal: Principal) -> Self {
        self.set(|config| config.request.principal = principal)
    }

    /// Sets whether the host of the request is part of the scope of its key. Default: `false`.
    ///
    /// Set it if one process serves several hosts with separate data, such as one host for each tenant. The same key and
    /// request on two hosts are then two requests. Without this setting, a caller whose credentials are valid on both hosts
    /// may get the response of the wrong host. That happens if the fingerprints are equal. Anonymous callers of both hosts
    /// share their keys.
    ///
    /// The host is that of the request's URI, or else of the `Host` header, in lower case and without the port. If both name
    /// different hosts, the pair is a scope of its own, because the service may read either.
    ///
    /// A proxy must pass the host on: nginx sends its own name for the upstream unless it has `proxy_set_header Host $host`. The
    /// layer does not read `X-Forwarded-Host`, since clients can set it. If your proxy sets it, use [`Principal::header`] with
    /// it.
    ///
    /// Do not set it if clients retry through another host name of the same service: those retries execute again.
    ///
    /// If you change it, no record is found any more: retries execute again.
    ///
    /// ```
    /// use axum::{Router, body::Body, http::Request, routing::post};
    /// use tower::ServiceExt;
    /// use tower_idempotency::{IdempotencyLayer, MemoryStore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).with_host_in_scope(true);
    /// let app: Router = Router::new().route("/orders", post(async || "created")).route_layer(layer);
    ///
    /// let to = |host| Request::post("/orders").header("idempotency-key", "7").header("host", host).body(Body::empty());
    /// let is_replay = async |host| {
    ///     let res = app.clone().oneshot(to(host)?).await?;
    ///     Ok::<_, Box<dyn std::error::Error>>(res.headers().contains_key("idempotent-replayed"))
    /// };
    /// assert!(!is_replay("a.example").await?);
    /// assert!(is_replay("A.Example:443").await?);
    /// assert!(!is_replay("b.example").await?);
    /// # Ok(())
    /// # }
    /// ```
    pub fn with_host_in_scope(self, host_in_scope: bool) -> Self {
        self.set(|config| config.request.host_in_scope = host_in_scope)
    }

    /// Sets whether the endpoint of the request, its method and path, is part of the scope of its key. Default: `false`.
    ///
    /// The same key on two endpoints is then two operations, and both execute. Without it, the second one gets 422
    /// `key-reused`. The path is the one that the client sent, byte for byte and without the query. So `/pay` and `/pay/`
    /// are two endpoints, even if one handler serves both: a client that retries under the other path executes again.
    ///
    /// If you change it, no record is found any more: retries execute again.
    pub fn with_endpoint_in_scope(self, endpoint_in_scope: bool) -> Self {
        self.set(|config| config.request.endpoint_in_scope = endpoint_in_scope)
    }

    /// Sets the parts of a request that form its fingerprint. Default: [`FingerprintBy::raw_body`].
    ///
    /// If it covers too little, a client that reuses a key by mistake gets the wrong response. If it covers too much, a
    /// valid retry gets 422.
    ///
    /// After a change, retries of requests that were recorded, running or orphaned under the old fingerprint get 422 until
    /// those entries expire. A client that then switches to a new key executes the request twice.
    pub fn with_fingerprint(self, by: FingerprintBy) -> Self {
        self.set(|config| config.request.fingerprint = by)
    }

    /// Sets the treatment of a request that reuses the key of another request. Default: [`KeyReuse::Refuse`] with 422.
    ///
    /// With [`KeyReuse::Separate`], a retry that differs in one byte executes again.
    ///
    /// If you change from or to [`KeyReuse::Separate`], no record is found any more: retries execute again.
    ///
    /// # Errors
    ///
    /// Returns an error if the status of [`KeyReuse::Refuse`] is not a 4xx. A client would take another status for the
    /// response of the handler, or would retry.
    pub fn with_key_reuse(self, key_reuse: KeyReuse) -> Result<Self, ConfigError> {
        match key_reuse {
            KeyReuse::Refuse(status) if !status.is_client_error() => {
                Err(ConfigError::new("a status of 4xx", status.as_str().into()))
            }
            KeyReuse::Refuse(_) | KeyReuse::Separate => {
                Ok(self.set(|config| config.request.key_reuse = key_reuse))
            }
        }
    }
}
