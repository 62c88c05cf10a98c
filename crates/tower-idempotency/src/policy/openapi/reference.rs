//! References within a document (RFC 6901).

use serde_json::Value;

use super::DescribeError;

/// The longest chain of references. A longer one is a circle.
const MAX_STEPS: usize = 32;

/// Follows the reference of a value, if it is one.
pub(super) fn resolve<'a>(
    document: &'a Value,
    value: &'a Value,
) -> Result<&'a Value, DescribeError> {
    let mut value = value;
    for _ in 0..MAX_STEPS {
        let Some(reference) = value.get("$ref") else {
            return Ok(value);
        };
        let failed = || DescribeError::Reference(reference.as_str().unwrap_or_default().to_owned());
        let pointer = reference
            .as_str()
            .and_then(|reference| reference.strip_prefix('#'));
        let pointer = unescape(pointer.ok_or_else(failed)?).ok_or_else(failed)?;
        value = document.pointer(&pointer).ok_or_else(failed)?;
    }
    Err(DescribeError::Reference(
        "that leads back to itself".to_owned(),
    ))
}

/// Decodes the escapes of a URL, in which the pointer is a fragment.
fn unescape(fragment: &str) -> Option<String> {
    let (mut bytes, mut rest) = (Vec::new(), fragment.bytes());
    while let Some(byte) = rest.next() {
        bytes.push(if byte == b'%' {
            let digit = |digit: Option<u8>| char::from(digit?).to_digit(16);
            let code = digit(rest.next())? * 16 + digit(rest.next())?;
            u8::try_from(code).ok()?
        } else {
            byte
        });
    }
    String::from_utf8(bytes).ok()
}
