//! Numbers by value, members that are left out, and documents that parsers read in different ways.

use super::{tests::canonical_form as spelled, *};
use crate::{
    fuzz::{inputs, random},
    random::Random,
};

fn by_value(text: &str) -> Option<Vec<u8>> {
    canonical_form(text.as_bytes(), &JsonFingerprint::new().numbers_by_value())
}

fn without(pointers: &[&str], text: &str) -> Option<Vec<u8>> {
    let by = JsonFingerprint::new().without(pointers.iter().copied());
    canonical_form(text.as_bytes(), &by.expect("valid pointers"))
}

#[track_caller]
fn assert_equal(texts: &[&str]) {
    for text in texts {
        assert!(by_value(text).is_some(), "{text}");
        assert_eq!(by_value(text), by_value(texts[0]), "{text} {}", texts[0]);
    }
}

#[track_caller]
fn assert_unequal(texts: &[&str]) {
    for (n, one) in texts.iter().enumerate() {
        assert!(by_value(one).is_some(), "{one}");
        for other in &texts[n + 1..] {
            assert_ne!(by_value(one), by_value(other), "{one} {other}");
        }
    }
}

#[test]
fn spellings_of_number_are_equal() {
    assert_equal(&[
        "1", "1.0", "1.000", "10e-1", "0.1e1", "0.1E+1", "1e0", "1e-0", "100e-02",
    ]);
    assert_equal(&[
        "0",
        "-0",
        "0.0",
        "-0.00",
        "0e5",
        "0e-999999999999999999999",
        "-0E99999999999999999999",
    ]);
    assert_equal(&["100", "1e2", "1E2", "1.00e2", "10000e-2", "1e+02"]);
    assert_equal(&["-150", "-1.5e2", "-15e1", "-150.0"]);
    assert_equal(&["0.001", "1e-3", "0.0010", "0.1e-2"]);
    assert_equal(&["1e400", "10e399", "0.1e401"]);
    assert_equal(&[r#"{"a":[1.0,{"b":2}]}"#, r#"{"a":[1,{"b":2.0}]}"#]);
}

// A parser that reads numbers as doubles considers several of these as equal.
#[test]
fn other_numbers_are_unequal() {
    assert_unequal(&["9007199254740992", "9007199254740993", "9007199254740992.5"]);
    assert_unequal(&["1e400", "1e401", "-1e400", "100e400", "1e-400", "0"]);
    assert_unequal(&[
        "0.1",
        "0.10000000000000001",
        "0.1000000000000000055511151231257827",
    ]);
    assert_unequal(&["1", "-1", "10", "0.1", "1e2", "11", "101", "1.01"]);
    assert_unequal(&[
        "18446744073709551616",
        "18446744073709551615",
        "18446744073709551617",
    ]);
    assert_unequal(&["1", "\"1\"", "true", "[1]", "null", "\"1e0\"", "{}"]);
    assert_unequal(&[
        "1e9223372036854775807",
        "1e9223372036854775806",
        "1e-9223372036854775807",
    ]);
}

#[test]
fn huge_power_uses_bytes_of_body() {
    for number in [
        "1e9223372036854775808",
        "1e99999999999999999999",
        "0.1e-9223372036854775808",
        "10e9223372036854775807",
    ] {
        assert_eq!(by_value(number), None, "{number}");
        assert!(spelled(number.as_bytes()).is_some(), "{number}");
    }
}

#[test]
fn null_is_not_absent() {
    assert_unequal(&[
        r#"{"coupon":null}"#,
        "{}",
        r#"{"coupon":""}"#,
        r#"{"coupon":0}"#,
        r#"{"coupon":false}"#,
    ]);
    assert_unequal(&["[1,2]", "[2,1]", "[1,2,null]", "[1,[2]]"]);
}

// Go, and case-insensitive settings of other parsers, read the last of these members. In another order that is another
// member.
#[test]
fn names_in_two_letter_cases_use_bytes() {
    let ambiguous = [
        r#"{"amount":1,"Amount":100}"#,
        r#"{"a":[{"amount":1,"x":2,"AMOUNT":3}]}"#,
        "{\"class\":1,\"clas\u{17f}\":2}",
        "{\"kind\":1,\"\u{212a}ind\":2}",
        r#"{"\u0041":1,"a":2}"#,
        r#"{"STRASSE":1,"straße":2}"#,
    ];
    for text in ambiguous {
        assert_eq!(by_value(text), None, "{text}");
        assert_eq!(spelled(text.as_bytes()), None, "{text}");
    }
    assert_equal(&[r#"{"Amount":1,"Count":2}"#, r#"{"Count":2,"Amount":1}"#]);
}

#[test]
fn malformed_documents_use_bytes() {
    let deep = format!("{}{}", "[".repeat(MAX_DEPTH + 1), "]".repeat(MAX_DEPTH + 1));
    let malformed: [&[u8]; 24] = [
        b"",
        b" ",
        b"NaN",
        b"Infinity",
        b"-Infinity",
        b"-",
        b"+1",
        b"01",
        b"1.",
        b".5",
        b"1e",
        b"0x10",
        b"1 2",
        b"{'a':1}",
        b"[1,]",
        b"{\"a\":1,}",
        b"{\"a\":1,\"a\":1}",
        b"{\"a\":1,\"\\u0061\":2}",
        b"\"\\ud800\"",
        b"\xff",
        b"\"\xc3\x28\"",
        b"\xef\xbb\xbf{}",
        b"[1]//",
        deep.as_bytes(),
    ];
    let by = JsonFingerprint::new()
        .numbers_by_value()
        .without(["/id", "/*/id"])
        .expect("valid pointers");
    for bytes in malformed {
        assert_eq!(
            canonical_form(bytes, &by),
            None,
            "{}",
            String::from_utf8_lossy(bytes)
        );
    }
}

#[test]
fn members_are_left_out_by_pointer() {
    let same = |pointers: &[&str], a: &str, b: &str| {
        assert!(without(pointers, a).is_some(), "{a}");
        assert_eq!(
            without(pointers, a),
            without(pointers, b),
            "{pointers:?} {a} {b}"
        );
    };
    let other = |pointers: &[&str], a: &str, b: &str| {
        assert_ne!(
            without(pointers, a),
            without(pointers, b),
            "{pointers:?} {a} {b}"
        );
    };
    let rpc = ["/id", "/params/_meta"];
    same(
        &rpc,
        r#"{"id":1,"params":{"_meta":{"t":1},"a":1}}"#,
        r#"{"params":{"a":1},"id":"x"}"#,
    );
    same(&rpc, r#"{"\u0069d":1}"#, "{}");
    other(
        &rpc,
        r#"{"id":1,"params":{"a":1}}"#,
        r#"{"id":1,"params":{"a":2}}"#,
    );
    // Only the member at this position is left out.
    other(&rpc, r#"{"params":{"id":1}}"#, r#"{"params":{"id":2}}"#);
    other(&rpc, r#"[{"id":1}]"#, r#"[{"id":2}]"#);
    other(&["/id/x"], r#"{"id":1}"#, r#"{"id":2}"#);
    same(&["/id", "/id/x"], r#"{"id":{"x":1}}"#, r#"{"id":2}"#);
    same(
        &["/items/*/id"],
        r#"{"items":[{"id":1,"a":1},{"a":2}]}"#,
        r#"{"items":[{"a":1},{"id":3,"a":2}]}"#,
    );
    other(
        &["/items/*/id"],
        r#"{"items":[{"id":1,"a":1}]}"#,
        r#"{"items":[{"id":1,"a":2}]}"#,
    );
    same(
        &["/0/id"],
        r#"[{"id":1},{"id":2}]"#,
        r#"[{"id":9},{"id":2}]"#,
    );
    other(
        &["/0/id"],
        r#"[{"id":1},{"id":2}]"#,
        r#"[{"id":1},{"id":9}]"#,
    );
    other(
        &["/00/id", "/-1/id", "/-/id"],
        r#"[{"id":1}]"#,
        r#"[{"id":2}]"#,
    );
    same(&["/a~1b/~0"], r#"{"a/b":{"~":1}}"#, r#"{"a/b":{}}"#);
}

#[test]
fn items_left_out_still_count() {
    for pointer in ["/*", "/0", "/1"] {
        assert_ne!(
            without(&[pointer], "[1,2]"),
            without(&[pointer], "[1,2,3]"),
            "{pointer}"
        );
        assert_ne!(
            without(&[pointer], "[1]"),
            without(&[pointer], "[]"),
            "{pointer}"
        );
    }
    assert_eq!(
        without(&["/*"], "[1,{\"a\":[]}]"),
        without(&["/*"], "[[],\"\"]")
    );
    // A star is a name in an object, and not each member.
    assert_ne!(
        without(&["/*"], r#"{"a":1}"#),
        without(&["/*"], r#"{"a":2}"#)
    );
    assert_eq!(
        without(&["/*"], r#"{"*":1}"#),
        without(&["/*"], r#"{"*":2}"#)
    );
    // No item has the form of one that is left out.
    for item in ["-1", "null", "\"-\"", "[]", "{}", "0"] {
        assert_ne!(
            without(&["/0"], &format!("[1,{item}]")),
            without(&["/*"], "[1,1]"),
            "{item}"
        );
    }
}

// A name that is written twice may be left out in one parser and not in the other.
#[test]
fn duplicates_in_left_out_member_use_bytes() {
    assert_eq!(without(&["/id"], r#"{"id":{"a":1,"a":2}}"#), None);
    assert_eq!(without(&["/id"], r#"{"id":1,"id":2}"#), None);
    assert_eq!(without(&["/id"], r#"{"id":1,"ID":2}"#), None);
}

/// A number as an integer times a power of ten.
#[derive(Clone, Copy, Debug)]
struct Number {
    integer: i128,
    power: i32,
}

impl Number {
    fn random(random: &mut Random) -> Self {
        let digits = 1 + random.below(6);
        let mut integer = (0..digits).fold(0_i128, |all, _| {
            all * 10 + *random.pick::<i128>(&[0, 0, 1, 2, 9])
        });
        if random.once_in(3) {
            integer = -integer;
        }
        Self {
            integer,
            power: i32::try_from(random.below(9)).expect("small") - 4,
        }
    }

    /// Exact comparison by integers, without the digits that the form uses.
    fn is_equal(self, other: Self) -> bool {
        let least = self.power.min(other.power);
        let scale = |number: Self| {
            number.integer * 10_i128.pow(u32::try_from(number.power - least).expect("not negative"))
        };
        scale(self) == scale(other)
    }

    /// Returns a random spelling: the point at any position, zeros at both ends of the fraction, and a power.
    fn spelling(self, random: &mut Random) -> String {
        let sign = if self.integer < 0 || (self.integer == 0 && random.once_in(2)) {
            "-"
        } else {
            ""
        };
        let mut digits = self.integer.unsigned_abs().to_string();
        let mut power = self.power;
        for _ in 0..random.below(4) {
            digits.push('0');
            power -= 1;
        }
        let fraction = random.below(digits.len() + 3);
        while digits.len() <= fraction {
            digits.insert(0, '0');
        }
        power += i32::try_from(fraction).expect("small");
        let (whole, fraction) = digits.split_at(digits.len() - fraction);
        let whole = whole.trim_start_matches('0');
        let whole = if whole.is_empty() { "0" } else { whole };
        let point = if fraction.is_empty() { "" } else { "." };
        let e = random.pick::<&str>(&["e", "E"]);
        let plus = if power >= 0 {
            random.pick::<&str>(&["", "+"])
        } else {
            ""
        };
        let exponent = if power == 0 && random.once_in(2) {
            String::new()
        } else {
            format!("{e}{plus}{power}")
        };
        format!("{sign}{whole}{point}{fraction}{exponent}")
    }
}

#[test]
fn numbers_are_equal_exactly_by_value() {
    let (random, inputs) = (&mut random(21), inputs(40_000));
    let (mut equal, mut unequal) = (0, 0);
    for _ in 0..inputs {
        let one = Number::random(random);
        let other = if random.once_in(2) {
            one
        } else {
            Number::random(random)
        };
        let shape = random.pick::<&str>(&["#", "[#]", "{\"a\":#}", "[{\"b\":[#,1]}]"]);
        let text =
            |number: Number, random: &mut Random| shape.replace('#', &number.spelling(random));
        let (a, b) = (text(one, random), text(other, random));
        assert!(by_value(&a).is_some() && by_value(&b).is_some(), "{a} {b}");
        assert_eq!(by_value(&a) == by_value(&b), one.is_equal(other), "{a} {b}");
        *(if one.is_equal(other) {
            &mut equal
        } else {
            &mut unequal
        }) += 1;
    }
    assert!(
        equal > inputs / 3 && unequal > inputs / 3,
        "{equal} {unequal}"
    );
}
