//! The request side of an observation: the head, then the body as the handler reads it.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use bytes::Bytes;
use http::request;

use super::{
    call::ObservedCall,
    observation::{Observation, Pending},
};
use crate::{
    body::watch::BodyWatch,
    error::ErrorKind,
    execution::{
        admission::{count_uncovered, has_outer_lease},
        shared::Context,
    },
    panics::catch_report_panic,
    request::{
        coverage_of,
        credentials::{Identity, PrincipalError},
        find_key,
        key::RequestKey,
        observed_operation, pass_reason,
        read_body::{announced_length, expected_length},
        scope_key,
    },
    telemetry::{self, Observed},
};

/// An observer of the request body, and one of the call of the handler.
pub(crate) type Observers = (Option<Box<dyn BodyWatch>>, Option<ObservedCall>);

/// Begins to observe a request. A panic of a setting ends the observation and nothing else.
pub(crate) fn observe(
    context: &Arc<Context>,
    head: &request::Parts,
    body: &impl http_body::Body,
) -> Observers {
    // Unwind safe: the state that the observation shares consists of atomics, and of settings shared by reference.
    let observers = catch_unwind(AssertUnwindSafe(|| begin(context, head, body)));
    observers.unwrap_or_else(|_panic| {
        let layer = context.config.layer();
        catch_report_panic(|| {
            tracing::error!(
                layer = layer.as_str(),
                "closure of a setting panicked, request not judged"
            );
        });
        telemetry::observed(layer, Observed::NotJudged);
        (None, None)
    })
}

fn begin(context: &Arc<Context>, head: &request::Parts, body: &impl http_body::Body) -> Observers {
    const NONE: Observers = (None, None);
    let (config, shared) = (&context.config, &context.shared);
    let (rules, layer) = (&config.request, config.layer());
    shared.registration.at_request(layer);
    if let Some(reason) = pass_reason(rules, head) {
        count_uncovered(context, &head.method, &head.headers, reason);
        return NONE;
    }
    let found = find_key(rules, head);
    telemetry::unsafe_request(layer, &head.method, coverage_of(&found));
    let key = match found {
        Ok(Some(key)) if has_outer_lease(&head.extensions, &key) => return NONE,
        Ok(Some(key)) => key,
        Ok(None) => {
            telemetry::observed(layer, Observed::NoKey);
            return NONE;
        }
        Err(error) => {
            let is_missing = error.kind() == ErrorKind::MissingKey;
            let outcome = if is_missing {
                Observed::NoKey
            } else {
                Observed::WouldRefuseKey
            };
            telemetry::observed(layer, outcome);
            return NONE;
        }
    };
    let scoped = match scope_key(rules, head, &key) {
        Ok((scoped, identity)) => {
            if identity == Identity::Anonymous {
                config.warnings().anonymous();
            }
            scoped
        }
        Err(error) => {
            if matches!(error, PrincipalError::Missing(_)) {
                config.warnings().principal_missing();
            }
            telemetry::observed(layer, Observed::WouldRefuseKey);
            return NONE;
        }
    };
    if rules.is_grpc() {
        // The status is in the trailers, which an observer does not see.
        telemetry::observed(layer, Observed::NotJudged);
        return NONE;
    }
    let secret = rules.secret.as_ref();
    let fingerprint = rules.fingerprint.observe(secret, &key, head);
    let is_head_only = fingerprint.is_head_only();
    if !is_head_only && announced_length(&head.headers, body) > rules.body_limit as u64 {
        telemetry::observed(layer, Observed::WouldExceed);
        return NONE;
    }
    let operation = if shared.store.has_operations() {
        observed_operation(head)
    } else {
        Box::default()
    };
    let is_key_of_service = rules.key_from.is_service() || key == RequestKey::Derived;
    let pending = Pending {
        key,
        scoped,
        fingerprint,
        operation,
        bytes: shared.observer.account(),
    };
    let observation = Observation::new(context);
    let call = ObservedCall::new(Arc::clone(&observation), is_key_of_service);
    if is_head_only || body.is_end_stream() {
        observation.judge(pending);
        return (None, Some(call));
    }
    let watch = RequestWatch {
        pending: Some(pending),
        expected: expected_length(&head.headers, body),
        observation,
    };
    (Some(Box::new(watch)), Some(call))
}

/// Observer of a request body.
struct RequestWatch {
    pending: Option<Pending>,
    expected: u64,
    observation: Arc<Observation>,
}

impl RequestWatch {
    fn finish(&mut self, is_complete: bool) {
        let Some(pending) = self.pending.take() else {
            return;
        };
        if is_complete && pending.fingerprint.len() as u64 >= self.expected {
            self.observation.judge(pending);
        } else {
            self.observation.report(Observed::NotJudged);
        }
    }
}

impl BodyWatch for RequestWatch {
    fn on_data(&mut self, data: &Bytes) -> bool {
        let Some(pending) = &mut self.pending else {
            return false;
        };
        let limit = self.observation.context.config.request.body_limit;
        let outcome = if data.len() > limit - pending.fingerprint.len() {
            Observed::WouldExceed
        } else if pending.fingerprint.is_buffered() && !pending.bytes.add(data.len()) {
            Observed::NotJudged
        } else {
            pending.fingerprint.push(data);
            return true;
        };
        self.pending = None;
        self.observation.report(outcome);
        false
    }

    fn on_end(mut self: Box<Self>, is_complete: bool) {
        self.finish(is_complete);
    }
}

/// The handler did not read the body to its end. The body is complete if its length says so.
impl Drop for RequestWatch {
    fn drop(&mut self) {
        let is_complete = self.expected > 0;
        self.finish(is_complete);
    }
}
