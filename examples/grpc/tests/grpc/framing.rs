//! Requests that are made to avoid the protection: other frames, methods and media types.

use http::{HeaderValue, Method, header::CONTENT_TYPE};
use tests::barrier::eventually;
use tower_idempotency::{FingerprintBy, GrpcMethods, IdempotencyLayer, MemoryStore};

use crate::harness::{PAY, Raw, Scripted, call, frame, layer, send_raw, start};

fn code(raw: Option<&Raw>) -> Option<i32> {
    raw.and_then(Raw::code)
}

const INVALID_ARGUMENT: Option<i32> = Some(3);
const UNAVAILABLE: Option<i32> = Some(14);

/// tonic executes a unary method with the first of several messages.
// F-885
#[tokio::test]
async fn body_other_than_one_message_executes_nothing() {
    let service = Scripted::paying();
    let (addr, _) = start(layer(), &service).await;
    let one = frame(0, b"\x10\x05");
    let cases: [(&str, Vec<u8>, Option<i32>); 8] = [
        (
            "second message",
            [&one[..], &one].concat(),
            INVALID_ARGUMENT,
        ),
        (
            "second empty message",
            [&one[..], &frame(0, b"")].concat(),
            INVALID_ARGUMENT,
        ),
        ("byte behind", [&one[..], b"\0"].concat(), INVALID_ARGUMENT),
        (
            "trailers behind",
            [&one[..], &frame(0x80, b"a: b\r\n")].concat(),
            INVALID_ARGUMENT,
        ),
        ("no message", Vec::new(), INVALID_ARGUMENT),
        ("unknown flag", frame(2, b"\x10\x05"), INVALID_ARGUMENT),
        ("truncated", one[..one.len() - 1].to_vec(), UNAVAILABLE),
        (
            "length that lies",
            b"\0\xff\xff\xff\xff\x10\x05".to_vec(),
            UNAVAILABLE,
        ),
    ];
    for (name, body, expected) in cases {
        for at in [0, 3, body.len()] {
            let at = at.min(body.len());
            let (first, rest) = body.split_at(at);
            let raw = send_raw(addr, call(PAY, "k"), &[first, rest]).await;
            assert_eq!(code(raw.as_ref()), expected, "{name} {at} {raw:?}");
        }
    }
    assert_eq!(service.effects.count(), 0);
    let raw = send_raw(addr, call(PAY, "k"), &[&one]).await;
    assert_eq!(code(raw.as_ref()), Some(0));
    assert_eq!(service.effects.count(), 1);
}

/// tonic executes whatever the media type is.
// F-881
#[tokio::test]
async fn media_type_does_not_avoid_protection() {
    for media_type in [
        "application/grpc",
        "Application/gRPC",
        "application/grpc; charset=utf-8",
        "application/grpc;x",
        " application/grpc+proto",
        "application/grpc+json",
        "application/grpcx",
        "application/json",
        "text/plain",
        "\u{e9}",
        "",
    ] {
        let service = Scripted::paying();
        let (addr, _) = start(layer(), &service).await;
        for _ in 0..2 {
            let mut head = call(PAY, "k");
            let value = HeaderValue::from_bytes(media_type.as_bytes()).expect("a value");
            head.headers_mut().insert(CONTENT_TYPE, value);
            let raw = send_raw(addr, head, &[&frame(0, b"")]).await;
            assert_eq!(code(raw.as_ref()), Some(0), "{media_type} {raw:?}");
        }
        assert_eq!(service.effects.count(), 1, "{media_type}");
    }
    let service = Scripted::paying();
    let (addr, _) = start(layer(), &service).await;
    for media_type in ["application/grpc-web", "Application/gRPC-Web-Text+proto"] {
        let mut head = call(PAY, "k");
        head.headers_mut()
            .insert(CONTENT_TYPE, HeaderValue::from_static(media_type));
        let raw = send_raw(addr, head, &[&frame(0, b"")]).await;
        assert_eq!(code(raw.as_ref()), INVALID_ARGUMENT, "{media_type}");
    }
    // The second line counts too.
    let mut head = call(PAY, "k");
    head.headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
    head.headers_mut()
        .append(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    let two = [frame(0, b""), frame(0, b"")].concat();
    let raw = send_raw(addr, head, &[&two]).await;
    assert_eq!(code(raw.as_ref()), INVALID_ARGUMENT);
    assert_eq!(service.effects.count(), 0);
}

/// tonic executes whatever the HTTP method is.
// F-886
#[tokio::test]
async fn http_method_does_not_avoid_protection() {
    let service = Scripted::paying();
    let (addr, _) = start(layer(), &service).await;
    for method in [Method::GET, Method::PUT, Method::OPTIONS, Method::DELETE] {
        for media_type in ["application/grpc", "text/plain"] {
            let mut head = call(PAY, "k");
            *head.method_mut() = method.clone();
            head.headers_mut()
                .insert(CONTENT_TYPE, HeaderValue::from_static(media_type));
            let raw = send_raw(addr, head, &[&frame(0, b"")]).await;
            assert_eq!(
                code(raw.as_ref()),
                INVALID_ARGUMENT,
                "{method} {media_type}"
            );
        }
    }
    assert_eq!(service.effects.count(), 0);
}

#[tokio::test]
async fn head_only_fingerprint_does_not_avoid_protection() {
    let service = Scripted::paying();
    let (addr, _) = start(
        layer().with_fingerprint(FingerprintBy::head_only()),
        &service,
    )
    .await;
    let two = [frame(0, b""), frame(0, b"")].concat();
    for (body, expected) in [(&two[..], INVALID_ARGUMENT), (&two[..4], UNAVAILABLE)] {
        let raw = send_raw(addr, call(PAY, "k"), &[body]).await;
        assert_eq!(code(raw.as_ref()), expected);
    }
    assert_eq!(service.effects.count(), 0);
}

#[tokio::test]
async fn key_sent_twice_executes_nothing() {
    let service = Scripted::paying();
    let (addr, _) = start(layer(), &service).await;
    let mut head = call(PAY, "k");
    head.headers_mut()
        .append("idempotency-key", HeaderValue::from_static("l"));
    let raw = send_raw(addr, head, &[&frame(0, b"")]).await;
    assert_eq!(
        (code(raw.as_ref()), service.effects.count()),
        (INVALID_ARGUMENT, 0)
    );
}

/// A client that leaves before its request ends has executed nothing, although its message is complete.
#[tokio::test]
async fn aborted_request_executes_nothing() {
    let service = Scripted::paying();
    let methods = GrpcMethods::all();
    let layer = IdempotencyLayer::new(MemoryStore::new()).with_grpc(methods);
    let (addr, _) = start(layer.clone(), &service).await;
    let stream = tokio::net::TcpStream::connect(addr)
        .await
        .expect("a server");
    let (client, connection) = h2::client::handshake(stream).await.expect("HTTP/2");
    let connection = tokio::spawn(connection);
    let mut client = client.ready().await.expect("a connection");
    let (_res, mut body) = client
        .send_request(call(PAY, "k"), false)
        .expect("a stream");
    let data = bytes::Bytes::from_static(b"\0\0\0\0\x02\x10\x05");
    body.send_data(data, false).expect("a stream");
    eventually("the request is in flight", || layer.in_flight() > 0).await;
    body.send_reset(h2::Reason::NO_ERROR);
    eventually("the request has ended", || layer.in_flight() == 0).await;
    connection.abort();
    assert_eq!(service.effects.count(), 0);
}
