//! Helpers of the tests on generated inputs: the number of inputs, their seed, and the corpus.
//!
//! The inputs are the same on every run. Such a test is in a module `fuzz` below the module that it tests. It runs its
//! corpus first: interesting inputs, and all inputs that ever failed. `scripts/fuzz` runs these tests with more inputs.

use std::{env, str::FromStr};

use crate::random::Random;

/// Returns the number of inputs that a test generates: `FUZZ_INPUTS`, or `default` if that is not set.
pub(crate) fn inputs(default: usize) -> usize {
    setting("FUZZ_INPUTS").unwrap_or(default)
}

/// Returns the generator of the test with the number `test`, seeded by `FUZZ_SEED` (default: 0).
pub(crate) fn random(test: u64) -> Random {
    let seed: u64 = setting("FUZZ_SEED").unwrap_or(0);
    Random::new(seed.wrapping_mul(1 << 20).wrapping_add(test))
}

/// Returns the inputs of a corpus: one for each line, including empty lines.
///
/// `\xNN` and the other escapes of Rust byte strings are decoded. Lines that begin with `//` are comments.
pub(crate) fn corpus(text: &str) -> Vec<Vec<u8>> {
    let lines = text.lines().filter(|line| !line.starts_with("//"));
    lines.map(unescape).collect()
}

fn unescape(line: &str) -> Vec<u8> {
    let mut input = Vec::new();
    let mut rest = line.bytes();
    while let Some(byte) = rest.next() {
        input.push(match byte {
            b'\\' => match rest.next().expect("a character after the backslash") {
                b'n' => b'\n',
                b'r' => b'\r',
                b't' => b'\t',
                b'\\' => b'\\',
                b'x' => {
                    let digits = [rest.next(), rest.next()].map(|digit| digit.expect("two digits"));
                    let digits = std::str::from_utf8(&digits).expect("digits");
                    u8::from_str_radix(digits, 16).expect("hexadecimal digits")
                }
                other => panic!("unknown escape {:?}", char::from(other)),
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
fn corpus_decodes_escapes_and_skips_comments() {
    let text = "// comment\na\\\\b\n\n\\x00\\xff\\n\\t\n";
    let inputs = [&b"a\\b"[..], b"", b"\x00\xff\n\t"];
    assert_eq!(corpus(text), inputs);
}
