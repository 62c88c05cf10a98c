//! Text as PostgreSQL's `encode(.., 'escape')` writes it.

/// Returns the text before its `encode(.., 'escape')`, or the text itself if it is not escaped.
pub(super) fn unescape(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        rest = match (first, after) {
            (b'\\', [b'\\', after @ ..]) => {
                bytes.push(b'\\');
                after
            }
            (
                b'\\',
                [
                    a @ b'0'..=b'3',
                    b @ b'0'..=b'7',
                    c @ b'0'..=b'7',
                    after @ ..,
                ],
            ) => {
                bytes.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                after
            }
            (b'\\', _) => return text.to_owned(),
            _ => {
                bytes.push(*first);
                after
            }
        };
    }
    String::from_utf8(bytes).unwrap_or_else(|_| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escaped_text_is_unescaped() {
        for (escaped, text) in [
            ("POST /orders", "POST /orders"),
            (r"POST /caf\303\251", "POST /café"),
            (r"a\\b\\\\303", r"a\b\\303"),
            // Not written by this store.
            (r"a\b", r"a\b"),
            (r"\", r"\"),
            (r"\3", r"\3"),
            (r"\377", r"\377"),
            (r"\303", r"\303"),
            (r"\x\18\477", r"\x\18\477"),
            ("/ä", "/ä"),
        ] {
            assert_eq!(unescape(escaped), text, "{escaped}");
        }
    }
}
