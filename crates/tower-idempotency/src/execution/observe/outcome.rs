//! The end of an observed execution, and its form in the store.

use bytes::Bytes;
use http::StatusCode;

use crate::{
    record::{Codec, Record},
    store::{KeyId, Ttl},
};

/// Digest of a response body.
pub(super) type BodyDigest = [u8; 32];

/// The end of an observed execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExecutionEnd {
    pub(super) kind: EndKind,
    pub(super) seen: Seen,
    pub(super) retention: Ttl,
}

/// The state in which an execution would leave its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EndKind {
    /// A retry gets the response.
    Recorded,
    /// A retry is refused, such as after a response that is too large.
    Refused,
    /// A retry executes again.
    Released,
}

/// The observed parts of a response. `None` if the client disconnected before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) status: Option<StatusCode>,
    pub(super) body: Option<BodyDigest>,
}

/// A difference between two responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Difference {
    Status,
    Body,
}

impl Difference {
    /// Returns the name of the part in events and counters.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Status => "status",
            Self::Body => "body",
        }
    }
}

/// The end of an earlier execution, from the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Earlier {
    Recorded(Seen),
    Refused,
}

const RECORDED: u8 = 1;
const REFUSED: u8 = 2;

impl ExecutionEnd {
    /// Encodes the end for the store: no header, no body, only their digest.
    pub(super) fn encode(&self, codec: Codec, id: &KeyId) -> Bytes {
        let mut value = vec![match self.kind {
            EndKind::Recorded | EndKind::Released => RECORDED,
            EndKind::Refused => REFUSED,
        }];
        let status = self.seen.status.map_or(0, |status| status.as_u16());
        value.extend_from_slice(&status.to_be_bytes());
        value.extend_from_slice(self.seen.body.as_ref().map_or(&[][..], |body| &body[..]));
        codec.encode_value(id, &value)
    }
}

impl Earlier {
    /// Decodes a record. Returns `None` if this version cannot read it.
    pub(super) fn decode(codec: Codec, id: &KeyId, record: &Bytes) -> Option<Self> {
        let Ok(Record::Value(value)) = codec.decode(id, record) else {
            return None;
        };
        let (&[kind, high, low], body) = value.split_first_chunk::<3>()?;
        match kind {
            RECORDED => Some(Self::Recorded(Seen {
                status: StatusCode::from_u16(u16::from_be_bytes([high, low])).ok(),
                body: BodyDigest::try_from(body).ok(),
            })),
            REFUSED => Some(Self::Refused),
            _ => None,
        }
    }
}

impl Seen {
    /// Returns the first difference between two responses, as far as both were seen.
    pub(super) fn difference(&self, other: &Self) -> Option<Difference> {
        if let (Some(own), Some(other)) = (self.status, other.status)
            && own != other
        {
            return Some(Difference::Status);
        }
        match (&self.body, &other.body) {
            (Some(own), Some(other)) if own != other => Some(Difference::Body),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODEC: Codec = Codec {
        compress_above: 1024,
        max_inflated: 1024,
    };
    const ID: KeyId = KeyId::from_bytes([7; 32]);

    fn ended(kind: EndKind, status: Option<u16>, body: Option<BodyDigest>) -> ExecutionEnd {
        let status = status.map(|status| StatusCode::from_u16(status).unwrap());
        let (seen, retention) = (Seen { status, body }, Ttl::MIN);
        ExecutionEnd {
            kind,
            seen,
            retention,
        }
    }

    #[test]
    fn record_keeps_seen_parts() {
        for (status, body) in [(None, None), (Some(201), None), (Some(201), Some([9; 32]))] {
            let ended = ended(EndKind::Recorded, status, body);
            let record = ended.encode(CODEC, &ID);
            let decoded = Earlier::decode(CODEC, &ID, &record);
            assert_eq!(decoded, Some(Earlier::Recorded(ended.seen)));
        }
        let record = ended(EndKind::Refused, Some(200), None).encode(CODEC, &ID);
        assert_eq!(Earlier::decode(CODEC, &ID, &record), Some(Earlier::Refused));
        let other = CODEC.encode_value(&ID, b"\x09ab");
        assert_eq!(Earlier::decode(CODEC, &ID, &other), None);
        let short = CODEC.encode_value(&ID, b"\x01");
        assert_eq!(Earlier::decode(CODEC, &ID, &short), None);
    }

    #[test]
    fn only_seen_parts_differ() {
        let seen = |status, body| ended(EndKind::Recorded, status, body).seen;
        let full = seen(Some(201), Some([1; 32]));
        assert_eq!(full.difference(&full), None);
        assert_eq!(full.difference(&seen(None, None)), None);
        assert_eq!(full.difference(&seen(Some(201), None)), None);
        let status = seen(Some(500), Some([2; 32]));
        assert_eq!(full.difference(&status), Some(Difference::Status));
        let body = seen(Some(201), Some([2; 32]));
        assert_eq!(full.difference(&body), Some(Difference::Body));
    }
}
