//! The adapter for reqwest, through `reqwest-middleware`.

use std::sync::Arc;

use http::{Extensions, HeaderMap, HeaderName, Method, StatusCode, header};
use reqwest::{Body, Request, Response, ResponseBuilderExt, Url, redirect::Policy};
use reqwest_middleware::{ClientBuilder, Middleware, Next};
use tokio::time::timeout_at;

use crate::{
    error::{BoxError, Error, Reason, is_not_sent},
    keys::{IsAttempt, is_safe},
    layer::RetryLayer,
    operation::Operation,
    series::{Series, Transport, drive},
    settings::Settings,
};

impl RetryLayer {
    /// Returns the builder of a reqwest client that retries with the settings of this layer.
    ///
    /// The layer is the outermost middleware, so the order in which others are added does not matter: each of them sees
    /// every attempt. The caller puts an [`Operation`] into the extensions of a request with
    /// `RequestBuilder::with_extension`. The error of a call is an [`Error`] in [`reqwest_middleware::Error::Middleware`].
    ///
    /// # Redirects
    ///
    /// The layer replaces the redirect policy of `builder`. It follows up to 10 redirects within one origin itself. The
    /// response of a redirect to another scheme, host or port is returned. The key, and credentials such as those of
    /// `ClientBuilder::default_headers`, must not reach another origin.
    ///
    /// A 301 or 302 to an unsafe method other than POST, such as DELETE, is returned as the response of the operation. reqwest
    /// itself would repeat the method at the other URL, where it is another operation.
    ///
    /// # Retries of reqwest
    ///
    /// The layer replaces the retry policy of `builder` with `reqwest::retry::never()`. A retry of reqwest returns only the last
    /// error, and its limits are not those of the layer.
    ///
    /// # Cookies
    ///
    /// With a cookie store, a response may change the cookies between two attempts. A server that identifies callers by a
    /// cookie then sees another caller, and executes the retry. Use no cookie store, or set the header `Cookie` of the
    /// request, which reqwest then sends instead of its cookies.
    ///
    /// # Errors
    ///
    /// If reqwest cannot build the client.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_idempotency_client::{Operation, RetryLayer};
    ///
    /// # async fn f() -> Result<(), Box<dyn std::error::Error>> {
    /// let client = RetryLayer::new().into_reqwest(reqwest::Client::builder())?.build();
    ///
    /// let operation = Operation::new();
    /// let response = client
    ///     .post("https://api.example.com/orders")
    ///     .body("one espresso")
    ///     .with_extension(operation.clone())
    ///     .send()
    ///     .await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn into_reqwest(self, builder: reqwest::ClientBuilder) -> reqwest::Result<ClientBuilder> {
        let builder = builder
            .redirect(Policy::none())
            .retry(reqwest::retry::never());
        let client = builder.build()?;
        let settings = Arc::new(self.settings);
        Ok(ClientBuilder::new(client).with(RetryMiddleware { settings }))
    }
}

/// Middleware of [`RetryLayer::into_reqwest`]. It is private, because it is safe only with a client that follows no
/// redirects and retries nothing.
struct RetryMiddleware {
    settings: Arc<Settings>,
}

#[async_trait::async_trait]
impl Middleware for RetryMiddleware {
    async fn handle(
        &self,
        mut req: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        if extensions.get::<IsAttempt>().is_some() {
            return next.run(req, extensions).await;
        }
        let is_by_caller = extensions.get::<Operation>().is_some();
        let method = req.method().clone();
        let keys = &self.settings.keys;
        let keyed = keys.set_key(&method, req.headers_mut(), extensions);
        if let Some(error) = keyed.key_error() {
            return Err(reqwest_middleware::Error::middleware(error));
        }
        let series = Series::new(self.settings.clone(), keyed, is_safe(&method), None);
        let marked = Marked::new(extensions, is_by_caller);
        let chain = Chain {
            next,
            extensions: &mut *marked.extensions,
            key_header: self.settings.keys.header(),
            copy: req.try_clone(),
            redirects: 0,
            is_redirected_to_get: false,
        };
        let result = send_all(series, chain, req).await;
        result.map_err(reqwest_middleware::Error::middleware)
    }
}

/// Extensions of the caller with the mark of an attempt.
///
/// The caller may use them for another request, also after it has dropped this one. So the drop removes the mark, and an
/// operation that the layer created.
struct Marked<'a> {
    extensions: &'a mut Extensions,
    is_by_caller: bool,
}

impl<'a> Marked<'a> {
    fn new(extensions: &'a mut Extensions, is_by_caller: bool) -> Self {
        extensions.insert(IsAttempt);
        Self {
            extensions,
            is_by_caller,
        }
    }
}

impl Drop for Marked<'_> {
    fn drop(&mut self) {
        self.extensions.remove::<IsAttempt>();
        if !self.is_by_caller {
            self.extensions.remove::<Operation>();
        }
    }
}

async fn send_all(
    mut series: Series,
    mut chain: Chain<'_>,
    req: Request,
) -> Result<Response, Error> {
    if let Err(reason) = series.begin() {
        return Err(series.fail(reason, None));
    }
    let Ok(result) = timeout_at(series.deadline(), chain.follow(req)).await else {
        return Err(series.fail(Reason::Deadline, None));
    };
    let res = Box::pin(drive(series, chain, result)).await?;
    Ok(res.map(Body::wrap).into())
}

