//! Documents, whole and broken, the same ones on every run.

use std::collections::BTreeMap;

use super::{
    tests::{differ, same},
    *,
};
use crate::{
    fuzz::{corpus, inputs, random},
    random::Random,
};

/// A document that knows which others are the same.
#[derive(Clone, PartialEq, Debug)]
enum Document {
    Scalar(Cow<'static, str>),
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
            0 => Self::Scalar(Cow::Borrowed(
                random.pick::<&str>(&["null", "true", "false", "0", "1", "1.0", "-1e2"]),
            )),
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

/// Reads a form back.
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
                while !self.ends(b']') {
                    list.push(self.value());
                }
                Document::List(list)
            }
            b'{' => {
                let mut members = BTreeMap::new();
                while !self.ends(b'}') {
                    assert_eq!(self.byte(), b'"', "a name");
                    let name = self.text();
                    let last = members.last_key_value();
                    assert!(last.is_none_or(|(last, _)| *last < name), "in order");
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
        let (byte, rest) = self.0.split_first().expect("a form that goes on");
        self.0 = rest;
        *byte
    }

    fn ends(&mut self, with: u8) -> bool {
        let ends = self.0.first() == Some(&with);
        self.0 = &self.0[usize::from(ends)..];
        ends
    }
}

/// Whether these bytes have a form. If they have, they are JSON, and the form says what they say and nothing else.
fn has_form(bytes: &[u8], random: &mut Random) -> bool {
    let Some(form) = canonical(bytes) else {
        return false;
    };
    let mut reader = Reader(&form);
    let document = reader.value();
    assert_eq!(reader.0, b"", "{bytes:?}");

    let again = document.spelled(random);
    assert_eq!(canonical(again.as_bytes()), Some(form), "{bytes:?} {again}");
    // Another parser reads the same in both, unless it finds a number too large.
    if let Ok(value) = serde_json::from_slice::<serde_json::Value>(bytes) {
        let spelled = serde_json::from_str::<serde_json::Value>(&again);
        assert_eq!(spelled.expect("JSON"), value, "{bytes:?} {again}");
    }
    true
}

#[test]
fn documents_have_the_same_form_exactly_when_they_are_the_same() {
    let (random, inputs) = (&mut random(6), inputs(20_000));
    let (mut equal, mut different) = (0, 0);
    for _ in 0..inputs {
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
    assert!(
        equal > inputs / 4 && different > inputs / 4,
        "{equal} {different}"
    );
}

#[test]
fn broken_documents_have_a_form_only_if_they_are_json() {
    let (random, inputs) = (&mut random(7), inputs(100_000));
    let corpus = corpus(include_str!("../../../tests/corpus/json.txt"));
    for document in &corpus {
        has_form(document, random);
    }
    let mut formed = 0;
    for _ in 0..inputs {
        let mut text = if random.once_in(4) {
            random.pick(&corpus).clone()
        } else {
            Document::any(random, 3).spelled(random).into_bytes()
        };
        for _ in 0..=random.below(3) {
            random.mutate(&mut text);
        }
        formed += usize::from(has_form(&text, random));
    }
    assert!(formed > inputs / 100, "{formed}");
}
