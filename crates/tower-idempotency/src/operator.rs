//! Answers that operators give in a handler's stead.

use bytes::Bytes;
use http::Response;
use serde::Serialize;

use crate::{layer::IdempotencyLayer, response::disposition, store::KeyId};

impl IdempotencyLayer {
    /// The record of an answer to the request under this id: for whoever resolves what
    /// [needs attention](crate::NeedsAttention) and settles what the answer is.
    ///
    /// It is what the layer would store had a handler answered this, whatever the status; nothing is stored here. Stores
    /// have their own ways to put it in place, and so have their operators.
    #[must_use]
    pub fn encode_response_record(&self, id: &KeyId, answer: &Response<Bytes>) -> Bytes {
        let (config, headers) = (&*self.config, answer.headers());
        let codec = config.response.codec();
        codec.encode_response(
            id,
            answer.status(),
            headers,
            &*config.response.replayed,
            answer.body(),
            None,
        )
    }

    /// As [`encode_response_record`](Self::encode_response_record), of a value of [`run_once`](Self::run_once).
    #[must_use]
    pub fn encode_value_record(&self, id: &KeyId, value: &impl Serialize) -> Bytes {
        disposition::value(&self.config, id, value)
    }
}
