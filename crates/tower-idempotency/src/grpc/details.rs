//! The details of an error in the binary format of Protocol Buffers: `google.rpc.Status` with `ErrorInfo` and `RetryInfo`.
//!
//! <https://github.com/googleapis/googleapis/tree/master/google/rpc>

use std::time::Duration;

/// A message that is written field by field.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn varint(&mut self, mut value: u64) {
        while value > 0x7f {
            self.0.push(value.to_le_bytes()[0] | 0x80);
            value >>= 7;
        }
        self.0.push(value.to_le_bytes()[0]);
    }

    /// Adds a number. Like every writer of the format, omits zero.
    fn number(mut self, field: u64, value: u64) -> Self {
        if value != 0 {
            self.varint(field << 3);
            self.varint(value);
        }
        self
    }

    /// Adds a text or a message.
    fn bytes(mut self, field: u64, bytes: &[u8]) -> Self {
        self.varint(field << 3 | 2);
        self.varint(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
        self
    }

    /// Adds the message `detail` as a `google.protobuf.Any`.
    fn detail(self, name: &str, detail: &Self) -> Self {
        let url = format!("type.googleapis.com/google.rpc.{name}");
        let any = Self::default().bytes(1, url.as_bytes()).bytes(2, &detail.0);
        self.bytes(3, &any.0)
    }
}

/// Encodes a status. `metadata` are the names and values of the `ErrorInfo`.
pub(super) fn encode_status(
    code: u64,
    message: &str,
    reason: &str,
    metadata: &[(&str, &str)],
    retry_after: Option<Duration>,
) -> Vec<u8> {
    let mut info = Message::default()
        .bytes(1, reason.as_bytes())
        .bytes(2, DOMAIN.as_bytes());
    for (name, value) in metadata {
        let entry = Message::default().bytes(1, name.as_bytes());
        info = info.bytes(3, &entry.bytes(2, value.as_bytes()).0);
    }
    let status = Message::default().number(1, code);
    let mut status = status.bytes(2, message.as_bytes());
    status = status.detail("ErrorInfo", &info);
    if let Some(after) = retry_after {
        // Seconds of the format are signed.
        let secs = after.as_secs().min(i64::MAX.unsigned_abs());
        let delay = Message::default().number(1, secs);
        let delay = delay.number(2, after.subsec_nanos().into());
        status = status.detail("RetryInfo", &Message::default().bytes(1, &delay.0));
    }
    status.0
}

const DOMAIN: &str = "tower-idempotency";
