//! Records that operators store to resolve an entry.

use bytes::Bytes;
use http::Response;
use serde::Serialize;

use crate::{layer::IdempotencyLayer, response::disposition, store::KeyId};

impl IdempotencyLayer {
    /// Encodes `response` as the record of the entry `id`.
    ///
    /// An operator uses it to resolve an entry that [needs attention](crate::NeedsAttention), and thereby decides the response
    /// that retries get. The record is the one that the layer would store for this response of a handler, with any status.
    ///
    /// This stores nothing. Each store has its own function or command for that.
    #[must_use]
    pub fn encode_response_record(&self, id: &KeyId, response: &Response<Bytes>) -> Bytes {
        let rules = &self.config.response;
        rules.codec().encode_response(
            id,
            response.status(),
            response.headers(),
            &*rules.replayed_headers,
            response.body(),
            None,
        )
    }

    /// Encodes `value` as the record of the entry `id` of [`run_once`](Self::run_once).
    ///
    /// Like [`encode_response_record`](Self::encode_response_record), this stores nothing. A value that is too large or cannot
    /// be serialized becomes a tombstone.
    #[must_use]
    pub fn encode_value_record(&self, id: &KeyId, value: &impl Serialize) -> Bytes {
        disposition::encode_value(&self.config.response, id, value)
    }
}
