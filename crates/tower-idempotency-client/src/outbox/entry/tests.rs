use http::header;

use super::*;

fn request() -> Request<Bytes> {
    Request::post("https://user:password@api.example.com/orders?x=1")
        .header("content-type", "text/plain")
        .header("x-tenant-id", HeaderValue::from_bytes(b"caf\xe9").unwrap())
        .header(header::AUTHORIZATION, "Bearer secret")
        .header(header::COOKIE, "session=secret")
        .body(Bytes::from_static(b"one \0 espresso"))
        .unwrap()
}

#[test]
fn encoded_entry_decodes_to_itself() {
    let operation = Operation::with_key("key \"7\"").unwrap();
    for operation in [
        operation.clone(),
        operation
            .with_first_sent(SystemTime::now())
            .with_provider(u64::MAX),
    ] {
        let mut entry = Entry::new(&operation, &request());
        assert_eq!(Entry::decode(&entry.encode()).unwrap(), entry);
        entry.set_key_header(&header::COOKIE, request().headers());
        let bytes = entry.encode();
        assert_eq!(Entry::decode(&bytes).unwrap(), entry);
        assert_eq!(entry.key(), operation.key());
        assert_eq!(entry.provider(), operation.provider());
    }
}

#[test]
fn entry_cut_in_its_head_is_damaged() {
    let bytes = Entry::new(&Operation::new(), &request()).encode();
    let head = bytes.len() - request().body().len();
    for length in 0..head {
        let error = Entry::decode(&bytes[..length]).unwrap_err();
        assert_eq!(error.to_string(), "an entry of the outbox is damaged");
    }
}

#[test]
fn entry_contains_no_credentials() {
    let entry = Entry::new(&Operation::new(), &request());
    let text = String::from_utf8_lossy(&entry.encode()).into_owned();
    assert!(
        !text.contains("secret") && !text.contains("password"),
        "{text}"
    );
    assert_eq!(entry.uri(), "https://api.example.com/orders?x=1");
    assert_eq!(entry.headers().len(), 2);
}

/// Each part of the URL is short enough, and the whole is not.
#[test]
fn entry_that_cannot_be_read_is_found() {
    let operation = Operation::new();
    for (length, is_readable) in [(65_500, true), (65_530, false)] {
        let mut parts = uri::Parts::default();
        parts.scheme = Some(uri::Scheme::HTTPS);
        parts.authority = Some("api.example.com".parse().unwrap());
        parts.path_and_query = Some(format!("/{}", "x".repeat(length)).parse().unwrap());
        let uri = Uri::from_parts(parts).unwrap();
        let req = Request::post(uri).body(Bytes::new()).unwrap();
        let entry = Entry::new(&operation, &req);
        assert_eq!(Entry::decode(&entry.encode()).is_ok(), is_readable);
        assert_eq!(entry.check().is_ok(), is_readable);
    }
    for req in [request(), Request::new(Bytes::new())] {
        Entry::new(&operation, &req).check().unwrap();
    }
}

/// Headers outside of the default list may be credentials.
#[test]
fn added_header_is_read_as_sensitive() {
    let names = [header::AUTHORIZATION, header::IF_RANGE];
    let entry = Entry::new(&Operation::new(), &request()).with_headers_of(&request(), names);
    assert_eq!(entry.headers().len(), 3);
    let entry = Entry::decode(&entry.encode()).unwrap();
    assert_eq!(entry.headers()["authorization"], "Bearer secret");
    for (name, value) in entry.headers() {
        assert_eq!(value.is_sensitive(), name == "authorization", "{name}");
    }
}

/// A server of this project compares these headers.
#[test]
fn default_headers_include_those_of_server() {
    let acting = tower_idempotency::ACTING_HEADERS;
    let selecting = "content-disposition content-range depth destination dropbox-api-arg \
        lock-token next-action overwrite slug soapaction upload-concat upload-length \
        upload-metadata upload-offset x-amz-copy-source x-amz-target x-goog-copy-source \
        x-goog-upload-command x-goog-upload-offset x-http-method x-http-method-override \
        x-method-override x-ms-copy-source x-ms-range x-ms-rename-source x-ms-source-range";
    let selecting = selecting.split(' ');
    for name in acting.iter().map(HeaderName::as_str).chain(selecting) {
        assert!(DEFAULT_HEADERS.contains(&name), "{name}");
    }
    assert!(DEFAULT_HEADERS.is_sorted());
}

#[test]
fn debug_output_hides_request() {
    let operation = Operation::with_key("secret-17").unwrap();
    let text = format!("{:?}", Entry::new(&operation, &request()));
    for hidden in ["secret", "orders", "espresso"] {
        assert!(!text.contains(hidden), "{text}");
    }
}
