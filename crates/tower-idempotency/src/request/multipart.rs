//! The parts of a `multipart/form-data` body, between its boundaries.

use http::{HeaderMap, header};
use memchr::memmem;

/// Returns the parts of the body, each with its headers, or `None` if the body does not have the plain form.
///
/// The plain form is that of RFC 2046, section 5.1.1, without optional parts. It has no text before the first boundary or
/// after the last one, and no space behind a boundary. The boundary is announced once, and appears in no part.
pub(super) fn parts<'a>(headers: &HeaderMap, body: &'a [u8]) -> Option<Vec<&'a [u8]>> {
    let content_type = headers.get(header::CONTENT_TYPE)?.to_str().ok()?;
    let delimiter = format!("--{}", boundary(content_type)?);
    let delimiter = delimiter.as_bytes();

    let mut rest = body.strip_prefix(delimiter)?;
    let finder = memmem::Finder::new(delimiter);
    let mut parts = Vec::new();
    while let Some(part) = rest.strip_prefix(b"\r\n") {
        let end = finder.find(part)?;
        parts.push(part[..end].strip_suffix(b"\r\n")?);
        rest = &part[end + delimiter.len()..];
    }
    matches!(rest, b"--" | b"--\r\n").then_some(parts)
}

/// Returns the boundary that a media type announces, or `None` if it announces none, several or an invalid one.
fn boundary(content_type: &str) -> Option<&str> {
    let mut boundaries = content_type.split(';').skip(1).filter_map(|parameter| {
        let (name, value) = parameter.split_once('=')?;
        let is_boundary = name.trim().eq_ignore_ascii_case("boundary");
        is_boundary.then_some(value.trim())
    });
    let (value, None) = (boundaries.next()?, boundaries.next()) else {
        return None;
    };
    let quoted = value.strip_prefix('"');
    // The characters of RFC 2046, without the space. They exclude semicolon and backslash, so a quoted string that the
    // split has cut is rejected. Without quotes only the characters of a token are valid (RFC 9110, section 5.6.2).
    let punctuation: &[u8] = if quoted.is_some() {
        b"'()+_,-./:=?"
    } else {
        b"'+_-."
    };
    let value = quoted.map_or(Some(value), |value| value.strip_suffix('"'))?;
    let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || punctuation.contains(&byte);
    (matches!(value.len(), 1..=70) && value.bytes().all(is_valid)).then_some(value)
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn parts_of<'a>(content_type: &'static str, body: &'a str) -> Option<Vec<&'a str>> {
        let content_type = HeaderValue::from_static(content_type);
        let headers = HeaderMap::from_iter([(header::CONTENT_TYPE, content_type)]);
        let found = parts(&headers, body.as_bytes())?;
        let text = |part: &&'a [u8]| std::str::from_utf8(part).expect("text");
        Some(found.iter().map(text).collect())
    }

    #[test]
    fn parts_lie_between_boundaries() {
        let body = "--b\r\nh: 1\r\n\r\none\r\n--b\r\n\r\ntwo\r\nlines\r\n--b--\r\n";
        let expected = ["h: 1\r\n\r\none", "\r\ntwo\r\nlines"];
        for content_type in [
            "multipart/form-data; boundary=b",
            "multipart/form-data;charset=utf-8;  Boundary=\"b\"",
        ] {
            assert_eq!(parts_of(content_type, body).unwrap(), expected);
        }
        let no_line_end = body.trim_end();
        let found = parts_of("multipart/form-data; boundary=b", no_line_end);
        assert_eq!(found.unwrap(), expected);
    }

    #[test]
    fn other_forms_have_no_parts() {
        for body in [
            "",
            "--b",
            "--b\r\n",
            "--b\r\none",
            "--b\r\none\r\n--b",
            "--b\r\none\r\n--b-",
            // Text outside the parts.
            "before\r\n--b\r\none\r\n--b--",
            "--b\r\none\r\n--b--\r\nafter",
            "--b\r\none\r\n--b-- ",
            // Parsers accept different ends of a part.
            "--b\r\none\n--b--",
            "--b\r\none--b\r\n--b--",
            "--b \r\none\r\n--b--",
            "--b\r\none\r\n--bc\r\n--b--",
            "--b\none\r\n--b--",
        ] {
            let found = parts_of("multipart/form-data; boundary=b", body);
            assert_eq!(found, None, "{body:?}");
        }
    }

    #[test]
    fn ambiguous_boundaries_are_refused() {
        for content_type in [
            "multipart/form-data",
            "multipart/form-data; boundary",
            "multipart/form-data; boundary=",
            "multipart/form-data; boundary=\"b",
            "multipart/form-data; boundary=b; boundary=c",
            "multipart/form-data; boundary=\"b;c\"",
            "multipart/form-data; boundary=\"b\\c\"",
            "multipart/form-data; boundary=b c",
        ] {
            let found = parts_of(content_type, "--b\r\none\r\n--b--");
            assert_eq!(found, None, "{content_type}");
        }
        // Valid only in quotes.
        let body = "--b/c\r\none\r\n--b/c--";
        let found = parts_of("multipart/form-data; boundary=b/c", body);
        assert_eq!(found, None);
        let found = parts_of("multipart/form-data; boundary=\"b/c\"", body);
        assert_eq!(found, Some(vec!["one"]));
    }
}
