//! Collects the frames of a body into contiguous bytes.

use bytes::{Buf, Bytes, BytesMut};
use http::{HeaderMap, header};
use http_body::Frame;

use crate::header_lines::lines_of;

/// Content of one frame.
pub(crate) enum FrameContent {
    Data(Bytes),
    Trailers(HeaderMap),
}

impl FrameContent {
    /// Returns the content of a frame. Copies the data unless they are already [`Bytes`].
    pub(crate) fn from_frame<D: Buf>(frame: Frame<D>) -> Self {
        match frame.into_data() {
            Ok(mut data) => Self::Data(data.copy_to_bytes(data.remaining())),
            Err(frame) => Self::Trailers(frame.into_trailers().unwrap_or_default()),
        }
    }
}

/// Chunks of a body, in the order of their arrival.
///
/// A single chunk is stored without a copy. Several chunks are joined as they arrive. If a client sends one byte at a time,
/// a list of chunks would take about 40 bytes of memory for each of them.
#[derive(Default)]
pub(crate) struct Chunks {
    first: Bytes,
    joined: BytesMut,
}

impl Chunks {
    pub(crate) fn len(&self) -> usize {
        self.first.len() + self.joined.len()
    }

    pub(crate) fn push(&mut self, data: Bytes) {
        if self.len() == 0 {
            self.first = data;
            return;
        }
        if !self.first.is_empty() {
            self.joined.reserve(self.first.len() + data.len());
            self.joined
                .extend_from_slice(&std::mem::take(&mut self.first));
        }
        self.joined.extend_from_slice(&data);
    }

    pub(crate) fn into_bytes(self) -> Bytes {
        if self.first.is_empty() {
            self.joined.freeze()
        } else {
            self.first
        }
    }
}

/// Returns the length that the headers announce, or `None` if there is none or it is not a number.
pub(crate) fn content_length(headers: &HeaderMap) -> Option<u64> {
    lines_of(headers, &header::CONTENT_LENGTH)
        .next()?
        .to_str()
        .ok()?
        .parse()
        .ok()
}
