//! What the tests on generated inputs share: how many there are, the same ones on every run, and what they begin with.
//!
//! A test of this kind lives in a module `fuzz` beside what it tests, and goes through its corpus first: inputs that are
//! worth trying every time, and every one that was ever found to go wrong. `scripts/fuzz` runs them all for longer.

use std::{env, str::FromStr};

use crate::random::Random;

/// How many inputs a test generates: what `FUZZ_INPUTS` says, or `default`.
pub(crate) fn inputs(default: usize) -> usize {
    setting("FUZZ_INPUTS").unwrap_or(default)
}

/// The numbers of the test that has this number itself: others with every `FUZZ_SEED`, which is 0 by default.
pub(crate) fn random(test: u64) -> Random {
    let seed: u64 = setting("FUZZ_SEED").unwrap_or(0);
    Random::new(seed.wrapping_mul(1 << 20).wrapping_add(test))
}

/// The inputs of a corpus: one a line, empty lines included, `\xNN` and what else Rust escapes in bytes; a line that begins
/// with `//` is for people.
pub(crate) fn corpus(text: &str) -> Vec<Vec<u8>> {
    let lines = text.lines().filter(|line| !line.starts_with("//"));
    lines.map(unescape).collect()
}

fn unescape(line: &str) -> Vec<u8> {
    let mut input = Vec::new();
    let mut rest = line.bytes();
    while let Some(byte) = rest.next() {
        input.push(match byte {
            b'\\' => match rest.next().expect("an escape is not the end of a line") {
                b'n' => b'\n',
                b'r' => b'\r',
                b't' => b'\t',
                b'\\' => b'\\',
                b'x' => {
                    let digits = [rest.next(), rest.next()].map(|digit| digit.expect("two digits"));
                    let digits = std::str::from_utf8(&digits).expect("digits");
                    u8::from_str_radix(digits, 16).expect("hexadecimal digits")
                }
                other => panic!("no escape begins with {:?}", char::from(other)),
            },
            byte => byte,
        });
    }
    input
}

fn setting<T: FromStr>(name: &str) -> Option<T> {
    let value = env::var(name).ok()?;
    let number = value.parse().ok();
    Some(number.unwrap_or_else(|| panic!("{name} is not a number")))
}

#[test]
fn a_corpus_says_what_its_inputs_are_byte_for_byte() {
    let text = "// for people\na\\\\b\n\n\\x00\\xff\\n\\t\n";
    let inputs = [&b"a\\b"[..], b"", b"\x00\xff\n\t"];
    assert_eq!(corpus(text), inputs);
}
