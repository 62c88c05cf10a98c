//! The lines of one header.

use http::{HeaderMap, HeaderName, HeaderValue};

/// Returns the lines of a header, in their order.
///
/// Compares `name` with the name of each line. `HeaderMap::get_all` hashes `name` byte by byte instead, which takes longer for
/// the few lines of most messages. To look up many names, use the map.
pub(crate) fn lines_of<'a>(
    headers: &'a HeaderMap,
    name: &HeaderName,
) -> impl Iterator<Item = &'a HeaderValue> {
    headers
        .iter()
        .filter(move |(other, _)| *other == name)
        .map(|(_, line)| line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_those_of_map_in_order() {
        let name = |name: &str| HeaderName::from_bytes(name.as_bytes()).unwrap();
        let mut headers = HeaderMap::new();
        for (header, line) in [
            ("x-key", "1"),
            ("host", "a"),
            ("content-type", "b"),
            ("X-Key", "2"),
            ("x-keys", "c"),
            ("content-type", "d"),
            ("x-key", "3"),
        ] {
            headers.append(name(header), HeaderValue::from_static(line));
        }
        // The last header takes the place of a removed one.
        headers.remove("host");
        for header in ["x-key", "X-KEY", "x-keys", "content-type", "host", "x"] {
            let lines: Vec<_> = lines_of(&headers, &name(header)).collect();
            let expected: Vec<_> = headers.get_all(name(header)).iter().collect();
            assert_eq!(lines, expected, "{header}");
        }
        let lines: Vec<_> = lines_of(&headers, &name("X-KEY")).collect();
        assert_eq!(lines, ["1", "2", "3"]);
    }
}
