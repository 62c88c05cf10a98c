use std::fmt;

use serde::{Serialize, de::DeserializeOwned};
use tower_idempotency::Lease;

use crate::{SqlError, SqlStore, TransactionError, TransactionErrorKind, bounded::bounded};

/// How far an execution came: a name, and what the next execution has to know.
///
/// Written by [`FencedTransaction::checkpoint`](crate::FencedTransaction::checkpoint) in the transaction of a phase, and read by whoever takes
/// the request over.
#[derive(Clone, PartialEq, Eq)]
pub struct Checkpoint {
    name: String,
    json: Vec<u8>,
}

impl Checkpoint {
    pub(crate) fn new(name: &str, data: &impl Serialize) -> Result<Self, TransactionError> {
        if !is_name(name) {
            return Err(TransactionErrorKind::Checkpoint.into());
        }
        let json = serde_json::to_vec(data);
        // What serde says may quote the data.
        let json = json.map_err(|_| TransactionErrorKind::Checkpoint)?;
        Ok(Self {
            name: name.to_owned(),
            json,
        })
    }

    /// As [`PostgresStore::checkpoint`](crate::PostgresStore::checkpoint) and its likes, for code that is generic over
    /// stores.
    ///
    /// # Errors
    ///
    /// As there.
    ///
    /// # Cancellation
    ///
    /// As there.
    pub async fn last<S: SqlStore>(
        store: &S,
        lease: &Lease,
    ) -> Result<Option<Self>, TransactionError> {
        let lease = lease.lease_ref();
        match bounded(store.read_checkpoint(&lease, false)).await {
            Ok(Some(checkpoint)) => Ok(checkpoint),
            Ok(None) => Err(TransactionErrorKind::LeaseLost.into()),
            Err(error) => Err(TransactionError::database(error)),
        }
    }

    pub(crate) fn stored(name: String, json: Option<Vec<u8>>) -> Self {
        Self {
            name,
            json: json.unwrap_or_default(),
        }
    }

    /// Which it is.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What was given with it.
    ///
    /// # Errors
    ///
    /// When it is of another form, as after a release that changed it. The error quotes nothing; [`json`](Self::json) has
    /// it as it is.
    pub fn data<T: DeserializeOwned>(&self) -> Result<T, SqlError> {
        let data = serde_json::from_slice(&self.json);
        data.map_err(|_| SqlError::unreadable("a checkpoint's data of another form than expected"))
    }

    /// What was given with it, as it is stored.
    #[must_use]
    pub fn json(&self) -> &[u8] {
        &self.json
    }
}

/// Shows no data.
impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checkpoint")
            .field("name", &self.name)
            .field("bytes", &self.json.len())
            .finish()
    }
}

/// The same in every database, whatever its encoding.
fn is_name(name: &str) -> bool {
    let is_sign =
        |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b':' | b'/');
    (1..=LONGEST_NAME).contains(&name.len()) && name.bytes().all(is_sign)
}

const LONGEST_NAME: usize = 128;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_gives_back_what_it_was_given() {
        let checkpoint = Checkpoint::new("ride-created", &(7, "a")).unwrap();
        assert_eq!(checkpoint.name(), "ride-created");
        assert_eq!(checkpoint.data::<(u8, String)>().unwrap(), (7, "a".into()));
        assert_eq!(checkpoint.json(), b"[7,\"a\"]");
    }

    #[test]
    fn neither_its_form_nor_its_errors_show_data() {
        let checkpoint = Checkpoint::new("phase", &"hush").unwrap();
        assert!(!format!("{checkpoint:?}").contains("hush"));
        let error = checkpoint.data::<u64>().unwrap_err();
        assert!(!format!("{error} {error:?}").contains("hush"));
    }

    #[test]
    fn names_are_short_and_plain() {
        assert!(Checkpoint::new("phase/2:paid_a.b", &()).is_ok());
        let long = "a".repeat(129);
        for name in ["", "two words", "a\\b", "a'b", "schlüssel", "a\n", &long] {
            let error = Checkpoint::new(name, &()).unwrap_err();
            assert_eq!(error.kind(), TransactionErrorKind::Checkpoint);
        }
    }
}
