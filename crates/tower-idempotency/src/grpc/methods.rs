//! The methods that are protected, and the codes that are recorded.

use std::{collections::HashSet, fmt, sync::Arc};

use http::{HeaderMap, Method, header, request};

use super::code::{GRPC_STATUS, GrpcCode};
use crate::error::ConfigError;

/// The media type of gRPC, without its format.
const GRPC: &str = "application/grpc";

/// The gRPC methods that a layer protects. For [`with_grpc`](crate::IdempotencyLayer::with_grpc).
///
/// Protect unary methods with effects, such as `CreatePayment`. Reads need no protection, and streams cannot have it: a call
/// of a protected method with a key must be one message each way.
///
/// ```
/// use tower_idempotency::{GrpcMethods, IdempotencyLayer, MemoryStore};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let methods = GrpcMethods::only(["/payments.v1.Payments/Pay", "/payments.v1.Payments/Refund"])?;
/// let layer = IdempotencyLayer::new(MemoryStore::new()).with_grpc(methods);
/// # assert!(GrpcMethods::only(["/payments.v1.Payments"]).is_err());
/// # drop(layer);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use]
pub struct GrpcMethods {
    selection: Selection,
    recorded_codes: Arc<dyn Fn(GrpcCode) -> bool + Send + Sync>,
}

#[derive(Clone)]
enum Selection {
    Only(Arc<HashSet<Box<str>>>),
    AllBut(Arc<HashSet<Box<str>>>),
}

/// The rules that apply to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallKind {
    /// No gRPC call.
    Http,
    /// A call of a protected method.
    Protected,
    /// A call of another method, which passes through.
    Unprotected,
}

/// A side of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Request,
    Response,
}

impl Side {
    /// Returns the name of the side in events and counters.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Request => "request",
            Self::Response => "response",
        }
    }
}

impl GrpcMethods {
    /// Protects these methods. Each is a path `/package.Service/Method`; the first slash may be missing.
    ///
    /// Every other gRPC method passes through, with or without a key, if the names of its service and method begin with
    /// capital letters. Calls of other paths keep the rules for HTTP, and so do requests with the media type of gRPC with
    /// JSON. An HTTP route must not have such a path: a client could reach it with another media type of gRPC. If a method
    /// with effects is missing, each retry of it executes again; an empty list protects nothing. A missing method causes no
    /// warning: see the counter `idempotency_passed_through_total`.
    ///
    /// # Errors
    ///
    /// Returns an error if a path has another form.
    pub fn only<P: AsRef<str>>(paths: impl IntoIterator<Item = P>) -> Result<Self, ConfigError> {
        Ok(Self::new(Selection::Only(parse_paths(paths)?)))
    }

    /// Protects all methods.
    ///
    /// A call of a streaming method with a key is then rejected, or its response is not recorded. If keys are required
    /// ([`MissingKey::Reject`](crate::MissingKey::Reject)), that includes health checks and reflection: use
    /// [`all_but`](Self::all_but). A server may route by the path alone, so a request of another HTTP method to a path like
    /// `/Service/Method` counts as a call. It does not if a name begins with a small letter: list such methods with
    /// [`only`](Self::only).
    pub fn all() -> Self {
        Self::new(Selection::AllBut(Arc::default()))
    }

    /// Protects all methods but these, which pass through: reads and streams. The paths are those of [`only`](Self::only).
    ///
    /// A stream that is missing here does not work with a key: see [`all`](Self::all).
    ///
    /// # Errors
    ///
    /// Returns an error if a path has another form.
    pub fn all_but<P: AsRef<str>>(paths: impl IntoIterator<Item = P>) -> Result<Self, ConfigError> {
        Ok(Self::new(Selection::AllBut(parse_paths(paths)?)))
    }

    fn new(selection: Selection) -> Self {
        Self {
            selection,
            recorded_codes: Arc::new(GrpcCode::is_outcome),
        }
    }

    /// Sets the predicate that returns `true` for the codes that the layer records. Default: [`GrpcCode::is_outcome`], which
    /// is OK, `INVALID_ARGUMENT`, `NOT_FOUND`, `ALREADY_EXISTS`, `PERMISSION_DENIED`, `FAILED_PRECONDITION` and
    /// `OUT_OF_RANGE`.
    ///
    /// After any other code the layer releases the key, and a retry executes again. If you record the code of a temporary
    /// failure, such as `UNAVAILABLE`, retries get that failure for the complete retention. If a handler returns a code that
    /// is not recorded after its effect, each retry repeats the effect.
    pub fn with_recorded_codes(
        mut self,
        is_recorded: impl Fn(GrpcCode) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.recorded_codes = Arc::new(is_recorded);
        self
    }

