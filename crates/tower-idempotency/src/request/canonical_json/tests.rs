use super::*;

pub(super) fn form(text: &str) -> Option<Vec<u8>> {
    canonical(text.as_bytes())
}

pub(super) fn same(a: &str, b: &str) {
    assert!(form(a).is_some(), "{a}");
    assert_eq!(form(a), form(b), "{a} {b}");
}

pub(super) fn differ(a: &str, b: &str) {
    assert!(form(a).is_some(), "{a}");
    assert!(form(b).is_some(), "{b}");
    assert_ne!(form(a), form(b), "{a} {b}");
}

#[test]
fn the_order_of_members_does_not_count() {
    same(r#"{"a":1,"b":2}"#, r#"{"b":2,"a":1}"#);
    same(
        r#"{"x":{"b":[{"d":1,"c":2}],"a":{}},"w":null}"#,
        r#"{"w":null,"x":{"a":{},"b":[{"c":2,"d":1}]}}"#,
    );
    same(r#"{"B":1,"a":2,"":3}"#, r#"{"":3,"a":2,"B":1}"#);
}

#[test]
fn white_space_does_not_count() {
    same(
        r#"{"a":[1,true,"x"],"b":{}}"#,
        " {\n\t\"a\" : [ 1 , true ,\r\n \"x\" ] , \"b\" : { } } ",
    );
    same("[]", " [ ] ");
    same("1", "\n1\t");
    differ(r#""a b""#, r#""a  b""#);
}

#[test]
fn the_spelling_of_strings_does_not_count() {
    same(r#"{"caf\u00e9":"a\/b"}"#, r#"{"café":"a/b"}"#);
    same(r#""\ud83d\ude00\n\u0022""#, r#""😀\n\"""#);
    same(r#"{"\u0061":1,"b":2}"#, r#"{"b":2,"a":1}"#);
    differ(r#""\u0041""#, r#""a""#);
    // One letter, and a letter with an accent after it: the same to a reader, not to a server.
    differ(r#""\u00e9""#, r#""e\u0301""#);
}

#[test]
fn the_spelling_of_numbers_counts() {
    differ("1", "1.0");
    differ("1e2", "100");
    differ("1e2", "1E2");
    differ("0", "-0");
    differ("1e999", "1e998");
    differ(
        "12345678901234567890123456789",
        "12345678901234567890123456780",
    );
}

#[test]
fn the_order_of_elements_counts() {
    differ("[1,2]", "[2,1]");
    differ(r#"[{"a":1},{"b":1}]"#, r#"[{"b":1},{"a":1}]"#);
}

#[test]
fn different_documents_never_share_a_form() {
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
            differ(a, b);
        }
    }
}

#[test]
fn the_form_is_these_bytes() {
    // It decides fingerprints that stores hold: a change of it is a change of every stored fingerprint.
    assert_eq!(
        form(r#"{"b":[1.0,"x",{}],"a":null,"c":{"t":true}}"#).as_deref(),
        Some(&b"{\"\x01an\"\x01b[#\x031.0\"\x01x{}]\"\x01c{\"\x01tt}}"[..])
    );
    let long = form(&format!("\"{}\"", "x".repeat(300))).expect("a form");
    assert_eq!(long[..4], *b"\"\xac\x02x");
    assert_eq!(long.len(), 303);
}

#[test]
fn what_is_not_json_has_no_form() {
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
    assert_eq!(canonical(b"\"\xff\""), None);
    assert_eq!(canonical(b"\"\xed\xa0\x80\""), None);
}

#[test]
fn members_given_twice_leave_no_form() {
    assert_eq!(form(r#"{"a":1,"a":1}"#), None);
    assert_eq!(form(r#"{"a":1,"b":2,"\u0061":3}"#), None);
    assert_eq!(form(r#"[{"x":{"a":1,"a":2}}]"#), None);
    assert!(form(r#"{"a":1,"b":{"a":1},"c":[{"a":1}]}"#).is_some());
}

#[test]
fn half_a_surrogate_pair_leaves_no_form() {
    for text in [
        r#""\ud800""#,
        r#"["\udc00x"]"#,
        r#"{"\ud800":1}"#,
        r#""\ud800\u0041""#,
    ] {
        assert_eq!(form(text), None, "{text}");
    }
}

#[test]
fn documents_over_the_limits_have_no_form() {
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

#[test]
fn memory_stays_within_a_multiple_of_the_document() {
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
        let times = allocated.bytes_max / u64::try_from(text.len()).expect("a length");
        assert!(times < 20, "{times}");
    }
}
