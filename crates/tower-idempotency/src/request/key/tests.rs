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

pub(super) fn parsed(syntax: KeySyntax, raw: &str) -> Result<String, KeyError> {
    let key = rules(syntax).parse(raw.as_bytes())?;
    Ok(key.as_str().to_owned())
}

/// What each syntax, in the order of [`SYNTAXES`], makes of a value.
fn reads(raw: &str, expected: [Option<&str>; 4]) {
    for (syntax, expected) in SYNTAXES.into_iter().zip(expected) {
        let found = parsed(syntax, raw);
        match expected {
            Some(expected) => assert_eq!(found.as_deref(), Ok(expected), "{syntax:?} {raw}"),
            None => assert!(
                matches!(found, Err(KeyError::Malformed(_))),
                "{syntax:?} {raw} {found:?}"
            ),
        }
    }
}

#[test]
fn each_syntax_reads_quotes_its_own_way() {
    let bare = "8e03978e-40d5-43dd-bc93-6894a57f9324";
    reads(bare, [Some(bare), None, Some(bare), Some(bare)]);
    reads("abc", [Some("abc"), None, Some("abc"), Some("abc")]);
    reads(
        "\"abc\"",
        [Some("abc"), Some("abc"), Some("\"abc\""), Some("abc")],
    );
    reads(
        " \t\"abc\" \t",
        [Some("abc"), Some("abc"), Some("\"abc\""), Some("abc")],
    );
    reads("\"abc", [None, None, Some("\"abc"), Some("\"abc")]);
    reads("abc\"", [None, None, Some("abc\""), Some("abc\"")]);
    reads("\"", [None, None, Some("\""), Some("\"")]);
    reads("'abc'", [Some("'abc'"), None, Some("'abc'"), Some("'abc'")]);
}

#[test]
fn an_empty_key_is_refused_whatever_the_range_says() {
    for syntax in SYNTAXES {
        for raw in ["", "\"\"", "\"\";a=1", "\"\" ;a"] {
            let rules = KeyRules {
                min: 0,
                ..rules(syntax)
            };
            let found = rules.parse(raw.as_bytes());
            assert!(found.is_err() || found.is_ok_and(|key| !key.as_str().is_empty()));
        }
    }
}

