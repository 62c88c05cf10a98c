use super::*;

pub(super) const SYNTAXES: [KeySyntax; 4] = [
    KeySyntax::Lenient,
    KeySyntax::Strict,
    KeySyntax::Verbatim,
    KeySyntax::Unquoted,
];

pub(super) fn rules(syntax: KeySyntax) -> KeyRules {
    KeyRules {
        syntax,
        min: 1,
        max: 255,
    }
}

pub(super) fn parse(syntax: KeySyntax, raw: &str) -> Result<String, KeyError> {
    let key = rules(syntax).parse(raw.as_bytes())?;
    Ok(key.as_str().to_owned())
}

/// Asserts the key that each syntax reads from a value, in the order of [`SYNTAXES`].
fn assert_keys(raw: &str, expected: [Option<&str>; 4]) {
    for (syntax, expected) in SYNTAXES.into_iter().zip(expected) {
        let result = parse(syntax, raw);
        match expected {
            Some(expected) => assert_eq!(result.as_deref(), Ok(expected), "{syntax:?} {raw}"),
            None => assert!(
                matches!(result, Err(KeyError::Malformed(_))),
                "{syntax:?} {raw} {result:?}"
            ),
        }
    }
}

#[test]
fn quotes_depend_on_syntax() {
    let bare = "8e03978e-40d5-43dd-bc93-6894a57f9324";
    assert_keys(bare, [Some(bare), None, Some(bare), Some(bare)]);
    assert_keys("abc", [Some("abc"), None, Some("abc"), Some("abc")]);
    assert_keys(
        "\"abc\"",
        [Some("abc"), Some("abc"), Some("\"abc\""), Some("abc")],
    );
    assert_keys(
        " \t\"abc\" \t",
        [Some("abc"), Some("abc"), Some("\"abc\""), Some("abc")],
    );
    assert_keys("\"abc", [None, None, Some("\"abc"), Some("\"abc")]);
    assert_keys("abc\"", [None, None, Some("abc\""), Some("abc\"")]);
    assert_keys("\"", [None, None, Some("\""), Some("\"")]);
    assert_keys("'abc'", [Some("'abc'"), None, Some("'abc'"), Some("'abc'")]);
}

#[test]
fn empty_key_is_rejected_if_range_allows_it() {
    for syntax in SYNTAXES {
        for raw in ["", "\"\"", "\"\";a=1", "\"\" ;a"] {
            let rules = KeyRules {
                min: 0,
                ..rules(syntax)
            };
            let result = rules.parse(raw.as_bytes());
            assert!(result.is_err() || result.is_ok_and(|key| !key.as_str().is_empty()));
        }
    }
}

