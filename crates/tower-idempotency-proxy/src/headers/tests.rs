//! The fields of forwarded messages.

use http::Request;

use super::*;

fn rewritten(forwarded: Forwarded, lines: &[(&str, &str)]) -> HeaderMap {
    rewritten_with(forwarded, lines, &[])
}

fn rewritten_with(forwarded: Forwarded, lines: &[(&str, &str)], kept: &[HeaderName]) -> HeaderMap {
    let mut req = Request::post("/");
    for (name, value) in lines {
        req = req.header(*name, *value);
    }
    let (mut head, ()) = req.body(()).unwrap().into_parts();
    let client = ClientConnection {
        address: &HeaderValue::from_static("192.0.2.7"),
        is_tls: true,
        forwarded,
    };
    let upstream = HeaderValue::from_static("up:3000");
    for_upstream(&mut head, &client, HostHeader::Client, &upstream, kept);
    head.headers
}

#[test]
fn fields_of_one_connection_are_removed() {
    let headers = rewritten(
        Forwarded::Replace,
        &[
            (
                "connection",
                "keep-alive, X-Hop, authorization, content-length",
            ),
            ("connection", "close"),
            ("keep-alive", "5"),
            ("proxy-connection", "keep-alive"),
            ("proxy-authorization", "Basic eA=="),
            ("te", "gzip;q=0.5, trailers"),
            ("trailer", "x-sum"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "h2c"),
            ("http2-settings", "AAA"),
            ("x-hop", "1"),
            ("authorization", "Bearer a"),
            ("content-length", "3"),
            ("x-end", "1"),
        ],
    );
    let mut names: Vec<_> = headers.keys().map(HeaderName::as_str).collect();
    names.sort_unstable();
    let expected = [
        "authorization",
        "content-length",
        "host",
        "te",
        "trailer",
        "via",
        "x-end",
        "x-forwarded-for",
        "x-forwarded-proto",
    ];
    assert_eq!(names, expected);
    assert_eq!(headers[header::TE], "trailers");
}

#[test]
fn forwards_of_options_and_trace_are_counted() {
    let last = u64::MAX.to_string();
    let before_last = (u64::MAX - 1).to_string();
    for (method, line, expected) in [
        (Method::OPTIONS, "0", None),
        (Method::TRACE, "0", None),
        (Method::OPTIONS, "1", Some("0")),
        (Method::TRACE, "10", Some("9")),
        (Method::TRACE, &*last, Some(&*before_last)),
        (Method::TRACE, "some", Some("some")),
        (Method::POST, "0", Some("0")),
    ] {
        let req = Request::builder().method(&method);
        let mut req = req.header("max-forwards", line).body(()).unwrap();
        assert_eq!(
            count_forward(&mut req),
            expected.is_some(),
            "{method} {line}"
        );
        if let Some(expected) = expected {
            assert_eq!(
                req.headers()[header::MAX_FORWARDS],
                expected,
                "{method} {line}"
            );
        }
    }
    assert!(count_forward(&mut Request::options("/").body(()).unwrap()));
}

#[test]
fn forged_addresses_do_not_reach_upstream() {
    let forged = [
        ("x-forwarded-for", "198.51.100.1"),
        ("x-forwarded-proto", "http"),
        ("forwarded", "for=198.51.100.1"),
        ("x-real-ip", "198.51.100.1"),
        ("x-client-ip", "198.51.100.1"),
        ("true-client-ip", "198.51.100.1"),
        ("x-forwarded-ssl", "off"),
        ("x-forwarded-scheme", "http"),
        ("x-forwarded-protocol", "http"),
    ];
    let headers = rewritten(Forwarded::Replace, &forged);
    assert_eq!(
        headers.get_all(X_FORWARDED_FOR).iter().collect::<Vec<_>>(),
        ["192.0.2.7"]
    );
    assert_eq!(headers[X_FORWARDED_PROTO], "https");
    let mut names: Vec<_> = headers.keys().map(HeaderName::as_str).collect();
    names.sort_unstable();
    let own = ["host", "via", "x-forwarded-for", "x-forwarded-proto"];
    assert_eq!(names, own);

    let headers = rewritten(Forwarded::Append, &forged);
    let addresses: Vec<_> = headers.get_all(X_FORWARDED_FOR).iter().collect();
    assert_eq!(addresses, ["198.51.100.1", "192.0.2.7"]);
    assert_eq!(headers[X_FORWARDED_PROTO], "http");

    let headers = rewritten(Forwarded::Pass, &forged);
    assert_eq!(headers[header::FORWARDED], "for=198.51.100.1");
}