#[test]
fn escapes_are_decoded_only_where_the_value_is_a_structured_string() {
    reads(
        r#""a\"b\\c""#,
        [
            Some(r#"a"b\c"#),
            Some(r#"a"b\c"#),
            Some(r#""a\"b\\c""#),
            Some(r#"a\"b\\c"#),
        ],
    );
    reads(
        r#""\\""#,
        [Some(r"\"), Some(r"\"), Some(r#""\\""#), Some(r"\\")],
    );
    reads(r#""a\x""#, [None, None, Some(r#""a\x""#), Some(r"a\x")]);
    reads(r#""a\""#, [None, None, Some(r#""a\""#), Some(r"a\")]);
}

#[test]
fn parameters_are_checked_and_ignored_where_the_value_is_a_structured_string() {
    for raw in [
        r#""abc";v=1"#,
        r#""abc";v;w="x""#,
        r#""abc"; v=?0"#,
        r#""abc";v=1;v=2"#,
    ] {
        assert_eq!(
            parsed(KeySyntax::Lenient, raw).as_deref(),
            Ok("abc"),
            "{raw}"
        );
        assert_eq!(
            parsed(KeySyntax::Strict, raw).as_deref(),
            Ok("abc"),
            "{raw}"
        );
    }
    for raw in [
        r#""abc";"#,
        r#""abc" ;v=1"#,
        r#""abc";V=1"#,
        r#""abc";v="#,
        r#""abc";v=1,"#,
    ] {
        reads(
            raw,
            [
                None,
                None,
                parsed(KeySyntax::Verbatim, raw).ok().as_deref(),
                Some(raw),
            ],
        );
    }
}

#[test]
fn lists_and_other_structured_items_are_refused() {
    reads("\"a\", \"b\"", [None, None, None, Some("a\", \"b")]);
    reads("a,b", [None, None, Some("a,b"), Some("a,b")]);
    reads("a;b", [None, None, Some("a;b"), Some("a;b")]);
    reads(r"a\b", [None, None, Some(r"a\b"), Some(r"a\b")]);
    for item in ["12", "1.5", "?1", ":aGk=:", "@1659578233", "*token"] {
        reads(item, [Some(item), None, Some(item), Some(item)]);
    }
    reads(
        "%\"f%c3%bc\"",
        [None, None, Some("%\"f%c3%bc\""), Some("%\"f%c3%bc\"")],
    );
    reads("(\"a\")", [None, None, Some("(\"a\")"), Some("(\"a\")")]);
}

#[test]
fn spaces_belong_to_a_key_only_inside_quotes() {
    reads("a b", [None, None, None, Some("a b")]);
    reads("\"a b\"", [Some("a b"), Some("a b"), None, Some("a b")]);
    reads("\" a\"", [Some(" a"), Some(" a"), None, Some(" a")]);
}

#[test]
fn nothing_is_a_key_in_no_syntax() {
    for raw in ["", " ", "\t \t", "\"\"", " \"\" "] {
        reads(raw, [None; 4]);
    }
}

#[test]
fn control_characters_and_other_alphabets_are_refused_in_every_syntax() {
    for byte in (0..0x20).chain(0x7f..=0xff) {
        for raw in [vec![b'a', byte, b'b'], vec![b'"', byte, b'"']] {
            for syntax in SYNTAXES {
                let found = rules(syntax).parse(&raw);
                assert!(
                    matches!(found, Err(KeyError::Malformed(_))),
                    "{syntax:?} {raw:?}"
                );
            }
        }
    }
}

#[test]
fn quoted_and_unquoted_forms_are_the_same_key() {
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
    let too_short = |found| Err(KeyError::TooShort { found, limit: 21 });
    let too_long = |found| Err(KeyError::TooLong { found, limit: 255 });

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
fn absurdly_long_values_are_refused_before_they_are_parsed() {
    let raw = vec![b'"'; 1 << 20];
    for syntax in SYNTAXES {
        assert_eq!(
            rules(syntax).parse(&raw),
            Err(KeyError::TooLong {
                found: 1 << 20,
                limit: 255
            })
        );
    }
}

#[test]
fn unlimited_keys_are_possible() {
    let rules = KeyRules {
        syntax: KeySyntax::Unquoted,
        min: 1,
        max: usize::MAX,
    };
    assert!(rules.parse(&[b'k'; 100_000]).is_ok());
}

#[test]
fn keys_the_application_made_are_taken_as_they_are() {
    let rules = KeyRules {
        syntax: KeySyntax::Strict,
        min: 2,
        max: 8,
    };
    for key in ["pay-1", "a,b;c\"", "ключ", " a "] {
        let found = rules.check(key.to_owned()).expect("a key");
        assert_eq!(found.as_str(), key);
    }
    for key in ["", "a\nb", "a\u{85}b"] {
        let found = rules.check(key.to_owned());
        assert!(matches!(found, Err(KeyError::Malformed(_))), "{key:?}");
    }
    // Four letters, eight bytes; five letters, ten.
    assert_eq!(
        rules.check("ключи".to_owned()),
        Err(KeyError::TooLong {
            found: 10,
            limit: 8
        })
    );
    assert_eq!(
        rules.check("a".to_owned()),
        Err(KeyError::TooShort { found: 1, limit: 2 })
    );
}

#[test]
fn debug_output_does_not_show_the_key() {
    let key = rules(KeySyntax::Lenient).parse(b"secret").expect("a key");
    assert_eq!(format!("{key:?}"), "IdempotencyKey(..)");
    let refused = rules(KeySyntax::Lenient).parse(b"sec,ret");
    assert!(!format!("{refused:?}").contains("sec,ret"));
}

#[test]
fn keys_are_send_and_sync() {
    fn check<T: Send + Sync + 'static>() {}
    check::<IdempotencyKey>();
}