    pub(crate) fn is_recorded(&self, code: GrpcCode) -> bool {
        (self.recorded_codes)(code)
    }

    /// Returns the rules that apply to a request.
    ///
    /// Servers such as tonic check neither the media type nor the HTTP method. A client must not avoid the protection of a
    /// method by another HTTP method.
    pub(crate) fn kind_of(&self, head: &request::Parts) -> CallKind {
        let path = head.uri.path();
        let is_grpc = has_media_type(&head.headers, GRPC);
        match &self.selection {
            Selection::Only(paths) if paths.contains(path) => {
                if is_grpc || head.method != Method::POST {
                    CallKind::Protected
                } else {
                    CallKind::Http
                }
            }
            Selection::Only(_)
                if is_call(&head.headers)
                    && head.method == Method::POST
                    && is_method_path(path) =>
            {
                CallKind::Unprotected
            }
            Selection::Only(_) => CallKind::Http,
            Selection::AllBut(paths) if paths.contains(path) => {
                if is_grpc {
                    CallKind::Unprotected
                } else {
                    CallKind::Http
                }
            }
            Selection::AllBut(_) if is_grpc => CallKind::Protected,
            Selection::AllBut(_) if head.method != Method::POST && is_method_path(path) => {
                CallKind::Protected
            }
            Selection::AllBut(_) => CallKind::Http,
        }
    }

    /// Returns the reason why the head is not that of a unary call, or `None` if it is one.
    pub(crate) fn defect(head: &request::Parts) -> Option<&'static str> {
        if head.method != Method::POST {
            return Some("expected a gRPC call with POST, found another method");
        }
        // Its trailers are in the body, and so is the status.
        has_media_type(&head.headers, "application/grpc-web")
            .then_some("expected gRPC, found grpc-web; place the layer inside that of grpc-web")
    }
}

impl fmt::Debug for GrpcMethods {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, paths) = match &self.selection {
            Selection::Only(paths) => ("only", paths),
            Selection::AllBut(paths) => ("all_but", paths),
        };
        f.debug_struct("GrpcMethods")
            .field(name, paths)
            .finish_non_exhaustive()
    }
}

fn parse_paths<P: AsRef<str>>(
    paths: impl IntoIterator<Item = P>,
) -> Result<Arc<HashSet<Box<str>>>, ConfigError> {
    let parse = |path: P| {
        let path = path.as_ref();
        let name = path.strip_prefix('/').unwrap_or(path);
        match name.split_once('/') {
            Some((service, method))
                if is_service(service.as_bytes()) && is_identifier(method.as_bytes()) =>
            {
                Ok(format!("/{name}").into_boxed_str())
            }
            Some(_) | None => Err(ConfigError::new(
                "paths of the form /package.Service/Method",
                path.to_owned(),
            )),
        }
    };
    Ok(Arc::new(
        paths.into_iter().map(parse).collect::<Result<_, _>>()?,
    ))
}

/// Returns `true` for identifiers with dots in between.
fn is_service(name: &[u8]) -> bool {
    name.split(|byte| *byte == b'.').all(is_identifier)
}

/// Returns `true` for an identifier of Protocol Buffers.
fn is_identifier(name: &[u8]) -> bool {
    name.first().is_some_and(|first| !first.is_ascii_digit())
        && name
            .iter()
            .all(|byte| byte.is_ascii_alphanumeric() || *byte == b'_')
}

/// Returns `true` for `/package.Service/Method` or `/Service/Method` with capital letters, as in nearly all schemas.
///
/// A layer may serve other routes too. Those keep their rules, whatever media type a client sends.
fn is_method_path(path: &str) -> bool {
    let Some(names) = path.strip_prefix('/') else {
        return false;
    };
    let (mut is_first_byte, mut is_capital, mut is_method) = (true, false, false);
    // One pass: it runs for each call that is not protected.
    for byte in names.bytes() {
        match byte {
            b'0'..=b'9' if is_first_byte => return false,
            b'_' | b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' => {
                if is_first_byte {
                    is_capital = byte.is_ascii_uppercase();
                }
                is_first_byte = false;
            }
            b'.' if !is_first_byte && !is_method => is_first_byte = true,
            b'/' if !is_first_byte && !is_method && is_capital => {
                (is_first_byte, is_method) = (true, true);
            }
            _ => return false,
        }
    }
    is_method && !is_first_byte && is_capital
}

/// Returns `true` if a gRPC server sent the response: it has a gRPC status or media type.
pub(crate) fn is_grpc_response(headers: &HeaderMap, trailers: Option<&HeaderMap>) -> bool {
    let has_status = |headers: &HeaderMap| headers.contains_key(GRPC_STATUS);
    has_status(headers) || trailers.is_some_and(has_status) || has_media_type(headers, GRPC)
}

