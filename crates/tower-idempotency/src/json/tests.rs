use std::collections::BTreeMap;

use super::*;
use crate::random::Random;

fn form(text: &str) -> Option<Vec<u8>> {
    canonical(text.as_bytes())
}

fn same(a: &str, b: &str) {
    assert!(form(a).is_some(), "{a}");
    assert_eq!(form(a), form(b), "{a} {b}");
}

fn differ(a: &str, b: &str) {
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

/// A document that knows which others are the same.
#[derive(Clone, PartialEq, Debug)]
enum Document {
    Scalar(&'static str),
    Text(String),
    List(Vec<Document>),
    Object(BTreeMap<String, Document>),
}

fn text(random: &mut Random) -> String {
    const LETTERS: [char; 8] = ['a', 'b', '"', '\\', '\n', 'é', '😀', '1'];
    (0..random.below(4))
        .map(|_| *random.pick(&LETTERS))
        .collect()
}

impl Document {
    fn any(random: &mut Random, depth: usize) -> Self {
        let length = random.below(4);
        match random.below(if depth == 0 { 2 } else { 4 }) {
            0 => Self::Scalar(
                random.pick::<&str>(&["null", "true", "false", "0", "1", "1.0", "-1e2"]),
            ),
            1 => Self::Text(text(random)),
            2 => Self::List((0..length).map(|_| Self::any(random, depth - 1)).collect()),
            _ => Self::Object(
                (0..length)
                    .map(|_| (text(random), Self::any(random, depth - 1)))
                    .collect(),
            ),
        }
    }

    /// Changes one thing somewhere.
    fn change(&mut self, random: &mut Random) {
        match self {
            Self::List(list) if !list.is_empty() && !random.once_in(4) => {
                let at = random.below(list.len());
                list[at].change(random);
            }
            Self::Object(members) if !members.is_empty() && !random.once_in(4) => {
                let at = random.below(members.len());
                if let Some(value) = members.values_mut().nth(at) {
                    value.change(random);
                }
            }
            _ => *self = Self::any(random, 1),
        }
    }

    /// Writes the document in one of its many spellings.
    fn spell(&self, random: &mut Random, out: &mut String) {
        let space = |random: &mut Random, out: &mut String| {
            out.push_str(random.pick::<&str>(&["", "", "", " ", "\n\t", "\r"]));
        };
        space(random, out);
        match self {
            Self::Scalar(spelled) => out.push_str(spelled),
            Self::Text(text) => spell_string(text, random, out),
            Self::List(list) => {
                out.push('[');
                for (n, element) in list.iter().enumerate() {
                    out.push_str(if n > 0 { "," } else { "" });
                    element.spell(random, out);
                }
                space(random, out);
                out.push(']');
            }
            Self::Object(members) => {
                let mut members: Vec<_> = members.iter().collect();
                for n in 0..members.len() {
                    let other = random.below(members.len());
                    members.swap(n, other);
                }
                out.push('{');
                for (n, (name, value)) in members.into_iter().enumerate() {
                    out.push_str(if n > 0 { "," } else { "" });
                    space(random, out);
                    spell_string(name, random, out);
                    space(random, out);
                    out.push(':');
                    value.spell(random, out);
                }
                space(random, out);
                out.push('}');
            }
        }
        space(random, out);
    }

    fn spelled(&self, random: &mut Random) -> String {
        let mut out = String::new();
        self.spell(random, &mut out);
        out
    }
}

fn spell_string(text: &str, random: &mut Random, out: &mut String) {
    out.push('"');
    for letter in text.chars() {
        match letter {
            '"' | '\\' if random.once_in(2) => out.extend(['\\', letter]),
            '\n' if random.once_in(2) => out.push_str("\\n"),
            _ if random.once_in(2) || letter < ' ' || "\"\\".contains(letter) => {
                for unit in letter.encode_utf16(&mut [0; 2]) {
                    out.push_str(&format!("\\u{unit:04x}"));
                }
            }
            _ => out.push(letter),
        }
    }
    out.push('"');
}

#[test]
fn documents_have_the_same_form_exactly_when_they_are_the_same() {
    let random = &mut Random::new(6);
    let (mut equal, mut different) = (0, 0);
    for _ in 0..20_000 {
        let document = Document::any(random, 4);
        let mut other = document.clone();
        if !random.once_in(3) {
            other.change(random);
        }
        let (a, b) = (document.spelled(random), other.spelled(random));
        if document == other {
            same(&a, &b);
            equal += 1;
        } else {
            differ(&a, &b);
            different += 1;
        }
    }
    assert!(equal > 5000 && different > 5000, "{equal} {different}");
}

#[test]
fn broken_documents_have_a_form_only_if_they_are_json() {
    let random = &mut Random::new(7);
    let mut formed = 0;
    for _ in 0..100_000 {
        let mut text = Document::any(random, 3).spelled(random).into_bytes();
        for _ in 0..=random.below(3) {
            random.mutate(&mut text);
        }
        let Some(form) = canonical(&text) else {
            continue;
        };
        formed += 1;
        let value: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
        // What another writer makes of it has the same form, where it spells numbers the same way.
        let spelled = serde_json::to_vec(&value).expect("JSON");
        if !text.iter().any(u8::is_ascii_digit) {
            assert_eq!(canonical(&spelled), Some(form));
        }
    }
    assert!(formed > 1000, "{formed}");
}
