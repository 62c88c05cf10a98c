//! Handling of one request: the choice of its route, and the response.

use std::{
    convert::Infallible,
    sync::{Arc, atomic::Ordering},
};

use http::{
    HeaderValue, Method, Request, Response, Version, header,
    uri::{Authority, PathAndQuery},
};
use hyper::body::Incoming;
use tower_service::Service;

use crate::{
    body::{ReceivedBody, ResponseBody},
    connection::Connection,
    headers::{
        MAX_LINES, connection_lines, count_forward, has_unknown_coding, remove_other_upgrade,
    },
    problem::{Problem, last_response},
    proxy::Shared,
    route::segments,
    routes::{Route, RouteService},
};

/// Responds to a request, through its route or with an error of the proxy.
pub(crate) async fn respond(
    shared: Arc<Shared>,
    connection: Arc<Connection>,
    req: Request<Incoming>,
) -> Result<Response<ResponseBody>, Infallible> {
    let version = req.version();
    let open = connection.begin_request();
    connection.stream.set_version(version);
    let is_ambiguous =
        connection.stream.lengths.is_next_ambiguous() || has_unknown_coding(req.headers());
    let live = shared.live.load_full();
    let lines = connection_lines(req.headers());
    let mut req = req.map(|body| {
        let body = ReceivedBody::new(body, version).with_connection(&connection);
        body.without_trailers_of(lines)
    });
    remove_other_upgrade(&mut req);
    let found = if is_ambiguous {
        Err(Problem::BadLength)
    } else {
        find_route(&live.routes, &req)
    };
    let res = match found {
        Ok(route) => {
            if let Some(coverage) = route.coverage(&req) {
                route.counters.unsafe_request(coverage);
            }
            let uncounted = route.counters.begin_request();
            let res = if count_forward(&mut req) {
                req.extensions_mut().insert(connection);
                if let Some(template) = &route.template {
                    req.extensions_mut().insert(template.clone());
                }
                call(&route.service, req).await
            } else {
                last_response(req.method()).map(ResponseBody::from)
            };
            uncounted.responded(res.status());
            res
        }
        Err(problem) => {
            let res = problem.response();
            live.without_route.responded(res.status());
            res.map(ResponseBody::from)
        }
    };
    let mut res = res.map(|body| body.with_request(open));
    let is_draining = version < Version::HTTP_2 && shared.is_draining.load(Ordering::Acquire);
    if is_ambiguous || (is_draining && !is_upgrade(&res)) {
        res.headers_mut()
            .insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    Ok(res)
}

fn is_upgrade(res: &Response<ResponseBody>) -> bool {
    res.status() == http::StatusCode::SWITCHING_PROTOCOLS
}

fn find_route<'a>(routes: &'a [Route], req: &Request<ReceivedBody>) -> Result<&'a Route, Problem> {
    if req.headers().len() > MAX_LINES {
        return Err(Problem::TooManyHeaders);
    }
    if req.method() == Method::CONNECT {
        return Err(Problem::Connect);
    }
    // Methods are case-sensitive, but some services change them to capital letters.
    let mut method = req.method().as_str().bytes();
    if method.any(|byte| byte.is_ascii_lowercase()) {
        return Err(Problem::BadMethod);
    }
    // h2 compares the numbers of several lengths, and reads an empty one as 0. An upstream may read another number.
    let mut lengths = req.headers().get_all(header::CONTENT_LENGTH).iter();
    if lengths.next().is_some_and(HeaderValue::is_empty) || lengths.next().is_some() {
        return Err(Problem::BadLength);
    }
    let hosts = req.headers().get_all(header::HOST).iter().count();
    let (method, authority) = (req.method(), authority(req)?);
    if hosts > 1 || (hosts == 0 && req.version() == Version::HTTP_11) {
        return Err(Problem::BadHost);
    }
    // A trailing dot (RFC 1034, section 3.1) names the same host. A request without a host has an empty name.
    let host = authority.as_ref().map_or("", Authority::host);
    let host = host.strip_suffix('.').unwrap_or(host);
    let root = PathAndQuery::from_static("/");
    let path = req.uri().path_and_query().unwrap_or(&root);
    let path = segments(path).ok_or(Problem::BadPath)?;
    let route = routes
        .iter()
        .find(|route| route.is_match(method, host, &path));
    route.ok_or(Problem::NoRoute)
}

/// Returns the requested host with its port, if there is one.
fn authority(req: &Request<ReceivedBody>) -> Result<Option<Authority>, Problem> {
    match (req.uri().authority(), req.headers().get(header::HOST)) {
        (Some(authority), _) => Ok(Some(authority.clone())),
        (None, Some(host)) => {
            let authority = Authority::try_from(host.as_bytes()).map_err(|_| Problem::BadHost)?;
            if authority.as_str().contains('@') {
                return Err(Problem::BadHost);
            }
            Ok(Some(authority))
        }
        (None, None) => Ok(None),
    }
}

async fn call(service: &RouteService, req: Request<ReceivedBody>) -> Response<ResponseBody> {
    let res = match service {
        RouteService::Protected(service) => {
            let res = service.clone().call(req).await;
            res.map(|res| res.map(ResponseBody::from))
        }
        RouteService::Unprotected(service) => {
            let res = service.clone().call(req).await;
            res.map(|res| res.map(ResponseBody::from))
        }
    };
    res.unwrap_or_else(|orphan| orphan.0.map(ResponseBody::from))
}
