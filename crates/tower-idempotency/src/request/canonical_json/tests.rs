use super::*;

/// Returns the form with numbers by their spelling, and without pointers.
pub(super) fn canonical_form(bytes: &[u8]) -> Option<Vec<u8>> {
    super::canonical_form(bytes, &JsonFingerprint::new())
}

pub(super) fn form(text: &str) -> Option<Vec<u8>> {
    canonical_form(text.as_bytes())
}

pub(super) fn assert_same(a: &str, b: &str) {
    assert!(form(a).is_some(), "{a}");
    assert_eq!(form(a), form(b), "{a} {b}");
}

pub(super) fn assert_different(a: &str, b: &str) {
    assert!(form(a).is_some(), "{a}");
    assert!(form(b).is_some(), "{b}");
    assert_ne!(form(a), form(b), "{a} {b}");
}

#[test]
fn form_ignores_order_of_members() {
    assert_same(r#"{"a":1,"b":2}"#, r#"{"b":2,"a":1}"#);
    assert_same(
        r#"{"x":{"b":[{"d":1,"c":2}],"a":{}},"w":null}"#,
        r#"{"w":null,"x":{"a":{},"b":[{"c":2,"d":1}]}}"#,
    );
    assert_same(r#"{"B":1,"a":2,"":3}"#, r#"{"":3,"a":2,"B":1}"#);
}

#[test]
fn form_ignores_white_space() {
    assert_same(
        r#"{"a":[1,true,"x"],"b":{}}"#,
        " {\n\t\"a\" : [ 1 , true ,\r\n \"x\" ] , \"b\" : { } } ",
    );
    assert_same("[]", " [ ] ");
    assert_same("1", "\n1\t");
    assert_different(r#""a b""#, r#""a  b""#);
}

#[test]
fn form_ignores_escapes_in_strings() {
    assert_same(r#"{"caf\u00e9":"a\/b"}"#, r#"{"café":"a/b"}"#);
    assert_same(r#""\ud83d\ude00\n\u0022""#, r#""😀\n\"""#);
    assert_same(r#"{"\u0061":1,"b":2}"#, r#"{"b":2,"a":1}"#);
    assert_different(r#""\u0041""#, r#""a""#);
    // A precomposed letter, and a letter with a combining accent: they look equal, but a server may treat them differently.
    assert_different(r#""\u00e9""#, r#""e\u0301""#);
}

#[test]
fn form_preserves_spelling_of_numbers() {
    assert_different("1", "1.0");
    assert_different("1e2", "100");
    assert_different("1e2", "1E2");
    assert_different("0", "-0");
    assert_different("1e999", "1e998");
    assert_different(
        "12345678901234567890123456789",
        "12345678901234567890123456780",
    );
}

#[test]
fn form_preserves_order_of_elements() {
    assert_different("[1,2]", "[2,1]");
    assert_different(r#"[{"a":1},{"b":1}]"#, r#"[{"b":1},{"a":1}]"#);
}

#[test]
fn different_documents_have_different_forms() {
    let documents = [
        "null",
        "true",
        "false",
        "0",
        "1",
        "11",
        r#""""#,
        r#""1""#,
        r#""null""#,
        r#""\u0000""#,
        r#""[]""#,
        "[]",
        "[[]]",
        "[[],[]]",
        "[[[]]]",
        "[1]",
        "[11]",
        "[1,1]",
        "[1,[1]]",
        "[[1],1]",
        "[[1,1]]",
        r#"["1"]"#,
        r#"["1","1"]"#,
        r#"["1\",\"1"]"#,
        r#"["11"]"#,
        "{}",
        "[{}]",
        "[{},{}]",
        r#"{"":{}}"#,
        r#"{"a":1}"#,
        r#"["a",1]"#,
        r#"{"a":"1"}"#,
        r#"{"a":[1]}"#,
        r#"{"a":1,"b":1}"#,
        r#"{"a":{"b":1}}"#,
        r#"{"a":{"b":1},"c":1}"#,
        r#"{"a":{"b":1,"c":1}}"#,
        r#"{"ab":1}"#,
        r#"{"a":null}"#,
    ];
    for (n, a) in documents.iter().enumerate() {
        for b in &documents[..n] {
            assert_different(a, b);
        }
    }
}

#[test]
fn form_is_stable() {
    // Stores contain fingerprints of these bytes. A change of the form changes every stored fingerprint.
    assert_eq!(
        form(r#"{"b":[1.0,"x",{}],"a":null,"c":{"t":true}}"#).as_deref(),
        Some(&b"{\"\x01an\"\x01b[#\x031.0\"\x01x{}]\"\x01c{\"\x01tt}}"[..])
    );
    let long = form(&format!("\"{}\"", "x".repeat(300))).expect("a form");
    assert_eq!(long[..4], *b"\"\xac\x02x");
    assert_eq!(long.len(), 303);
}

#[test]
fn invalid_json_has_no_form() {
    for text in [
        "",
        " ",
        "{",
        "}",
        "[1,]",
        "[,1]",
        "{\"a\":1,}",
        "{\"a\"}",
        "{a:1}",
        "[1 2]",
        "01",
        "1.",
        ".5",
        "+1",
        "NaN",
        "nul",
        "truex",
        "'a'",
        "\"a",
        "\"\\x\"",
        "\"\n\"",
        "[] []",
        "1 1",
        "\u{feff}1",
        "// c\n1",
        "\"\\",
    ] {
        assert_eq!(form(text), None, "{text:?}");
    }
    assert_eq!(canonical_form(b"\"\xff\""), None);
    assert_eq!(canonical_form(b"\"\xed\xa0\x80\""), None);
}

// F-068
#[test]
fn duplicate_members_have_no_form() {
    assert_eq!(form(r#"{"a":1,"a":1}"#), None);
    assert_eq!(form(r#"{"a":1,"b":2,"\u0061":3}"#), None);
    assert_eq!(form(r#"[{"x":{"a":1,"a":2}}]"#), None);
    assert!(form(r#"{"a":1,"b":{"a":1},"c":[{"a":1}]}"#).is_some());
}

#[test]
fn half_surrogate_pair_has_no_form() {
    for text in [
        r#""\ud800""#,
        r#"["\udc00x"]"#,
        r#"{"\ud800":1}"#,
        r#""\ud800\u0041""#,
    ] {
        assert_eq!(form(text), None, "{text}");
    }
}

// F-068
#[test]
fn document_over_limits_has_no_form() {
    let nested = |depth: usize| format!("{}1{}", "[".repeat(depth), "]".repeat(depth));
    assert!(form(&nested(64)).is_some());
    assert_eq!(form(&nested(65)), None);
    let objects = |depth: usize| format!("{}1{}", r#"{"a":"#.repeat(depth), "}".repeat(depth));
    assert!(form(&objects(64)).is_some());
    assert_eq!(form(&objects(65)), None);
    assert_eq!(form(&nested(400_000)), None);
    assert_eq!(form(&"[".repeat(1 << 20)), None);

    let string = |length: usize| format!("\"{}\"", "x".repeat(length - 2));
    assert!(form(&string(1 << 20)).is_some());
    assert_eq!(form(&string((1 << 20) + 1)), None);
}

// F-068
#[test]
fn memory_is_bounded_by_document_size() {
    let members = (0..20_000)
        .map(|n| format!("\"{n:x}\":{{}}"))
        .collect::<Vec<_>>();
    let nested = format!(
        "{}{}{}",
        r#"{"b":"#.repeat(60),
        "1,".repeat(20_000),
        "}".repeat(60)
    );
    for text in [
        format!("{{{}}}", members.join(",")),
        format!("[{}1]", "{},".repeat(40_000)),
        format!("[{}1]", "1,".repeat(40_000)),
        nested.replace("1,", r#"{"":1},"#),
    ] {
        let allocated = allocation_counter::measure(|| drop(form(&text)));
        let factor = allocated.bytes_max / u64::try_from(text.len()).expect("a length");
        assert!(factor < 20, "{factor}");
    }
}
