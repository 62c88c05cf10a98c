use std::fmt;

use serde::{Serialize, de::DeserializeOwned};

use crate::{SqlError, TransactionError, TransactionErrorKind};

/// Progress of an execution: a name, and data for the next execution.
///
/// [`FencedTransaction::checkpoint`](crate::FencedTransaction::checkpoint) writes it in the transaction of a phase. An
/// execution that takes the request over reads it.
#[derive(Clone, PartialEq, Eq)]
pub struct Checkpoint {
    name: String,
    json: Vec<u8>,
}

impl Checkpoint {
    pub(crate) fn new(name: &str, data: &impl Serialize) -> Result<Self, TransactionError> {
        if !is_valid_name(name) {
            return Err(TransactionErrorKind::Checkpoint.into());
        }
        let json = serde_json::to_vec(data);
        // The error of serde may quote the data.
        let json = json.map_err(|_| TransactionErrorKind::Checkpoint)?;
        Ok(Self {
            name: name.to_owned(),
            json,
        })
    }

    pub(crate) fn from_stored(name: String, json: Option<Vec<u8>>) -> Self {
        Self {
            name,
            json: json.unwrap_or_default(),
        }
    }

    /// Returns the name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the data that was stored with the checkpoint.
    ///
    /// # Errors
    ///
    /// If the data has another type, for example after a release that changed the type. The error quotes no data.
    /// [`json`](Self::json) returns the data unparsed.
    pub fn data<T: DeserializeOwned>(&self) -> Result<T, SqlError> {
        let data = serde_json::from_slice(&self.json);
        data.map_err(|_| SqlError::unreadable("checkpoint data of an unexpected type"))
    }

    /// Returns the data as the stored JSON.
    #[must_use]
    pub fn json(&self) -> &[u8] {
        &self.json
    }
}

/// Shows the size of the data only.
impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checkpoint")
            .field("name", &self.name)
            .field("bytes", &self.json.len())
            .finish()
    }
}

/// Returns `true` for a name of ASCII characters that every database encoding has.
fn is_valid_name(name: &str) -> bool {
    let is_valid_byte =
        |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b':' | b'/');
    (1..=MAX_NAME_LENGTH).contains(&name.len()) && name.bytes().all(is_valid_byte)
}

const MAX_NAME_LENGTH: usize = 128;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checkpoint_returns_name_and_data() {
        let checkpoint = Checkpoint::new("ride-created", &(7, "a")).unwrap();
        assert_eq!(checkpoint.name(), "ride-created");
        assert_eq!(checkpoint.data::<(u8, String)>().unwrap(), (7, "a".into()));
        assert_eq!(checkpoint.json(), b"[7,\"a\"]");
    }

    #[test]
    fn debug_and_errors_redact_data() {
        let checkpoint = Checkpoint::new("phase", &"hush").unwrap();
        assert!(!format!("{checkpoint:?}").contains("hush"));
        let error = checkpoint.data::<u64>().unwrap_err();
        assert!(!format!("{error} {error:?}").contains("hush"));
        assert_eq!(
            error.to_string(),
            "the database returned checkpoint data of an unexpected type"
        );
    }

    #[test]
    fn invalid_names_are_rejected() {
        assert!(Checkpoint::new("phase/2:paid_a.b", &()).is_ok());
        let long = "a".repeat(129);
        for name in ["", "two words", "a\\b", "a'b", "schlüssel", "a\n", &long] {
            let error = Checkpoint::new(name, &()).unwrap_err();
            assert_eq!(error.kind(), TransactionErrorKind::Checkpoint);
        }
    }
}