/// Sends attempts through the inner middleware, and follows redirects.
struct Chain<'a> {
    next: Next<'a>,
    extensions: &'a mut Extensions,
    key_header: &'a HeaderName,
    copy: Option<Request>,
    /// Redirects that the current attempt has followed.
    redirects: usize,
    /// The current attempt sent an unsafe request, and was redirected to its result.
    is_redirected_to_get: bool,
}

impl Transport for Chain<'_> {
    type Body = Body;

    async fn ready(&mut self) -> Result<(), BoxError> {
        Ok(())
    }

    async fn send(&mut self) -> Result<http::Response<Body>, BoxError> {
        match self.copy.as_ref().and_then(Request::try_clone) {
            Some(req) => self.follow(req).await,
            None => Err("the request body cannot be copied a second time".into()),
        }
    }

    fn can_send(&self) -> bool {
        self.copy.is_some()
    }

    fn is_not_sent(&self, error: &BoxError) -> bool {
        self.redirects == 0 && is_not_sent(error.as_ref())
    }

    fn is_rejection_final(&self) -> bool {
        !self.is_redirected_to_get
    }
}

impl Chain<'_> {
    async fn follow(&mut self, mut req: Request) -> Result<http::Response<Body>, BoxError> {
        self.redirects = 0;
        self.is_redirected_to_get = false;
        let is_unsafe = !is_safe(req.method());
        loop {
            let followup = Followup::of(&req);
            let res = self.next.clone().run(req, &mut *self.extensions).await;
            let res = res.map_err(|error| match error {
                reqwest_middleware::Error::Reqwest(error) => BoxError::from(error),
                // Unlike a conversion, this keeps the type of the error. The judgement depends on it.
                reqwest_middleware::Error::Middleware(error) => {
                    error.reallocate_into_boxed_dyn_error_without_backtrace()
                }
            })?;
            let next = followup.request(res.status(), res.headers(), self.key_header);
            let Some(next) = next.filter(|_| self.redirects < MAX_REDIRECTS) else {
                return into_http(res);
            };
            self.redirects += 1;
            self.is_redirected_to_get = is_unsafe && is_safe(next.method());
            req = next;
        }
    }
}

/// Copy of a request, from which the request after a redirect is built.
struct Followup {
    req: Request,
    has_body: bool,
}

impl Followup {
    fn of(req: &Request) -> Self {
        if let Some(req) = req.try_clone() {
            return Self {
                req,
                has_body: true,
            };
        }
        let mut head = Request::new(req.method().clone(), req.url().clone());
        *head.headers_mut() = req.headers().clone();
        *head.timeout_mut() = req.timeout().copied();
        Self {
            req: head,
            has_body: false,
        }
    }

    /// Returns the request after a redirect. Returns `None` if:
    /// - the response is no redirect within the origin;
    /// - the response is that of the operation;
    /// - the body cannot be sent again.
    fn request(
        mut self,
        status: StatusCode,
        headers: &HeaderMap,
        key_header: &HeaderName,
    ) -> Option<Request> {
        let method = self.req.method();
        let becomes_get = match status.as_u16() {
            301 | 302 if method == Method::POST => true,
            // The method would not change, and the server has usually executed it. At the other URL it is another operation.
            301 | 302 if !is_safe(method) => return None,
            301 | 302 | 307 | 308 => false,
            303 => method != Method::HEAD,
            _ => return None,
        };
        if !becomes_get && !self.has_body {
            return None;
        }
        let location = str::from_utf8(headers.get(header::LOCATION)?.as_bytes()).ok()?;
        let mut url = self.req.url().join(location).ok()?;
        // Another origin must not get the key or the credentials. The client adds its default headers to each request.
        if url.origin() != self.req.url().origin() {
            return None;
        }
        if url.fragment().is_none() {
            url.set_fragment(self.req.url().fragment());
        }
        let headers = self.req.headers_mut();
        if becomes_get {
            for name in PAYLOAD_HEADERS {
                headers.remove(name);
            }
            headers.remove(key_header);
            *self.req.method_mut() = Method::GET;
            *self.req.body_mut() = None;
        }
        *self.req.url_mut() = url;
        Some(self.req)
    }
}

/// Converts a response. The result includes its URL.
fn into_http(res: Response) -> Result<http::Response<Body>, BoxError> {
    let url: Url = res.url().clone();
    let with_url = http::Response::builder().url(url).body(())?;
    let mut res = http::Response::<Body>::from(res);
    res.extensions_mut()
        .extend(with_url.into_parts().0.extensions);
    Ok(res)
}

/// Maximum number of redirects of one attempt, the same as the default of reqwest.
const MAX_REDIRECTS: usize = 10;

const PAYLOAD_HEADERS: [HeaderName; 4] = [
    header::CONTENT_TYPE,
    header::CONTENT_LENGTH,
    header::CONTENT_ENCODING,
    header::TRANSFER_ENCODING,
];
