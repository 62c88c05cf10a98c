//! The values of JSON numbers, exact at any size.

/// Returns the value of a JSON number as text: the digits without zeros at either end, and a power of ten.
///
/// Two numbers have the same text exactly if they are equal. No number is rounded. A parser that reads numbers as doubles
/// may consider unequal numbers as equal. Minus zero is zero.
///
/// Returns `None` if the power of ten does not fit into 64 bits.
pub(super) fn value(number: &str) -> Option<String> {
    let (is_negative, unsigned) = match number.strip_prefix('-') {
        Some(unsigned) => (true, unsigned),
        None => (false, number),
    };
    let (mantissa, power) = match unsigned.find(['e', 'E']) {
        Some(at) => (&unsigned[..at], &unsigned[at + 1..]),
        None => (unsigned, "0"),
    };
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let mut digits = String::with_capacity(number.len() + 24);
    if is_negative {
        digits.push('-');
    }
    let sign = digits.len();
    // If the whole number is zero, the leading zeros of the fraction do not count either.
    let is_small = whole.bytes().all(|digit| digit == b'0');
    digits.push_str(whole.trim_start_matches('0'));
    digits.push_str(if is_small {
        fraction.trim_start_matches('0')
    } else {
        fraction
    });
    let length = digits.len();
    digits.truncate(digits.trim_end_matches('0').len());
    if digits.len() <= sign {
        return Some("0".to_owned());
    }
    let trailing = i64::try_from(length - digits.len()).ok()?;
    let behind_point = i64::try_from(fraction.len()).ok()?;
    let power = power.parse::<i64>().ok()?;
    let power = power.checked_sub(behind_point)?.checked_add(trailing)?;
    digits.push('e');
    digits.push_str(&power.to_string());
    Some(digits)
}
