//! Raw deflate with state per thread: setting up the state costs more than compressing a small record.

use std::cell::RefCell;

use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress, Status};

use super::error::{Problem, RecordError};

thread_local! {
    static DEFLATE: RefCell<Compress> = RefCell::new(compressor());
    static INFLATE: RefCell<Decompress> = RefCell::new(Decompress::new(false));
}

/// Appends the deflated `payload`. Returns `true` on success.
pub(super) fn deflate(payload: &[u8], record: &mut Vec<u8>) -> bool {
    // Level 1 uses at most nine bits for a byte. With this capacity every stream finishes, even a stream that is not
    // smaller and is discarded. In zlib-rs 0.6.8, a reset of a compressor with pending output does not free the space of
    // that output. Some hundred of these resets cause a panic. A new compressor for each call would cost as much as the
    // compression of 20 KiB.
    record.reserve(payload.len() + payload.len() / 8 + 64);
    DEFLATE.with_borrow_mut(|state| {
        let status = state.compress_vec(payload, record, FlushCompress::Finish);
        let ended = matches!(status, Ok(Status::StreamEnd));
        if ended {
            state.reset();
        } else {
            *state = compressor();
        }
        ended
    })
}

fn compressor() -> Compress {
    Compress::new(Compression::fast(), false)
}

/// Inflates `deflated`, which is a declared length and a deflate stream.
///
/// Allocates no buffer of the declared length. Allocates pieces that grow with the actual output, and joins them at the
/// end.
pub(super) fn inflate(deflated: &[u8], limit: usize) -> Result<Vec<u8>, RecordError> {
    let Some((declared, mut input)) = deflated.split_first_chunk::<4>() else {
        return Err(Problem::Deflate.into());
    };
    let declared = usize::try_from(u32::from_le_bytes(*declared)).unwrap_or(usize::MAX);
    if declared > limit {
        return Err(Problem::InflatedLimit { declared, limit }.into());
    }
    INFLATE.with_borrow_mut(|state| {
        state.reset(false);
        let mut pieces = Vec::new();
        let mut found = 0;
        loop {
            // One byte more than declared detects a stream that continues.
            let capacity = (declared - found)
                .saturating_add(1)
                .min(found.max(FIRST_PIECE));
            let mut piece = Vec::with_capacity(capacity);
            let before = state.total_in();
            let status = state.decompress_vec(input, &mut piece, FlushDecompress::Finish);
            let consumed = usize::try_from(state.total_in() - before).unwrap_or(usize::MAX);
            input = input.get(consumed..).unwrap_or_default();

            let full = piece.len() == piece.capacity();
            found += piece.len();
            pieces.push(piece);
            if found > declared {
                return Err(Problem::InflatedLength { declared, found }.into());
            }
            match status {
                Ok(Status::StreamEnd) => break,
                Ok(Status::Ok | Status::BufError) if full => {}
                Ok(Status::Ok | Status::BufError) | Err(_) => return Err(Problem::Deflate.into()),
            }
        }
        if found < declared {
            return Err(Problem::InflatedLength { declared, found }.into());
        }
        if !input.is_empty() {
            return Err(Problem::AfterDeflate { found: input.len() }.into());
        }
        Ok(match pieces.pop() {
            Some(only) if pieces.is_empty() => only,
            Some(last) => {
                pieces.push(last);
                pieces.concat()
            }
            None => Vec::new(),
        })
    })
}

const FIRST_PIECE: usize = 32 * 1024;
