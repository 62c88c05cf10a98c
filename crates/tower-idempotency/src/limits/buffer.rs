//! Bytes of bodies that count against a limit.

use std::sync::Arc;

use bytes::Bytes;

use super::{AdmissionError, Caller, Resource};

/// Bytes of a body that count against a limit. Dropping it returns them.
///
/// A [small body](is_uncounted) does not count. The limit of requests in flight bounds their number. So other callers can send
/// small requests even if the bytes are used up.
pub(crate) struct Buffer {
    caller: Arc<Caller>,
    resource: Resource,
    len: usize,
    /// The part of `len` that counts: all or nothing.
    counted: usize,
    max: usize,
}

impl Buffer {
    pub(super) fn new(caller: Arc<Caller>, resource: Resource, max: usize) -> Self {
        Self {
            caller,
            resource,
            len: 0,
            counted: 0,
            max,
        }
    }

    /// Reserves `bytes` more if the limit and the share of the caller allow it.
    pub(crate) fn reserve(&mut self, bytes: usize) -> Result<(), AdmissionError> {
        let len = self.len + bytes;
        if !is_uncounted(len, self.max) {
            self.caller
                .take(self.resource, len - self.counted, self.max)?;
            self.counted = len;
        }
        self.len = len;
        Ok(())
    }

    /// Sets the buffer to `bytes`, which all count, without a check of the limit.
    pub(crate) fn resize_unchecked(&mut self, bytes: usize) {
        if bytes > self.counted {
            self.caller
                .take_unchecked(self.resource, bytes - self.counted);
        } else if bytes < self.counted {
            self.caller.release(self.resource, self.counted - bytes);
        }
        (self.len, self.counted) = (bytes, bytes);
    }

    /// Returns the data of a response. The reserved bytes count until the last slice of `data` is dropped.
    ///
    /// A server holds a slice until the client has read it. Data of at most [`UNCOUNTED`] bytes stops counting at once,
    /// because a connection buffers as many bytes in any case.
    pub(crate) fn hold_until_sent(self, data: Bytes) -> Bytes {
        if data.len() <= UNCOUNTED {
            return data;
        }
        self.hold(data)
    }

    /// Returns `data`. The reserved bytes count until the last slice of `data` is dropped.
    pub(crate) fn hold(self, data: Bytes) -> Bytes {
        if self.counted == 0 {
            return data;
        }
        Bytes::from_owner(HeldData {
            data,
            _buffer: self,
        })
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.resize_unchecked(0);
    }
}

/// Bytes, and the buffer in which they count.
struct HeldData {
    data: Bytes,
    _buffer: Buffer,
}

impl AsRef<[u8]> for HeldData {
    fn as_ref(&self) -> &[u8] {
        &self.data
    }
}

/// Returns `true` if a body of this size does not count against a limit of `max` bytes. It has at most [`UNCOUNTED`] bytes, and
/// at most 1/1024 of the limit.
pub(crate) fn is_uncounted(bytes: usize, max: usize) -> bool {
    bytes <= UNCOUNTED.min(max / 1024)
}

/// Maximum size in bytes of a body that does not count. A response of this size also stops counting when the server gets it.
pub(crate) const UNCOUNTED: usize = 8 * 1024;