/// Returns `true` if the media type is gRPC and no JSON. JSON extractors accept every media type that ends with `+json`. If
/// it counted as gRPC, a client could use it to avoid the rules of an HTTP route.
fn is_call(headers: &HeaderMap) -> bool {
    let mut values = headers.get_all(header::CONTENT_TYPE).iter();
    let (Some(value), None) = (values.next(), values.next()) else {
        return false;
    };
    let essence = value.as_bytes().split(|byte| *byte == b';').next();
    let essence = essence.unwrap_or_default().trim_ascii();
    let Some((start, format)) = essence.split_at_checked(GRPC.len()) else {
        return false;
    };
    let last = format.len().saturating_sub(b"+json".len());
    start.eq_ignore_ascii_case(GRPC.as_bytes())
        && matches!(format.first(), None | Some(b'+' | b'-'))
        && !format[last..].eq_ignore_ascii_case(b"+json")
}

/// Returns `true` if a media type begins with `start` in any letter case. Every line counts.
fn has_media_type(headers: &HeaderMap, start: &str) -> bool {
    headers.get_all(header::CONTENT_TYPE).iter().any(|value| {
        let found = value.as_bytes().trim_ascii_start().get(..start.len());
        found.is_some_and(|found| found.eq_ignore_ascii_case(start.as_bytes()))
    })
}

#[cfg(test)]
mod tests {
    use http::{HeaderValue, Request};

    use super::*;

    const PAY: &str = "/payments.v1.Payments/Pay";
    const READ: &str = "/payments.v1.Payments/Read";

    fn kind(methods: &GrpcMethods, method: Method, path: &str, media_type: &str) -> CallKind {
        let mut req = Request::builder().method(method).uri(path);
        let value = HeaderValue::from_bytes(media_type.as_bytes()).unwrap();
        req = req.header(header::CONTENT_TYPE, value);
        methods.kind_of(&req.body(()).unwrap().into_parts().0)
    }

    #[test]
    fn listed_methods_are_protected() {
        use CallKind::{Http, Protected, Unprotected};
        let (grpc, json) = ("application/grpc", "application/json");
        let only = GrpcMethods::only(["payments.v1.Payments/Pay"]).unwrap();
        let all_but = GrpcMethods::all_but([READ]).unwrap();
        for (methods, path, method, media_type, expected) in [
            (&only, PAY, Method::POST, grpc, Protected),
            (&only, PAY, Method::POST, "Application/gRPC+x; y", Protected),
            (&only, PAY, Method::POST, json, Http),
            (&only, PAY, Method::GET, json, Protected),
            (&only, READ, Method::POST, grpc, Unprotected),
            (&only, READ, Method::GET, json, Http),
            (&only, READ, Method::PUT, grpc, Http),
            (&only, "/Greeter/Hello", Method::POST, grpc, Unprotected),
            (&only, "/a.Other/Method", Method::POST, grpc, Unprotected),
            (&only, "/orders", Method::POST, grpc, Http),
            (&only, "/orders/7", Method::POST, grpc, Http),
            (&only, "/v1.0/Orders", Method::POST, grpc, Http),
            (&only, "/api.v1/Orders", Method::POST, grpc, Http),
            (
                &only,
                "/nested/payments.v1.Payments/Pay",
                Method::POST,
                grpc,
                Http,
            ),
            (&all_but, PAY, Method::POST, grpc, Protected),
            (&all_but, PAY, Method::GET, json, Protected),
            (&all_but, PAY, Method::POST, json, Http),
            (&all_but, "/Greeter/Pay", Method::GET, json, Protected),
            (&all_but, READ, Method::POST, grpc, Unprotected),
            (&all_but, READ, Method::GET, json, Http),
            (&all_but, "/orders", Method::POST, grpc, Protected),
            (&all_but, "/orders", Method::GET, json, Http),
        ] {
            let found = kind(methods, method.clone(), path, media_type);
            assert_eq!(found, expected, "{methods:?} {method} {path} {media_type}");
        }
    }

    #[test]
    fn paths_name_service_and_method() {
        for path in [PAY, "a.B/C", "/_a/b_1", "/B/C"] {
            assert!(GrpcMethods::only([path]).is_ok(), "{path}");
        }
        for path in [
            "", "/", "/a", "a/", "/a/", "//b", "/a/b/c", "/a/b.c", "/a..b/c", "/1/a", "/a/*",
            "/a b/c",
        ] {
            assert!(GrpcMethods::only([path]).is_err(), "{path}");
            assert!(GrpcMethods::all_but([path]).is_err(), "{path}");
        }
    }
}
