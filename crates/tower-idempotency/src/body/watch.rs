//! Observers of bodies that pass unchanged.

use bytes::Bytes;

/// Observer of the frames of a body.
///
/// If it is dropped before [`on_end`](Self::on_end), the rest of the body was not read.
pub(crate) trait BodyWatch: Send + Sync {
    /// Handles the bytes of a frame. Returns `false` if the rest of the body does not matter.
    fn on_data(&mut self, data: &Bytes) -> bool;

    /// Handles the end of the body. `is_complete` is `false` if the body failed.
    fn on_end(self: Box<Self>, is_complete: bool);
}
