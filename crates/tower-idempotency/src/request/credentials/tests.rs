//! The lines and cookies that identify a caller.

use super::*;

type Lines = [(&'static str, &'static str)];

fn headers(lines: &Lines) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, line) in lines {
        let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
        headers.append(name, HeaderValue::from_static(line));
    }
    headers
}

fn digest<'a>(lines: impl IntoIterator<Item = &'a (&'static str, &'static str)>) -> [u8; 32] {
    let mut hash = FieldDigest::new(None);
    for (name, line) in lines {
        hash.field(b"header").field(name.as_bytes());
        hash.field(&[1]).field(line.as_bytes());
    }
    hash.finish()
}

#[test]
fn credentials_are_hashed_by_name() {
    // The lines of the request, and those that count.
    let cases: [(&Lines, &Lines); 7] = [
        (&[("host", "h")], &[]),
        (&[("authorization", " ")], &[]),
        (&[("X-API-Key", "k")], &[("x-api-key", "k")]),
        (
            &[("authorization", ""), ("x-api-key", "k")],
            &[("x-api-key", "k")],
        ),
        (
            &[("x-api-key", "k"), ("host", "h"), ("authorization", "a")],
            &[("authorization", "a"), ("x-api-key", "k")],
        ),
        (
            &[("authorization", "a"), ("api-key", "k")],
            &[("api-key", "k"), ("authorization", "a")],
        ),
        (
            &[
                ("x-c-token", "?"),
                ("c-api-token", "c"),
                ("apikey", ""),
                ("b-api-key", "b"),
            ],
            &[("b-api-key", "b"), ("c-api-token", "c")],
        ),
    ];
    for (sent, counted) in cases {
        let headers = headers(sent);
        let identity = match counted.len() {
            0 => Identity::Anonymous,
            1 => Identity::Principal,
            _ => Identity::OtherAccount,
        };
        let (mut all, mut first) = (FieldDigest::new(None), FieldDigest::new(None));
        let found = add_credentials(&headers, &mut all);
        assert!(found.is_ok_and(|found| found == identity), "{sent:?}");
        assert_eq!(all.finish(), digest(counted), "{sent:?}");
        let authorization = counted.iter().find(|(name, _)| *name == "authorization");
        let expected = authorization.or(counted.first());
        let is_found = add_first_credential(&headers, &mut first);
        assert_eq!(is_found, expected.is_some(), "{sent:?}");
        assert_eq!(first.finish(), digest(expected), "{sent:?}");
    }
}

#[test]
fn account_has_canonical_spelling() {
    // The line of the request, and the value of the account.
    for (sent, counted) in [
        ("Bearer Tok en", "Bearer Tok en"),
        ("bearer Tok", "Bearer Tok"),
        ("BEARER  \tTok ", "Bearer Tok"),
        (" Bearer\tTok", "Bearer Tok"),
        ("AWS4-HMAC-SHA256 a=B", "Aws4-hmac-sha256 a=B"),
        ("sk_Live", "sk_Live"),
        (" sk_Live ", "sk_Live"),
    ] {
        let headers = headers(&[("authorization", sent)]);
        let expected = match sent == counted {
            true => Identity::Principal,
            false => Identity::OtherAccount,
        };
        for purpose in [Purpose::Keys, Purpose::Shares] {
            let mut hash = FieldDigest::new(None);
            let name = header::AUTHORIZATION;
            let found = add_identifying_header(&headers, &name, purpose, &mut hash);
            assert!(found.is_ok_and(|found| found == expected), "{sent:?}");
            let value = match purpose {
                Purpose::Keys => sent,
                Purpose::Shares => counted,
            };
            assert_eq!(hash.finish(), digest(&[("authorization", value)]));
        }
        let (mut all, mut first) = (FieldDigest::new(None), FieldDigest::new(None));
        let found = add_credentials(&headers, &mut all);
        assert!(found.is_ok_and(|found| found == expected), "{sent:?}");
        assert!(add_first_credential(&headers, &mut first));
        assert_eq!(first.finish(), digest(&[("authorization", counted)]));
    }
    // An API key has no scheme.
    let headers = headers(&[("x-api-key", " a  B")]);
    let mut first = FieldDigest::new(None);
    assert!(add_first_credential(&headers, &mut first));
    assert_eq!(first.finish(), digest(&[("x-api-key", "a  B")]));
}

#[test]
fn second_line_of_credential_is_ambiguous() {
    let cases: [&Lines; 4] = [
        &[("x-api-key", "k"), ("host", "h"), ("x-api-key", "k")],
        &[("x-api-key", ""), ("x-api-key", "k")],
        &[("x-api-key", ""), ("x-api-key", "")],
        &[
            ("x-api-key", "k"),
            ("authorization", "a"),
            ("x-api-key", "j"),
        ],
    ];
    for lines in cases {
        let (headers, mut hash) = (headers(lines), FieldDigest::new(None));
        let found = add_credentials(&headers, &mut hash);
        assert!(
            matches!(found, Err(PrincipalError::Ambiguous(_))),
            "{lines:?}"
        );
        let name = HeaderName::from_static("x-api-key");
        let found = add_identifying_header(&headers, &name, Purpose::Keys, &mut hash);
        assert!(
            matches!(found, Err(PrincipalError::Ambiguous(_))),
            "{lines:?}"
        );
    }
}

