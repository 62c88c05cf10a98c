//! Faults that happen once, at a point that the bytes of a client or of the server define.

/// A fault that happens once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// This number of bytes from clients still reaches the server, counted over all connections. Then the connection of
    /// the last byte forwards nothing more in either direction.
    AfterBytes(u64),
    /// The request that contains these bytes for the `nth` time, counted from 1, does not reach the server. Nor do other
    /// bytes that arrived in the same piece.
    Request {
        /// The bytes to match, as the client sends them.
        needle: Vec<u8>,
        /// The number of the occurrence.
        nth: u32,
    },
    /// The piece from the server that contains these bytes for the `nth` time, counted from 1, does not reach the client.
    Reply {
        /// The bytes to match, as the server sends them.
        needle: Vec<u8>,
        /// The number of the occurrence.
        nth: u32,
    },
    /// The request that contains these bytes for the `nth` time, counted from 1, reaches the server, and its reply is lost.
    /// Replies to other requests in flight on the connection are lost, too.
    ///
    /// With HTTP/2 the first reply may be a frame of the connection, sent before the request is executed: see
    /// [`Reply`](Self::Reply).
    ReplyTo {
        /// The bytes to match, as the client sends them.
        needle: Vec<u8>,
        /// The number of the occurrence.
        nth: u32,
    },
}

impl Fault {
    /// Loses the next request that contains these bytes.
    #[must_use]
    pub fn request(needle: impl Into<Vec<u8>>) -> Self {
        let needle = needle.into();
        Self::Request { needle, nth: 1 }
    }

    /// Loses the reply to the next request that contains these bytes.
    #[must_use]
    pub fn reply_to(needle: impl Into<Vec<u8>>) -> Self {
        let needle = needle.into();
        Self::ReplyTo { needle, nth: 1 }
    }

    /// Loses the next reply that contains these bytes.
    #[must_use]
    pub fn reply(needle: impl Into<Vec<u8>>) -> Self {
        let needle = needle.into();
        Self::Reply { needle, nth: 1 }
    }

    /// Returns `true` if bytes from the server define the point, and not those from a client.
    pub(super) fn is_in_reply(&self) -> bool {
        matches!(self, Self::Reply { .. })
    }

    pub(super) fn is_possible(&self) -> bool {
        match self {
            Self::AfterBytes(bytes) => *bytes > 0,
            Self::Request { needle, nth }
            | Self::Reply { needle, nth }
            | Self::ReplyTo { needle, nth } => !needle.is_empty() && *nth > 0,
        }
    }

    /// Returns `true` if the fault happens in this piece, and otherwise updates the remaining wait. `before`
    /// holds the last bytes of the connection, for a pattern that arrives in two pieces.
    pub(super) fn matches(&mut self, before: &mut Vec<u8>, piece: &[u8]) -> bool {
        match self {
            Self::AfterBytes(left) if *left > piece.len() as u64 => {
                *left -= piece.len() as u64;
                false
            }
            Self::AfterBytes(_) => true,
            Self::Request { needle, nth }
            | Self::Reply { needle, nth }
            | Self::ReplyTo { needle, nth } => {
                // Keeps fewer bytes than the pattern has. Otherwise an earlier match would be counted again.
                let kept = before.len().min(needle.len() - 1);
                before.drain(..before.len() - kept);
                before.extend_from_slice(piece);
                let seen = before.windows(needle.len()).filter(|it| it == needle);
                let seen = u32::try_from(seen.count()).unwrap_or(u32::MAX);
                let is_match = seen >= *nth;
                *nth = nth.saturating_sub(seen);
                is_match
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_request_is_counted_once() {
        let pieces: [&[u8]; 5] = [b"GET GE", b"T", b" G", b"E", b"T."];
        for (nth, expected) in [(1, 0), (2, 1), (3, 4)] {
            let needle = b"GET".to_vec();
            let mut fault = Fault::Request { needle, nth };
            let mut before = Vec::new();
            let at = pieces
                .iter()
                .position(|piece| fault.matches(&mut before, piece));
            assert_eq!(at, Some(expected), "occurrence {nth}");
        }
    }

    #[test]
    fn byte_fault_happens_at_exact_count() {
        let mut fault = Fault::AfterBytes(5);
        let mut before = Vec::new();
        assert!(!fault.matches(&mut before, b"abcd"));
        assert_eq!(fault, Fault::AfterBytes(1));
        assert!(fault.matches(&mut before, b"ef"));
    }
}
