//! The service that publishes a policy.

use std::{
    array,
    convert::Infallible,
    fmt,
    future::{Ready, ready},
    pin::Pin,
    sync::{Arc, OnceLock},
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body::{Frame, SizeHint};
use tower_service::Service;

use super::Policy;

/// Service that responds to GET and HEAD with a policy as JSON, and with 405 to other methods.
///
/// Mount it outside the layer, such as at `/.well-known/idempotency-policy`, and link to it with
/// [`with_described_by`](crate::IdempotencyLayer::with_described_by). The name is not registered (RFC 8615).
///
/// ```
/// use axum::{Router, body::Body, http::Request, routing::post};
/// use tower::ServiceExt;
/// use tower_idempotency::{IdempotencyLayer, MemoryStore};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// const POLICY: &str = "/.well-known/idempotency-policy";
/// let layer = IdempotencyLayer::new(MemoryStore::new()).with_described_by(POLICY)?;
/// let app: Router = Router::new()
///     .route_service(POLICY, layer.policy().service())
///     .route("/payments", post(async || "paid").route_layer(layer));
/// let res = app.oneshot(Request::get(POLICY).body(Body::empty())?).await?;
/// assert_eq!(res.headers()["content-type"], "application/json");
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct PolicyService(Arc<Published>);

/// A policy, and its JSON for each share of the callers that the layer can enforce it for.
struct Published {
    policy: Policy,
    /// JSON documents by enforced percentage. Each is rendered when it is first read.
    documents: [OnceLock<Bytes>; 101],
}

/// Body of [`PolicyService`].
#[derive(Debug)]
pub struct PolicyBody(Option<Bytes>);

impl Policy {
    /// Returns a service that publishes this policy.
    ///
    /// Call it on the policy of the layer in use, after the last setter. Later setters have no effect on the service. After
    /// a change by an [`EnforcementSwitch`](crate::EnforcementSwitch), it publishes the new
    /// [`enforced_percent`](Self::enforced_percent).
    #[must_use]
    pub fn service(&self) -> PolicyService {
        PolicyService(Arc::new(Published {
            policy: self.clone(),
            documents: array::from_fn(|_| OnceLock::new()),
        }))
    }
}

impl Published {
    /// Returns the policy as JSON, with the current enforcement of the layer.
    fn document(&self) -> Bytes {
        let enforced_percent = self.policy.switch.0.get().enforced_percent();
        let document = &self.documents[usize::from(enforced_percent)];
        let render = || {
            let policy = Policy {
                enforced_percent,
                ..self.policy.clone()
            };
            let json = serde_json::to_vec(&policy).expect("a policy has names and plain values");
            Bytes::from(json)
        };
        document.get_or_init(render).clone()
    }
}

impl fmt::Debug for PolicyService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PolicyService")
            .field(&self.0.policy)
            .finish()
    }
}

impl<B> Service<Request<B>> for PolicyService {
    type Response = Response<PolicyBody>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, req: Request<B>) -> Self::Future {
        let (status, body, name, value) = match *req.method() {
            Method::GET | Method::HEAD => {
                let json = HeaderValue::from_static("application/json");
                (
                    StatusCode::OK,
                    self.0.document(),
                    header::CONTENT_TYPE,
                    json,
                )
            }
            _ => {
                let allowed = HeaderValue::from_static("GET, HEAD");
                (
                    StatusCode::METHOD_NOT_ALLOWED,
                    Bytes::new(),
                    header::ALLOW,
                    allowed,
                )
            }
        };
        let length = HeaderValue::from(body.len());
        let body = (req.method() != Method::HEAD).then_some(body);
        let mut res = Response::new(PolicyBody(body));
        *res.status_mut() = status;
        let headers = res.headers_mut();
        headers.insert(name, value);
        headers.insert(header::CONTENT_LENGTH, length);
        // A new deployment may have another policy.
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        ready(Ok(res))
    }
}

impl http_body::Body for PolicyBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let data = self.0.take().filter(|data| !data.is_empty());
        Poll::Ready(data.map(|data| Ok(Frame::data(data))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.as_ref().is_none_or(Bytes::is_empty)
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.0.as_ref().map_or(0, Bytes::len) as u64)
    }
}
