//! The response side of an observation: the call of the handler, then the body as the server reads it.

use std::sync::Arc;

use bytes::Bytes;
use http::{Response, StatusCode};
use tokio::time::Instant;

use super::{
    observation::Observation,
    outcome::{EndKind, ExecutionEnd, Seen},
};
use crate::{
    body::watch::BodyWatch,
    digest::FieldDigest,
    record::MAX_LINES,
    response::{
        buffer::{announced_length, is_event_stream},
        directives::{Directive, read_directive},
    },
    store::Ttl,
};

/// Observer of the call of a handler. If it is dropped, the client has disconnected.
pub(crate) struct ObservedCall {
    observation: Option<Arc<Observation>>,
    is_polling: bool,
    /// `true` if the service or the layer makes the key.
    is_key_of_service: bool,
}

impl ObservedCall {
    pub(super) fn new(observation: Arc<Observation>, is_key_of_service: bool) -> Self {
        Self {
            observation: Some(observation),
            is_polling: false,
            is_key_of_service,
        }
    }

    /// Polls the handler. Its panic ends the execution.
    pub(crate) fn poll<T>(&mut self, poll: impl FnOnce() -> T) -> T {
        self.is_polling = true;
        let polled = poll();
        self.is_polling = false;
        polled
    }

    /// Records the error of the inner service.
    pub(crate) fn failed(mut self) {
        if let Some(observation) = self.observation.take() {
            observation.set_end(observation.failure(None));
        }
    }

    /// Records the head of the response. Returns the observer of its body if the body matters.
    pub(crate) fn responded<R: http_body::Body>(
        mut self,
        res: &Response<R>,
    ) -> Option<Box<dyn BodyWatch>> {
        let observation = self.observation.take()?;
        match self.watch(&observation, res) {
            Ok(watch) => Some(Box::new(watch)),
            Err(ended) => {
                observation.set_end(ended);
                None
            }
        }
    }

    /// Returns the end of the execution if it does not depend on the body.
    fn watch<R: http_body::Body>(
        &self,
        observation: &Arc<Observation>,
        res: &Response<R>,
    ) -> Result<ResponseWatch, ExecutionEnd> {
        let (rules, status) = (&observation.context.config.response, res.status());
        let (default, max) = (rules.retention, rules.max_retention);
        let retention = match read_directive(rules.layer(), res, default, max) {
            Directive::NeedsAttention(_) => {
                return Err(observation.end_of(Some(status), EndKind::Refused));
            }
            Directive::NoStore => {
                return Err(observation.end_of(Some(status), EndKind::Released));
            }
            // Clients cannot choose another key for the corrected request.
            Directive::Record(_) if self.is_key_of_service && status.is_client_error() => {
                return Err(observation.end_of(Some(status), EndKind::Released));
            }
            Directive::Record(retention) => retention,
        };
        match rules.is_recorded(status) {
            Some(true) => {}
            Some(false) => return Err(observation.end_of(Some(status), EndKind::Released)),
            None => return Err(observation.end_of(Some(status), EndKind::Refused)),
        }
        let hint = res.body().size_hint();
        let announced = announced_length(status, res.headers()).or(hint.exact());
        if announced.unwrap_or(0).max(hint.lower()) > rules.body_limit as u64
            || res.headers().len() > MAX_LINES
            || is_event_stream(res.headers())
        {
            return Err(observation.unrecordable(status));
        }
        Ok(ResponseWatch {
            hash: FieldDigest::new(observation.context.config.request.secret.as_ref()),
            len: 0,
            announced,
            // A body of unknown length may never end.
            began: announced.is_none().then(Instant::now),
            status,
            retention,
            observation: Some(Arc::clone(observation)),
        })
    }
}

impl Drop for ObservedCall {
    fn drop(&mut self) {
        let Some(observation) = self.observation.take() else {
            return;
        };
        let ended = if self.is_polling {
            observation.failure(None)
        } else {
            // An enforced execution would have continued, and its response would be recorded.
            observation.end_of(None, EndKind::Recorded)
        };
        observation.set_end(ended);
    }
}

/// Observer of a response body.
struct ResponseWatch {
    /// `None` once the end is known.
    observation: Option<Arc<Observation>>,
    hash: FieldDigest,
    len: u64,
    announced: Option<u64>,
    began: Option<Instant>,
    status: StatusCode,
    retention: Ttl,
}

impl ResponseWatch {
    /// Returns the end of an execution whose response is recorded. `is_seen` is `true` if its body was seen to the end.
    fn recorded(&mut self, is_seen: bool) -> ExecutionEnd {
        let body = is_seen.then(|| self.hash.clone().finish());
        let status = Some(self.status);
        ExecutionEnd {
            kind: EndKind::Recorded,
            seen: Seen { status, body },
            retention: self.retention,
        }
    }
}

impl BodyWatch for ResponseWatch {
    fn on_data(&mut self, data: &Bytes) -> bool {
        let Some(observation) = &self.observation else {
            return false;
        };
        let rules = &observation.context.config.response;
        self.len += data.len() as u64;
        let is_streamed = self
            .began
            .is_some_and(|began| began.elapsed() > rules.collect_timeout);
        if self.len > rules.body_limit as u64 || is_streamed {
            observation.set_end(observation.unrecordable(self.status));
            self.observation = None;
            return false;
        }
        self.hash.append(data);
        true
    }

    fn on_end(mut self: Box<Self>, is_complete: bool) {
        let Some(observation) = self.observation.take() else {
            return;
        };
        let is_whole = self.announced.is_none_or(|announced| announced == self.len);
        observation.set_end(if is_complete && is_whole {
            self.recorded(true)
        } else {
            observation.failure(Some(self.status))
        });
    }
}

/// The server did not read the body to its end: the client has disconnected, or the announced length was reached.
impl Drop for ResponseWatch {
    fn drop(&mut self) {
        if let Some(observation) = self.observation.take() {
            let is_whole = self.announced == Some(self.len);
            observation.set_end(self.recorded(is_whole));
        }
    }
}
