//! The messages of a gRPC body: each has a flag and a length in front of it.

/// Bytes before a message: one flag, and the length in four bytes.
const PREFIX: usize = 5;

/// Reads a body as it arrives, and detects if it has more than one message.
#[derive(Default)]
pub(crate) struct MessageReader {
    prefix: [u8; PREFIX],
    prefix_len: usize,
    missing: usize,
}

/// The shape of a complete request body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestShape {
    /// A single message, compressed or not.
    Unary,
    /// The body ends inside a message.
    Truncated,
    /// The body is no unary request. Contains the expected and the found shape.
    Other(&'static str),
}

impl MessageReader {
    /// Reads the next bytes of the body. Returns `false` if bytes follow the first message.
    pub(crate) fn read(&mut self, data: &[u8]) -> bool {
        let taken = data.len().min(PREFIX - self.prefix_len);
        let (prefix, message) = data.split_at(taken);
        self.prefix[self.prefix_len..][..taken].copy_from_slice(prefix);
        self.prefix_len += taken;
        if taken > 0 && self.prefix_len == PREFIX {
            let [_, length @ ..] = self.prefix;
            self.missing = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
        }
        let fits = message.len() <= self.missing;
        self.missing = self.missing.saturating_sub(message.len());
        fits
    }

    /// Returns the shape of a request that ends here, and has no second message.
    pub(crate) fn request_shape(&self) -> RequestShape {
        match self.prefix_len {
            0 => RequestShape::Other("expected one message in the request, found none"),
            PREFIX if self.prefix[0] > 1 => {
                RequestShape::Other("expected a message flag of 0 or 1, found another one")
            }
            PREFIX if self.missing == 0 => RequestShape::Unary,
            _ => RequestShape::Truncated,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns `None` if the body has bytes after its first message.
    fn shape(body: &[u8], chunk: usize) -> Option<RequestShape> {
        let mut reader = MessageReader::default();
        for chunk in body.chunks(chunk.max(1)) {
            if !reader.read(chunk) {
                return None;
            }
        }
        Some(reader.request_shape())
    }

    fn message(flag: u8, content: &[u8]) -> Vec<u8> {
        let length = u32::try_from(content.len()).unwrap();
        [&[flag], &length.to_be_bytes()[..], content].concat()
    }

    #[test]
    fn only_one_whole_message_is_unary() {
        for chunk in [1, 2, 5, 6, 100] {
            for content in [&b""[..], b"a", b"content"] {
                for flag in [0, 1] {
                    let one = message(flag, content);
                    assert_eq!(shape(&one, chunk), Some(RequestShape::Unary));
                    let two = [&one[..], &message(0, b"")].concat();
                    assert_eq!(shape(&two, chunk), None);
                    let more = [&one[..], b"\0"].concat();
                    assert_eq!(shape(&more, chunk), None);
                    for end in 1..one.len() {
                        let truncated = shape(&one[..end], chunk);
                        assert_eq!(truncated, Some(RequestShape::Truncated));
                    }
                }
            }
            assert!(matches!(shape(b"", chunk), Some(RequestShape::Other(_))));
            let trailers = message(0x80, b"grpc-status: 0\r\n");
            let found = shape(&trailers, chunk);
            assert!(matches!(found, Some(RequestShape::Other(_))));
            let lie = [0, 0xff, 0xff, 0xff, 0xff, 1, 2];
            assert_eq!(shape(&lie, chunk), Some(RequestShape::Truncated));
        }
    }

    proptest! {
        #[test]
        fn shape_does_not_depend_on_chunks(body: Vec<u8>, chunk in 1_usize..9) {
            prop_assert_eq!(shape(&body, chunk), shape(&body, usize::MAX));
        }

        #[test]
        fn every_message_is_unary(content: Vec<u8>, chunk in 1_usize..9) {
            prop_assert_eq!(shape(&message(0, &content), chunk), Some(RequestShape::Unary));
        }
    }
}
