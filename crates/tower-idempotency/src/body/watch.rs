//! Observers of bodies that pass unchanged.

use bytes::Bytes;

/// Observer of the frames of a body.
///
/// If it is dropped before [`ended`](Self::ended), the rest of the body was not read.
pub(crate) trait Watch: Send + Sync {
    /// Sees the bytes of a frame. Returns `false` if the rest of the body does not matter.
    fn saw(&mut self, data: &Bytes) -> bool;

    /// Sees the end of the body. `is_complete` is `false` if the body failed.
    fn ended(self: Box<Self>, is_complete: bool);
}
