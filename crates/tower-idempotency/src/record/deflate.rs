//! Raw deflate with state that is kept per thread: setting it up anew costs more than using it on a small record.

use std::cell::RefCell;

use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress, Status};

use super::error::{Problem, RecordError};

thread_local! {
    static DEFLATE: RefCell<Compress> = RefCell::new(compressor());
    static INFLATE: RefCell<Decompress> = RefCell::new(Decompress::new(false));
}

/// Appends `payload` deflated; says whether that went well.
pub(super) fn deflate(payload: &[u8], record: &mut Vec<u8>) -> bool {
    // Level 1 spends at most nine bits on a byte. Room for that lets every stream end, even one that does not pay and
    // is thrown away: resetting a zlib-rs (0.6.8) that still holds output does not give the space of that output back,
    // and after some hundred such resets it panics. A new compressor each time would cost as much as 20 KiB of work.
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

/// What `deflated`, a declared length and a deflate stream, inflates to.
///
/// The declared length is not trusted with an allocation: the pieces grow with what really came out, and are put
/// together once all did.
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
            // One byte more than declared shows a stream that goes on.
            let room = (declared - found)
                .saturating_add(1)
                .min(found.max(FIRST_PIECE));
            let mut piece = Vec::with_capacity(room);
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
