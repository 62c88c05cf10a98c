//! Tests of the key parser on generated header values. Most of them are nearly valid.

use super::{
    tests::{SYNTAXES, parse, rules},
    *,
};
use crate::{
    fuzz::{corpus, inputs, random},
    random::Random,
};

/// Generates a header value: sometimes a valid key, mostly a nearly valid one.
fn generate(random: &mut Random) -> Vec<u8> {
    const LETTERS: &[u8] = b"abcXYZ019-_.:~!*'(/%=";
    const SPECIAL: &[u8] = b"\"\"\\\\,;; \t\x00\x7f\x80\xff\n";
    let mut raw = Vec::new();
    let length = match random.below(64) {
        0 => random.below(1200),
        1 => 250 + random.below(12),
        _ => random.below(24),
    };
    let escape = random.once_in(3);
    for _ in 0..length {
        if escape && random.once_in(8) {
            raw.extend_from_slice(random.pick::<&[u8]>(&[b"\\\\", b"\\\""]));
        } else {
            raw.push(*random.pick(LETTERS));
        }
    }
    if random.once_in(2) {
        raw.insert(0, b'"');
        raw.push(b'"');
        if random.once_in(4) {
            raw.extend_from_slice(random.pick::<&[u8]>(&[
                b";v",
                b";v=1.5",
                b"; v=\"x\"",
                b";v=%\"f%c3%bc\"",
                b";v=:aGk=:",
                b";v=@17",
                b";V",
                b" ;v",
                b",",
            ]));
        }
    }
    match random.below(4) {
        0 => random.mutate(&mut raw),
        1 => {
            let at = random.below(raw.len() + 1);
            raw.insert(at, *random.pick(SPECIAL));
        }
        _ => {}
    }
    raw
}

/// Parses a value byte by byte, independently of the parser under test. Returns `None` if it is not a key.
fn reference_parse(syntax: KeySyntax, raw: &[u8]) -> Option<String> {
    let mut raw = raw;
    while let Some((b' ' | b'\t', rest)) = raw.split_first() {
        raw = rest;
    }
    while let Some((b' ' | b'\t', rest)) = raw.split_last() {
        raw = rest;
    }
    let quoted = raw.first() == Some(&b'"');
    let key = match syntax {
        KeySyntax::Strict if !quoted => return None,
        KeySyntax::Lenient | KeySyntax::Strict if quoted => {
            let mut key = Vec::new();
            let mut at = 1;
            loop {
                match *raw.get(at)? {
                    b'"' => break,
                    b'\\' => {
                        at += 1;
                        let escaped = *raw.get(at)?;
                        if !matches!(escaped, b'"' | b'\\') {
                            return None;
                        }
                        key.push(escaped);
                    }
                    byte @ 0x20..=0x7e => key.push(byte),
                    _ => return None,
                }
                at += 1;
            }
            key
        }
        KeySyntax::Lenient => {
            let is_excluded = |byte: &u8| matches!(byte, b'"' | b',' | b';' | b'\\');
            if raw.iter().any(is_excluded) || !raw.iter().all(u8::is_ascii_graphic) {
                return None;
            }
            raw.to_vec()
        }
        KeySyntax::Strict | KeySyntax::Verbatim => {
            if !raw.iter().all(u8::is_ascii_graphic) || raw == b"\"\"" {
                return None;
            }
            raw.to_vec()
        }
        KeySyntax::Unquoted => {
            let inner = match raw.len() {
                0 | 1 => raw,
                _ if quoted && raw.last() == Some(&b'"') => &raw[1..raw.len() - 1],
                _ => raw,
            };
            if !inner.iter().all(|byte| (0x20..=0x7e).contains(byte)) {
                return None;
            }
            inner.to_vec()
        }
    };
    let fits = (1..=255).contains(&key.len());
    fits.then(|| String::from_utf8(key).expect("ASCII"))
}

/// Returns `true` if anything follows a quoted string. These are parameters, which only the parser of structured fields can
/// validate.
fn has_suffix(raw: &[u8]) -> bool {
    let mut escaped = false;
    let mut quotes = 0;
    let end = raw.iter().position(|&byte| {
        quotes += u8::from(byte == b'"' && !escaped);
        escaped = byte == b'\\' && !escaped;
        quotes == 2
    });
    end.is_some_and(|end| {
        raw[end + 1..]
            .iter()
            .any(|byte| !matches!(byte, b' ' | b'\t'))
    })
}

/// Parses the value in each syntax and compares the results with those of [`reference_parse`]. Returns the syntaxes in which
/// the value is a key.
fn check_value(raw: &[u8], round_trip: bool) -> [bool; SYNTAXES.len()] {
    SYNTAXES.map(|syntax| {
        let mut result = Err(EMPTY_KEY);
        let allocated = allocation_counter::measure(|| result = rules(syntax).parse(raw));
        let max = 2 * u64::try_from(raw.len()).expect("a length") + 64 * 1024;
        assert!(allocated.bytes_max <= max, "{allocated:?}");

        let key = result.ok();
        let structured = matches!(syntax, KeySyntax::Lenient | KeySyntax::Strict);
        let expected = reference_parse(syntax, raw);
        let key_text = key.as_ref().map(IdempotencyKey::as_str);
        if structured && has_suffix(raw) {
            assert!(key_text.is_none() || key_text == expected.as_deref());
        } else {
            assert_eq!(key_text, expected.as_deref(), "{syntax:?} {raw:?}");
        }
        let Some(key) = key_text else { return false };
        if round_trip {
            // A key stays the same if it is written as a structured string.
            let quoted = format!("\"{}\"", key.replace('\\', r"\\").replace('"', "\\\""));
            for structured in [KeySyntax::Lenient, KeySyntax::Strict] {
                assert_eq!(parse(structured, &quoted).as_deref(), Ok(key));
            }
        }
        true
    })
}

// F-061
#[test]
fn parser_matches_reference_in_every_syntax() {
    for raw in corpus(include_str!("../../../tests/corpus/keys.txt")) {
        check_value(&raw, true);
    }
    let (random, inputs) = (&mut random(5), inputs(1_000_000));
    let mut keys = [0; SYNTAXES.len()];
    for _ in 0..inputs {
        let raw = generate(random);
        let results = check_value(&raw, random.once_in(8));
        for (keys, is_key) in keys.iter_mut().zip(results) {
            *keys += usize::from(is_key);
        }
    }
    assert!(keys.iter().all(|&keys| keys > inputs / 5), "{keys:?}");
}
