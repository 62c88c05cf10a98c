//! Functions for operators: IDs of entries, and the records that resolve them.

use bytes::Bytes;
use http::{HeaderName, Response, request};
use serde::Serialize;

#[cfg(feature = "grpc")]
use crate::{
    config::is_replayed_in_grpc,
    grpc::{CallKind, is_grpc_response},
};
use crate::{
    digest::ScopedKey,
    error::Error,
    layer::IdempotencyLayer,
    request::{
        credentials::PrincipalError,
        find_key, fingerprint,
        key::{KeyScope, RequestKey},
        key_error, pass_reason,
        rules::{KeyFrom, KeyReuse},
        scope_key,
    },
    response::disposition,
    store::{Fingerprint, KeyId},
};
#[cfg(feature = "testing")]
use crate::{
    error::ErrorKind,
    request::{build_claim, operation},
    store::{Claim, Token},
};

/// Functions for operators, with the settings of the layer.
impl IdempotencyLayer {
    /// Returns the ID of the entry of a request, or `None` if the layer does not cover the request or needs no key for it.
    ///
    /// The request must identify its caller, by its credentials and by the extensions that the authentication sets. The
    /// body counts only with [`MissingKey::Derive`](crate::MissingKey::Derive) and
    /// [`KeyReuse::Separate`](crate::KeyReuse::Separate).
    ///
    /// ```
    /// use http::Request;
    /// use tower_idempotency::{IdempotencyLayer, MemoryStore, Principal};
    ///
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).with_namespace("payments");
    /// let (head, ()) = Request::post("/pay")
    ///     .header("idempotency-key", "8e03978e-40d5")
    ///     .header("authorization", "Bearer of-alice")
    ///     .body(())?
    ///     .into_parts();
    /// let id = layer.key_id(&head, b"")?.expect("the request has a key");
    ///
    /// let layer = layer.with_principal(Principal::authorization());
    /// assert_eq!(layer.key_ids("8e03978e-40d5", &[b"Bearer of-alice"])?, [id]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The error with which the layer rejects the request: its key is malformed or missing, or its principal is missing or
    /// ambiguous. Also [`PrincipalMissing`](crate::ErrorKind::PrincipalMissing) if the application's
    /// [`Principal::from_fn`](crate::Principal::from_fn) rejects the request, with the status of its response.
    pub fn key_id(&self, head: &request::Parts, body: &[u8]) -> Result<Option<KeyId>, Error> {
        let Some((key, scoped)) = self.scoped_key(head)? else {
            return Ok(None);
        };
        let rules = &self.config.request;
        let fingerprint = rules
            .fingerprint
            .fingerprint(rules.secret.as_ref(), &key, head, body);
        Ok(Some(scoped.id.of(&fingerprint)))
    }

    /// Returns the key of a request in its scope, or `None` if the layer does not cover the request.
    fn scoped_key(&self, head: &request::Parts) -> Result<Option<(RequestKey, ScopedKey)>, Error> {
        let rules = &self.config.request;
        if !self.covers(head) {
            return Ok(None);
        }
        let Some(key) = find_key(rules, head)? else {
            return Ok(None);
        };
        let (scoped, _) = scope_key(rules, head, &key).map_err(PrincipalError::into_error)?;
        Ok(Some((key, scoped)))
    }

    /// Returns `true` if the layer covers the request.
    pub(crate) fn covers(&self, head: &request::Parts) -> bool {
        #[cfg(feature = "grpc")]
        if let Some(methods) = &self.config.grpc {
            match methods.kind_of(&head.method, head.uri.path(), &head.headers) {
                CallKind::Protected => {
                    let skip = self.config.request.skip.as_ref();
                    return skip.is_none_or(|skip| !skip(head));
                }
                CallKind::Unprotected => return false,
                CallKind::Http => {}
            }
        }
        pass_reason(&self.config.request, head).is_none()
    }

    /// Returns the claim that another process would send for a request, or `None` if the layer does not cover the request.
    #[cfg(feature = "testing")]
    pub(crate) fn claim_of_other_process(
        &self,
        head: &request::Parts,
        body: &[u8],
    ) -> Result<Option<Claim>, Error> {
        let Some((key, scoped)) = self.scoped_key(head)? else {
            return Ok(None);
        };
        let terms = self.config.lease_terms("another process");
        let rules = &self.config.request;
        let fingerprint = rules
            .fingerprint
            .fingerprint(rules.secret.as_ref(), &key, head, body);
        let claim = build_claim(terms, scoped, &key, fingerprint, operation(head), |_| {
            Token::random()
        });
        let failed = |error| {
            let detail = "the operating system returned no random bytes for the token of a lease";
            Error::new(ErrorKind::StoreUnavailable, detail).with_source(error)
        };
        claim.map(Some).map_err(failed)
    }

    /// Returns the IDs that the entry of a key can have, from the key and the values that identify its caller.
    ///
    /// `principal` contains the values that the [principal](crate::Principal) of the layer reads. A value is that of a
    /// header or a cookie, or the bytes that a closure returns. It is empty for an anonymous caller. If two sources are
    /// [combined](crate::Principal::and), it contains the values of both. If the layer has several sources, each one gives
    /// an ID, in their order. For [`Principal::credentials`](crate::Principal::credentials), the value is that of
    /// `Authorization`; use [`key_id`](Self::key_id) for other credentials.
    ///
    /// The list is empty if no source has that number of values. It is also empty if the ID depends on the host
    /// ([`with_host_in_scope`](Self::with_host_in_scope)), on the endpoint
    /// ([`with_endpoint_in_scope`](Self::with_endpoint_in_scope)) or on the body
    /// ([`KeyReuse::Separate`](crate::KeyReuse::Separate)).
    ///
    /// # Errors
    ///
    /// [`MalformedKey`](crate::ErrorKind::MalformedKey) or [`KeyTooLong`](ErrorKind::KeyTooLong) if no request can have this
    /// key.
    pub fn key_ids(&self, key: &str, principal: &[&[u8]]) -> Result<Vec<KeyId>, Error> {
        let rules = &self.config.request;
        let key = rules
            .key_rules
            .validate(key.to_owned())
            .map_err(key_error)?;
        let is_of_request = rules.host_in_scope || rules.endpoint_in_scope;
        if is_of_request || rules.key_reuse == KeyReuse::Separate {
            return Ok(Vec::new());
        }
        let mut scope = fingerprint::new_scope(rules.secret.as_ref(), &rules.namespace);
        let (key, scopes) = match rules.key_from {
            KeyFrom::Header { .. } => {
                let scopes = rules.principal.scopes_of(principal, &scope);
                (RequestKey::Sent(key), scopes)
            }
            KeyFrom::Service { scope: of, .. } => {
                let scopes = match of {
                    KeyScope::EachCaller => rules.principal.scopes_of(principal, &scope),
                    KeyScope::AllCallers => {
                        scope.field(b"all callers");
                        vec![scope]
                    }
                };
                (RequestKey::Named(key, of), scopes)
            }
        };
        let unused = Fingerprint::from_bytes([0; 32]);
        let ids = scopes.into_iter();
        Ok(ids
            .map(|scope| fingerprint::entry_id(scope, &key, false).of(&unused))
            .collect())
    }

    /// Encodes `response` as the record of the entry `id`.
    ///
    /// An operator uses it to resolve an entry that [needs attention](crate::NeedsAttention), and thereby decides the
    /// response that retries get. The record is the one that the layer would store for this response of a handler, with any
    /// final status. A record with a 1xx status cannot be read.
    ///
    /// This stores nothing. Each store has its own function or command for that.
    #[must_use]
    pub fn encode_response_record(&self, id: &KeyId, response: &Response<Bytes>) -> Bytes {
        let rules = &self.config.response;
        #[cfg(feature = "grpc")]
        let is_grpc = self.config.grpc.is_some() && is_grpc_response(response.headers(), None);
        let is_replayed = |name: &HeaderName| {
            #[cfg(feature = "grpc")]
            if is_grpc && is_replayed_in_grpc(name) {
                return true;
            }
            (rules.replayed_headers)(name)
        };
        rules.codec().encode_response(
            id,
            response.status(),
            response.headers(),
            &is_replayed,
            response.body(),
            None,
        )
    }

    /// Encodes `value` as the record of the entry `id` of [`run_once`](Self::run_once).
    ///
    /// Like [`encode_response_record`](Self::encode_response_record), this stores nothing. A value that is too large or
    /// cannot be serialized becomes a tombstone.
    #[must_use]
    pub fn encode_value_record(&self, id: &KeyId, value: &impl Serialize) -> Bytes {
        disposition::encode_value(&self.config.response, id, value)
    }
}
