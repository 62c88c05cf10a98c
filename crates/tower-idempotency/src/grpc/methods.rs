//! The methods that are protected, and the codes that are recorded.

use std::{fmt, sync::Arc};

use hashbrown::HashSet;
use http::{HeaderMap, Method, header, request};

use super::code::{GRPC_STATUS, GrpcCode};
use crate::{error::ConfigError, header_lines::lines_of};

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
    pub(crate) fn kind_of(&self, method: &Method, path: &str, headers: &HeaderMap) -> CallKind {
        let is_grpc = || has_media_type(headers, GRPC);
        match &self.selection {
            Selection::Only(paths) if paths.contains(path) => {
                if is_grpc() || method != Method::POST {
                    CallKind::Protected
                } else {
                    CallKind::Http
                }
            }
            Selection::Only(_)
                if is_call(headers) && method == Method::POST && is_method_path(path) =>
            {
                CallKind::Unprotected
            }
            Selection::Only(_) => CallKind::Http,
            Selection::AllBut(paths) if paths.contains(path) => {
                if is_grpc() {
                    CallKind::Unprotected
                } else {
                    CallKind::Http
                }
            }
            Selection::AllBut(_) if is_grpc() => CallKind::Protected,
            Selection::AllBut(_) if method != Method::POST && is_method_path(path) => {
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
    // It runs for each call that is not protected, so it has no branch for each byte.
    let state = names.bytes().fold(PART, |state, byte| {
        (NEXT[usize::from(byte)] >> state) & STATE
    });
    state == IN_METHOD
}

// The states while a path is read. `NEXT` has one element for each byte, and an element has one slot of 6 bits for each state.
// A state is the position of the first bit of its slot. The slot contains the next state.
const SLOT: u64 = 6;
/// The bytes are not those of a method.
const OTHER: u64 = 0;
/// A part of the name of the service begins.
const PART: u64 = SLOT;
/// In a part that does not begin with a capital letter.
const IN_SMALL: u64 = 2 * SLOT;
/// In a part that begins with a capital letter.
const IN_CAPITAL: u64 = 3 * SLOT;
/// The name of the method begins.
const METHOD: u64 = 4 * SLOT;
/// In the name of a method that begins with a capital letter.
const IN_METHOD: u64 = 5 * SLOT;
/// The bits of a slot.
const STATE: u64 = (1 << SLOT) - 1;

/// The next states for each byte.
static NEXT: [u64; 256] = {
    let mut next = [0; 256];
    let mut byte: u8 = 0;
    loop {
        let mut state = OTHER;
        while state <= IN_METHOD {
            next[byte as usize] |= next_state(state, byte) << state;
            state += SLOT;
        }
        if byte == u8::MAX {
            break next;
        }
        byte += 1;
    }
};

const fn next_state(state: u64, byte: u8) -> u64 {
    let is_in_name = byte.is_ascii_alphanumeric() || byte == b'_';
    match (state, byte) {
        (PART, b'A'..=b'Z') => IN_CAPITAL,
        (PART, b'_' | b'a'..=b'z') => IN_SMALL,
        (IN_SMALL | IN_CAPITAL, b'.') => PART,
        (IN_CAPITAL, b'/') => METHOD,
        (METHOD, b'A'..=b'Z') => IN_METHOD,
        (IN_SMALL | IN_CAPITAL | IN_METHOD, _) if is_in_name => state,
        _ => OTHER,
    }
}

/// Returns `true` if a gRPC server sent the response: it has a gRPC status or media type.
pub(crate) fn is_grpc_response(headers: &HeaderMap, trailers: Option<&HeaderMap>) -> bool {
    let has_status = |headers: &HeaderMap| headers.contains_key(GRPC_STATUS);
    has_status(headers) || trailers.is_some_and(has_status) || has_media_type(headers, GRPC)
}

/// Returns `true` if the media type is gRPC and no JSON. JSON extractors accept every media type that ends with `+json`. If
/// it counted as gRPC, a client could use it to avoid the rules of an HTTP route.
fn is_call(headers: &HeaderMap) -> bool {
    let name = header::CONTENT_TYPE;
    let mut values = lines_of(headers, &name);
    let (Some(value), None) = (values.next(), values.next()) else {
        return false;
    };
    // Most clients send it without a format.
    if value.as_bytes() == GRPC.as_bytes() {
        return true;
    }
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
    lines_of(headers, &header::CONTENT_TYPE).any(|value| {
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
        let req = req.body(()).unwrap();
        methods.kind_of(req.method(), req.uri().path(), req.headers())
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

    #[test]
    fn paths_of_methods_have_capital_letters() {
        for path in ["/A/B", "/a.B/C", "/_a.b_1.B2_/C_3", "/A.b.C/D"] {
            assert!(is_method_path(path), "{path}");
        }
        for path in [
            "",
            "/",
            "//",
            "A/B",
            "/A",
            "/A/",
            "/A//B",
            "/A/B/",
            "/A/B/C",
            "/A/B.C",
            "/A./B",
            "/.A/B",
            "/A..B/C",
            "/a/B",
            "/A/b",
            "/_/B",
            "/A/_",
            "/A.b/C",
            "/1/B",
            "/A/1",
            "/A.1/B",
            "/A-/B",
            "/A/B-",
            "/\u{e9}A/B",
            "/A/\u{c9}",
        ] {
            assert!(!is_method_path(path), "{path}");
        }
    }
}