#[test]
fn session_of_application_is_no_unrelated_cookie() {
    for application in [
        "ga",
        "gac",
        "gat",
        "gateway",
        "gatekeeper",
        "gcl",
        "hj",
        "hjalmar",
        "hp2",
        "pk",
        "vis_opt",
        "vwo",
    ] {
        for suffix in ["session", "key", "id"] {
            let name = format!("_{application}_{suffix}");
            assert!(!is_unrelated_cookie(name.as_bytes()), "{name}");
        }
    }
    for name in ["my_posthog", "_mixpanel", "_gat_", "_ga_", "_hjid_session"] {
        assert!(!is_unrelated_cookie(name.as_bytes()), "{name}");
    }
    for name in [
        "_ga_8K2XYZ",
        "_gat",
        "_gat_UA-1234-1",
        "_gat_gtag_UA_1234_1",
        "_gcl_au",
        "_hjSession_7",
        "_hjid",
        "_hp2_id.12",
        "_pk_id.1.1fff",
        "_pk_ses.1.1fff",
        "_vwo_uuid_v2",
        "mp_0a1b_mixpanel",
        "ph_phc_1a_posthog",
    ] {
        assert!(is_unrelated_cookie(name.as_bytes()), "{name}");
    }
}

const CERT: &str = "x-forwarded-client-cert";

/// Returns the digest of the credentials, and the kind of identity.
fn keys(headers: &HeaderMap) -> ([u8; 32], Identity) {
    let mut hash = FieldDigest::new(None);
    let Ok(identity) = add_credentials(headers, &mut hash) else {
        panic!("ambiguous: {headers:?}");
    };
    (hash.finish(), identity)
}

/// Returns the digest by which the limits account for the caller.
fn account(headers: &HeaderMap) -> [u8; 32] {
    let mut hash = FieldDigest::new(None);
    if add_first_credential(headers, &mut hash) {
        hash.finish()
    } else {
        keys(headers).0
    }
}

#[test]
fn forwarded_cert_counts_by_its_names() {
    let forwarded = |value: &'static str| {
        let headers = headers(&[(CERT, value)]);
        let (keys, identity) = keys(&headers);
        assert!(identity == Identity::Principal, "{value}");
        assert_eq!(keys, account(&headers), "{value}");
        keys
    };
    for (one, two) in [
        (
            r#"By=spiffe://a;Hash=1;Subject="";URI=spiffe://gw"#,
            "By=spiffe://b;Hash=2;URI=spiffe://gw",
        ),
        ("Hash=1;DNS=a;DNS=b", "hash=2; DNS=a ;DNS=b"),
        ("Hash=1;uri=a,By=b;Hash=2;URI=c", "uri=a,By=d;Hash=4;URI=c"),
        // Separators in quotes.
        (
            r#"Hash=1;Cert="a;b";Chain="d";Subject="CN=a, O=b;c""#,
            r#"Hash=2;Cert="f;g";Chain="i;j";Subject="CN=a, O=b;c""#,
        ),
        // An escaped quote ends no value.
        (
            r#"Subject="CN=\",O=b;c";Hash=1"#,
            r#"Subject="CN=\",O=b;c";Hash=2"#,
        ),
    ] {
        assert_eq!(forwarded(one), forwarded(two), "{one} {two}");
    }
    for (one, two) in [
        ("Hash=1;URI=a", "Hash=1;URI=b"),
        ("URI=a", "DNS=a"),
        ("URI=a,URI=b", "URI=a;URI=b"),
        ("URI=a,URI=b", "URI=b,URI=a"),
        ("URI=a;Serial=1", "URI=a;Serial=2"),
        (r#"Subject="CN=a""#, r#"Subject="CN=b""#),
        (r#"Subject="CN=a;URI=b""#, r#"Subject="CN=a";URI=b"#),
        // The client left a quote open, and the proxy appended the certificate.
        (
            r#"By=s;Hash=1;Subject="";URI=a"#,
            r#"URI=a;Hash=",By=s;Hash=2;Subject="";URI=b"#,
        ),
        ("By=s;Hash=1;URI=a", r#"URI=a;Hash=",By=s;Hash=2;URI=b"#),
        // The caller has a certificate without a name, and the gateway has one with a name.
        ("Hash=1,Hash=9;URI=gw", "Hash=2,Hash=9;URI=gw"),
    ] {
        assert_ne!(forwarded(one), forwarded(two), "{one} {two}");
    }
    // No certificate has a name.
    for value in [
        "MIIC/a==",
        "-----BEGIN%20CERTIFICATE-----%0AMIIC",
        "By=spiffe://a;Hash=1",
        r#"By=spiffe://a;Hash=1;Cert="a";Subject="";URI="#,
    ] {
        assert_eq!(forwarded(value), digest(&[(CERT, value)]), "{value}");
    }
}

/// All callers behind one gateway have the same certificate.
#[test]
fn forwarded_cert_is_last_account() {
    for value in ["By=a;Hash=1;URI=gw", "MIIC/a=="] {
        for other in [
            ("authorization", "a"),
            ("x-goog-api-key", "k"),
            ("cookie", "sid=a"),
            ("cookie", "sid=b"),
        ] {
            let (alone, both) = (headers(&[other]), headers(&[(CERT, value), other]));
            assert_eq!(account(&both), account(&alone), "{other:?}");
            let (digest, identity) = keys(&both);
            assert!(identity == Identity::OtherAccount, "{other:?}");
            assert_ne!(digest, keys(&alone).0, "{other:?}");
        }
        // The cookies count only if there is no other header, and cookies of analytics never count.
        for (others, cookie) in [(&[][..], "_ga=1"), (&[("x-api-key", "k")], "sid=a")] {
            let without = [&[(CERT, value)][..], others].concat();
            let with = [&without[..], &[("cookie", cookie)]].concat();
            let (without, with) = (headers(&without), headers(&with));
            assert_eq!(keys(&with).0, keys(&without).0, "{cookie}");
            assert_eq!(account(&with), account(&without), "{cookie}");
        }
    }
}
