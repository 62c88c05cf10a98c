//! Functions that read the rows of a store's statements.

use sqlx::{ColumnIndex, Decode, Row, Type};

use crate::{SqlError, entry::CompleteRow};

/// Reads the entry after an attempt to complete it.
pub(crate) fn read_complete_row<R: Row>(row: &R) -> Result<CompleteRow, SqlError>
where
    usize: ColumnIndex<R>,
    for<'r> bool: Decode<'r, R::Database> + Type<R::Database>,
{
    Ok(CompleteRow {
        is_completed: row.try_get(0)?,
        has_own_token: row.try_get(1)?,
        is_expired: row.try_get(2)?,
        has_no_token: row.try_get(3)?,
    })
}

/// Defines the functions that read the other rows. [`sqlx::Row`] must be in scope. The statements for PostgreSQL return bytes
/// as text, so it has functions of its own.
#[cfg(any(feature = "mysql", feature = "sqlite"))]
macro_rules! define_row_readers {
    ($row:ty) => {
        fn read_acquire_row(row: &$row) -> Result<$crate::entry::AcquireRow, $crate::SqlError> {
            Ok($crate::entry::AcquireRow {
                is_completed: row.try_get(0)?,
                has_own_token: row.try_get(1)?,
                is_expired: row.try_get(2)?,
                fingerprint: row.try_get(3)?,
                generation: row.try_get(4)?,
                lease_left: row.try_get(5)?,
                record: row.try_get(6)?,
                left: row.try_get(7)?,
                token: row.try_get(8)?,
            })
        }

        fn read_orphan_row(row: &$row) -> Result<$crate::backend::OrphanRow, $crate::SqlError> {
            use ::tower_idempotency::store::{Fingerprint, KeyId};

            let digest = |bytes: Vec<u8>| -> Result<[u8; 32], $crate::SqlError> {
                let bytes = bytes.try_into();
                bytes.map_err(|_| $crate::SqlError::unreadable("no digest"))
            };
            Ok($crate::backend::OrphanRow {
                id: KeyId::from_bytes(digest(row.try_get(0)?)?),
                fingerprint: Fingerprint::from_bytes(digest(row.try_get(1)?)?),
                generation: row.try_get(2)?,
                lease_ends: row.try_get(3)?,
                operation: String::from_utf8_lossy(row.try_get(4)?).into_owned(),
                read_at: row.try_get(5)?,
                orphan_retention: row.try_get(6)?,
                created: row.try_get(7)?,
            })
        }

        fn read_entry_row(row: &$row) -> Result<$crate::inspect::EntryRow, $crate::SqlError> {
            Ok($crate::inspect::EntryRow {
                id: row.try_get(0)?,
                token: row.try_get(1)?,
                fingerprint: row.try_get(2)?,
                generation: row.try_get(3)?,
                lease_ends: row.try_get(4)?,
                expires: row.try_get(5)?,
                created: row.try_get(6)?,
                completed: row.try_get(7)?,
                // Another program may have written bytes that are no text.
                owner: String::from_utf8_lossy(row.try_get(8)?).into_owned(),
                operation: String::from_utf8_lossy(row.try_get(9)?).into_owned(),
                has_checkpoint: row.try_get(10)?,
                record: row.try_get(11)?,
                record_len: row.try_get(12)?,
                now: row.try_get(13)?,
            })
        }
    };
}

#[cfg(any(feature = "mysql", feature = "sqlite"))]
pub(crate) use define_row_readers;
