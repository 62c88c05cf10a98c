//! Tests of the control headers on generated responses: valid and nearly valid values, repeated lines, other headers.

use http::{HeaderName, HeaderValue, Response};

use super::*;
use crate::{
    fuzz::{corpus, inputs, random},
    random::Random,
};

const DEFAULT: Ttl = Ttl::from_secs(100);

const NAMES: [&str; 8] = [
    "x-idempo-policy",
    "X-Idempo-Policy",
    "x-idempo-persist-for-seconds",
    "X-IDEMPO-PERSIST-FOR-SECONDS",
    "x-idempo-persist-for-second",
    "x-idempo-",
    "x-idempo-policy-",
    "etag",
];

fn is_control(name: &str) -> bool {
    ["x-idempo-policy", "x-idempo-persist-for-seconds"].contains(&name)
}

/// Returns the directive of all policies and of the first duration, by a second implementation.
fn reference_directive(policies: &[&[u8]], persist_for: Option<&[u8]>, max: Ttl) -> Directive {
    let text = |value: &[u8]| String::from_utf8_lossy(value).into_owned();
    let blank = [' ', '\t'];
    let is_no_store = |value: &&[u8]| text(value).trim_matches(blank).to_lowercase() == "no-store";
    if policies.iter().any(is_no_store) {
        return Directive::NoStore;
    }
    let value = persist_for.map(text).unwrap_or_default();
    let digits = value.trim_matches(blank);
    if digits.is_empty() || digits.chars().any(|digit| !digit.is_ascii_digit()) {
        return Directive::Record(DEFAULT);
    }
    let max_seconds = max.as_millis() / 1000;
    let mut seconds = 0;
    for digit in digits.bytes() {
        seconds = (seconds * 10 + u64::from(digit - b'0')).min(max_seconds);
    }
    match seconds {
        0 => Directive::Record(DEFAULT),
        _ => Directive::Record(Ttl::from_secs(seconds).min(max)),
    }
}

fn check(lines: &[(HeaderName, HeaderValue)], typed: Option<Retention>, max: Ttl) -> Directive {
    let (mut head, ()) = Response::new(()).into_parts();
    for (name, value) in lines {
        head.headers.append(name, value.clone());
    }
    if let Some(retention) = typed {
        head.extensions.insert(retention);
    }
    let mut stripped = head.headers.clone();
    let directive = take_directive(&LayerName::default(), &mut head, DEFAULT, max);

    // Only the control headers are removed.
    let remaining = lines.iter().filter(|(name, _)| !is_control(name.as_str()));
    let mut others = HeaderMap::new();
    for (name, value) in remaining {
        others.append(name, value.clone());
    }
    assert_eq!(head.headers, others, "{lines:?}");
    strip_control_headers(&mut stripped);
    assert_eq!(stripped, others, "{lines:?}");
    assert!(head.extensions.get::<Retention>().is_none());
    directive
}

#[test]
fn control_headers_match_reference_and_are_removed() {
    let corpus = corpus(include_str!("../../../tests/corpus/control.txt"));
    let (random, inputs) = (&mut random(8), inputs(200_000));
    let (mut recorded, mut opted_out) = (0, 0);
    for n in 0..inputs {
        let max = Ttl::from_secs(*random.pick(&[1, 100, 5000, 100 * 365 * 24 * 60 * 60]));
        let mut lines = Vec::new();
        for _ in 0..1 + random.below(4) {
            let mut value = match corpus.get(n) {
                Some(value) => value.clone(),
                None => generate(&corpus, random),
            };
            value.retain(|byte| *byte == b'\t' || (*byte >= 0x20 && *byte != 0x7f));
            let name = HeaderName::from_bytes(random.pick(&NAMES).as_bytes()).expect("a name");
            let value = HeaderValue::from_bytes(&value).expect("a value");
            lines.push((name, value));
        }
        let values = |of: &str| -> Vec<_> {
            let lines = lines.iter().filter(|(name, _)| name.as_str() == of);
            lines.map(|(_, value)| value.as_bytes()).collect()
        };
        let policies = values("x-idempo-policy");
        let persist_for = values("x-idempo-persist-for-seconds");
        let expected = reference_directive(&policies, persist_for.first().copied(), max);
        assert_eq!(check(&lines, None, max), expected, "{lines:?}");
        match expected {
            Directive::NoStore => opted_out += 1,
            Directive::Record(ttl) => recorded += usize::from(ttl != DEFAULT),
            Directive::NeedsAttention(_) => unreachable!("no header requests attention"),
        }

        let typed = check(&lines, Some(Retention::NoStore), max);
        assert_eq!(typed, Directive::NoStore, "{lines:?}");
    }
    assert!(
        recorded > inputs / 20 && opted_out > inputs / 20,
        "{recorded} {opted_out}"
    );
}

fn generate(corpus: &[Vec<u8>], random: &mut Random) -> Vec<u8> {
    match random.below(5) {
        0 => {
            let mut value = b"no-store".to_vec();
            for letter in &mut value {
                if random.once_in(2) {
                    letter.make_ascii_uppercase();
                }
            }
            value
        }
        1 => random.number().to_string().into_bytes(),
        2 => random.below(200).to_string().into_bytes(),
        3 => random.pick(corpus).clone(),
        _ => {
            let mut value = random.pick(corpus).clone();
            random.mutate(&mut value);
            value
        }
    }
}