#[test]
fn escapes_are_decoded_only_in_structured_strings() {
    assert_keys(
        r#""a\"b\\c""#,
        [
            Some(r#"a"b\c"#),
            Some(r#"a"b\c"#),
            Some(r#""a\"b\\c""#),
            Some(r#"a\"b\\c"#),
        ],
    );
    assert_keys(
        r#""\\""#,
        [Some(r"\"), Some(r"\"), Some(r#""\\""#), Some(r"\\")],
    );
    assert_keys(r#""a\x""#, [None, None, Some(r#""a\x""#), Some(r"a\x")]);
    assert_keys(r#""a\""#, [None, None, Some(r#""a\""#), Some(r"a\")]);
}

#[test]
fn parameters_are_validated_and_ignored() {
    for raw in [
        r#""abc";v=1"#,
        r#""abc";v;w="x""#,
        r#""abc"; v=?0"#,
        r#""abc";v=1;v=2"#,
    ] {
        assert_eq!(
            parse(KeySyntax::Lenient, raw).as_deref(),
            Ok("abc"),
            "{raw}"
        );
        assert_eq!(parse(KeySyntax::Strict, raw).as_deref(), Ok("abc"), "{raw}");
    }
    for raw in [
        r#""abc";"#,
        r#""abc" ;v=1"#,
        r#""abc";V=1"#,
        r#""abc";v="#,
        r#""abc";v=1,"#,
    ] {
        assert_keys(
            raw,
            [
                None,
                None,
                parse(KeySyntax::Verbatim, raw).ok().as_deref(),
                Some(raw),
            ],
        );
    }
}

#[test]
fn lists_and_other_structured_items_are_rejected() {
    assert_keys("\"a\", \"b\"", [None, None, None, Some("a\", \"b")]);
    assert_keys("a,b", [None, None, Some("a,b"), Some("a,b")]);
    assert_keys("a;b", [None, None, Some("a;b"), Some("a;b")]);
    assert_keys(r"a\b", [None, None, Some(r"a\b"), Some(r"a\b")]);
    for item in ["12", "1.5", "?1", ":aGk=:", "@1659578233", "*token"] {
        assert_keys(item, [Some(item), None, Some(item), Some(item)]);
    }
    assert_keys(
        "%\"f%c3%bc\"",
        [None, None, Some("%\"f%c3%bc\""), Some("%\"f%c3%bc\"")],
    );
    assert_keys("(\"a\")", [None, None, Some("(\"a\")"), Some("(\"a\")")]);
}

#[test]
fn key_contains_spaces_only_inside_quotes() {
    assert_keys("a b", [None, None, None, Some("a b")]);
    assert_keys("\"a b\"", [Some("a b"), Some("a b"), None, Some("a b")]);
    assert_keys("\" a\"", [Some(" a"), Some(" a"), None, Some(" a")]);
}

#[test]
fn empty_value_is_rejected_in_every_syntax() {
    for raw in ["", " ", "\t \t", "\"\"", " \"\" "] {
        assert_keys(raw, [None; 4]);
    }
}

#[test]
fn non_printable_bytes_are_rejected_in_every_syntax() {
    for byte in (0..0x20).chain(0x7f..=0xff) {
        for raw in [vec![b'a', byte, b'b'], vec![b'"', byte, b'"']] {
            for syntax in SYNTAXES {
                let result = rules(syntax).parse(&raw);
                assert!(
                    matches!(result, Err(KeyError::Malformed(_))),
                    "{syntax:?} {raw:?}"
                );
            }
        }
    }
}

#[test]
fn quoted_and_unquoted_values_are_one_key() {
    let rules = rules(KeySyntax::Lenient);
    assert_eq!(rules.parse(b"abc"), rules.parse(b"\"abc\""));
    assert_eq!(rules.parse(b"abc"), rules.parse(b"\"abc\";v=1"));
    assert_ne!(rules.parse(b"abc"), rules.parse(b"ABC"));
}

#[test]
fn length_counts_decoded_bytes() {
    let rules = KeyRules {
        syntax: KeySyntax::Lenient,
        min: 21,
        max: 255,
    };
    let too_short = |length| Err(KeyError::TooShort { length, min: 21 });
    let too_long = |length| Err(KeyError::TooLong { length, max: 255 });

    for (length, verdict) in [
        (20, too_short(20)),
        (21, Ok(())),
        (255, Ok(())),
        (256, too_long(256)),
    ] {
        let bare = "k".repeat(length);
        let quoted = format!("\"{bare}\"");
        let escaped = format!("\"{}\";v=1", "\\\"".repeat(length));
        for raw in [bare, quoted, escaped] {
            assert_eq!(rules.parse(raw.as_bytes()).map(drop), verdict, "{raw}");
        }
    }
}

#[test]
fn oversized_value_is_rejected_before_parsing() {
    let raw = vec![b'"'; 1 << 20];
    for syntax in SYNTAXES {
        assert_eq!(
            rules(syntax).parse(&raw),
            Err(KeyError::TooLong {
                length: 1 << 20,
                max: 255
            })
        );
    }
}

#[test]
fn length_can_be_unlimited() {
    let rules = KeyRules {
        syntax: KeySyntax::Unquoted,
        min: 1,
        max: usize::MAX,
    };
    assert!(rules.parse(&[b'k'; 100_000]).is_ok());
}

#[test]
fn application_keys_ignore_syntax() {
    let rules = KeyRules {
        syntax: KeySyntax::Strict,
        min: 2,
        max: 8,
    };
    for key in ["pay-1", "a,b;c\"", "ключ", " a "] {
        let result = rules.validate(key.to_owned()).expect("a key");
        assert_eq!(result.as_str(), key);
    }
    for key in ["", "a\nb", "a\u{85}b"] {
        let result = rules.validate(key.to_owned());
        assert!(matches!(result, Err(KeyError::Malformed(_))), "{key:?}");
    }
    // Each letter takes two bytes.
    assert_eq!(
        rules.validate("ключи".to_owned()),
        Err(KeyError::TooLong { length: 10, max: 8 })
    );
    assert_eq!(
        rules.validate("a".to_owned()),
        Err(KeyError::TooShort { length: 1, min: 2 })
    );
}

#[test]
fn debug_output_hides_key() {
    let key = rules(KeySyntax::Lenient).parse(b"secret").expect("a key");
    assert_eq!(format!("{key:?}"), "IdempotencyKey(..)");
    let error = rules(KeySyntax::Lenient).parse(b"sec,ret");
    assert!(!format!("{error:?}").contains("sec,ret"));
}

#[test]
fn key_is_send_and_sync() {
    fn check<T: Send + Sync + 'static>() {}
    check::<IdempotencyKey>();
}