/// CGI reads `_` and `-` in names as the same character.
#[test]
fn other_spellings_do_not_reach_upstream() {
    let (user, key) = (
        HeaderName::from_static("x_user-id"),
        HeaderName::from_static("idempotency-key"),
    );
    let lines = [
        ("x_forwarded_for", "198.51.100.1"),
        ("x-forwarded_for", "198.51.100.1"),
        ("true_client_ip", "198.51.100.1"),
        ("idempotency_key", "other"),
        ("x-user-id", "8"),
        ("x_user_id", "9"),
        // The name in the configuration, and a name that is none of these.
        ("x_user-id", "7"),
        ("api_key", "a"),
    ];
    for forwarded in [Forwarded::Replace, Forwarded::Append, Forwarded::Pass] {
        let headers = rewritten_with(forwarded, &lines, &[user.clone(), key.clone()]);
        let mut names: Vec<_> = headers.keys().map(HeaderName::as_str).collect();
        names.retain(|name| !["host", "via"].contains(name));
        names.retain(|name| !name.starts_with("x-forwarded-"));
        names.sort_unstable();
        assert_eq!(names, ["api_key", "x_user-id"], "{forwarded:?}");
    }
}

/// The `_` is in the configuration alone.
#[test]
fn other_spelling_of_configured_name_is_removed() {
    let user = HeaderName::from_static("x_user_id");
    let headers = rewritten_with(Forwarded::Pass, &[("x-user-id", "8")], &[user]);
    assert!(!headers.contains_key("x-user-id"), "{headers:?}");
}

#[test]
fn trailers_replace_no_headers() {
    let mut trailers = HeaderMap::new();
    for name in [
        "x-user-id",
        "x_user_id",
        "idempotency-key",
        "x-forwarded-for",
        "x_forwarded_for",
        "forwarded",
        "authorization",
        "x-api-key",
        "cookie",
        "host",
        "stripe-account",
        "x_tenant_id",
        "connection",
        "transfer-encoding",
        "content-length",
        "x-sum",
        "x-page-token",
        "grpc-status",
    ] {
        let name = HeaderName::from_static(name);
        trailers.insert(name, HeaderValue::from_static("1"));
    }
    let kept = ["x-user-id", "idempotency-key"].map(HeaderName::from_static);
    remove_trailers(&mut trailers, Some(&kept));
    let mut names: Vec<_> = trailers.keys().map(HeaderName::as_str).collect();
    names.sort_unstable();
    assert_eq!(names, ["grpc-status", "x-page-token", "x-sum"]);
}

#[test]
fn trailers_of_response_keep_application_fields() {
    let mut trailers = HeaderMap::new();
    for name in [
        "connection",
        "content-length",
        "te",
        "x-access-token",
        "set-cookie",
        "content-digest",
    ] {
        let name = HeaderName::from_static(name);
        trailers.insert(name, HeaderValue::from_static("1"));
    }
    remove_trailers(&mut trailers, None);
    let mut names: Vec<_> = trailers.keys().map(HeaderName::as_str).collect();
    names.sort_unstable();
    assert_eq!(names, ["content-digest", "set-cookie", "x-access-token"]);
}

#[test]
fn response_has_one_length() {
    for (status, lines, expected) in [
        (201, &["2"][..], &["2"][..]),
        (201, &["2", "2"], &["2"]),
        (201, &["2, 2"], &["2"]),
        (201, &[], &[]),
        (204, &["5"], &[]),
        (304, &["5"], &["5"]),
    ] {
        let mut headers = HeaderMap::new();
        for line in lines {
            let line = HeaderValue::from_static(line);
            headers.append(header::CONTENT_LENGTH, line);
        }
        correct_length(StatusCode::from_u16(status).unwrap(), &mut headers);
        let found: Vec<_> = headers.get_all(header::CONTENT_LENGTH).iter().collect();
        assert_eq!(found, expected, "{status} {lines:?}");
    }
}

#[test]
fn cookie_lines_are_joined() {
    let headers = rewritten(Forwarded::Pass, &[("cookie", "a=1"), ("cookie", "b=2")]);
    assert_eq!(
        headers.get_all(header::COOKIE).iter().collect::<Vec<_>>(),
        ["a=1; b=2"]
    );
}
