//! Tests of the canonical form on generated documents, valid and invalid ones.

use std::collections::BTreeMap;

use super::{
    tests::{assert_different, assert_same, canonical_form},
    *,
};
use crate::{
    fuzz::{corpus, inputs, random},
    random::Random,
};

/// Document that equals another one exactly if both must have the same form.
#[derive(Clone, PartialEq, Debug)]
enum Document {
    Scalar(Cow<'static, str>),
    Text(String),
    List(Vec<Document>),
    Object(BTreeMap<String, Document>),
}

fn random_text(random: &mut Random) -> String {
    const LETTERS: [char; 8] = ['a', 'b', '"', '\\', '\n', 'é', '😀', '1'];
    (0..random.below(4))
        .map(|_| *random.pick(&LETTERS))
        .collect()
}

impl Document {
    fn random(random: &mut Random, depth: usize) -> Self {
        let length = random.below(4);
        match random.below(if depth == 0 { 2 } else { 4 }) {
            0 => Self::Scalar(Cow::Borrowed(
                random.pick::<&str>(&["null", "true", "false", "0", "1", "1.0", "-1e2"]),
            )),
            1 => Self::Text(random_text(random)),
            2 => Self::List(
                (0..length)
                    .map(|_| Self::random(random, depth - 1))
                    .collect(),
            ),
            _ => Self::Object(
                (0..length)
                    .map(|_| (random_text(random), Self::random(random, depth - 1)))
                    .collect(),
            ),
        }
    }

    /// Replaces one randomly chosen value.
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
            _ => *self = Self::random(random, 1),
        }
    }

    /// Appends the document to `out` in a random spelling.
    fn write_spelling(&self, random: &mut Random, out: &mut String) {
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
                    element.write_spelling(random, out);
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
                    value.write_spelling(random, out);
                }
                space(random, out);
                out.push('}');
            }
        }
        space(random, out);
    }

    fn spelling(&self, random: &mut Random) -> String {
        let mut out = String::new();
        self.write_spelling(random, &mut out);
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

/// Parser of canonical forms.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn value(&mut self) -> Document {
        match self.byte() {
            b'n' => Document::Scalar(Cow::Borrowed("null")),
            b't' => Document::Scalar(Cow::Borrowed("true")),
            b'f' => Document::Scalar(Cow::Borrowed("false")),
            b'#' => Document::Scalar(Cow::Owned(self.text())),
            b'"' => Document::Text(self.text()),
            b'[' => {
                let mut list = Vec::new();
                while !self.skip_end(b']') {
                    list.push(self.value());
                }
                Document::List(list)
            }
            b'{' => {
                let mut members = BTreeMap::new();
                while !self.skip_end(b'}') {
                    assert_eq!(self.byte(), b'"', "a name");
                    let name = self.text();
                    let last = members.last_key_value();
                    assert!(last.is_none_or(|(last, _)| *last < name), "sorted names");
                    let value = self.value();
                    members.insert(name, value);
                }
                Document::Object(members)
            }
            other => panic!("no value begins with {other}"),
        }
    }

    fn text(&mut self) -> String {
        let (mut length, mut shift) = (0, 0);
        loop {
            let byte = self.byte();
            length |= usize::from(byte & 0x7f) << shift;
            shift += 7;
            if byte < 0x80 {
                break;
            }
        }
        let (text, rest) = self.0.split_at(length);
        self.0 = rest;
        String::from_utf8(text.to_vec()).expect("text")
    }

    fn byte(&mut self) -> u8 {
        let (byte, rest) = self.0.split_first().expect("more bytes");
        self.0 = rest;
        *byte
    }

    fn skip_end(&mut self, with: u8) -> bool {
        let is_end = self.0.first() == Some(&with);
        self.0 = &self.0[usize::from(is_end)..];
        is_end
    }
}

/// Returns `true` if the bytes have a form. Asserts that they are then JSON and that the form has the same content.
fn has_form(bytes: &[u8], random: &mut Random) -> bool {
    let Some(form) = canonical_form(bytes) else {
        return false;
    };
    let mut reader = Reader(&form);
    let document = reader.value();
    assert_eq!(reader.0, b"", "{bytes:?}");

    let spelling = document.spelling(random);
    assert_eq!(
        canonical_form(spelling.as_bytes()),
        Some(form),
        "{bytes:?} {spelling}"
    );
    // serde_json parses the same value from both, unless it rejects a number as too large.
    if let Ok(value) = serde_json::from_slice::<serde_json::Value>(bytes) {
        let parsed = serde_json::from_str::<serde_json::Value>(&spelling);
        assert_eq!(parsed.expect("JSON"), value, "{bytes:?} {spelling}");
    }
    true
}

// F-068
#[test]
fn only_equal_documents_have_same_form() {
    let (random, inputs) = (&mut random(6), inputs(20_000));
    let (mut equal, mut different) = (0, 0);
    for _ in 0..inputs {
        let document = Document::random(random, 4);
        let mut other = document.clone();
        if !random.once_in(3) {
            other.change(random);
        }
        let (a, b) = (document.spelling(random), other.spelling(random));
        if document == other {
            assert_same(&a, &b);
            equal += 1;
        } else {
            assert_different(&a, &b);
            different += 1;
        }
    }
    assert!(
        equal > inputs / 4 && different > inputs / 4,
        "{equal} {different}"
    );
}

#[test]
fn only_json_has_form() {
    let (random, inputs) = (&mut random(7), inputs(100_000));
    let corpus = corpus(include_str!("../../../tests/corpus/json.txt"));
    for document in &corpus {
        has_form(document, random);
    }
    let mut with_form = 0;
    for _ in 0..inputs {
        let mut text = if random.once_in(4) {
            random.pick(&corpus).clone()
        } else {
            Document::random(random, 3).spelling(random).into_bytes()
        };
        for _ in 0..=random.below(3) {
            random.mutate(&mut text);
        }
        with_form += usize::from(has_form(&text, random));
    }
    assert!(with_form > inputs / 100, "{with_form}");
}
