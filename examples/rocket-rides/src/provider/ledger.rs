use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Write},
    path::Path,
    sync::{Mutex, MutexGuard, PoisonError},
};

use serde::{Deserialize, Serialize};

/// The requests to the provider, by key: a file with a line of JSON for each, which survives the provider's process.
#[derive(Debug)]
pub struct Ledger(Mutex<Inner>);

#[derive(Debug)]
struct Inner {
    file: File,
    charges: Vec<Charge>,
    /// The number of charges, from the first on, whose keys the provider no longer stores.
    forgotten: usize,
}

/// The outcome of a key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::exhaustive_structs, reason = "of an example")]
pub struct Charge {
    /// The provider's name for the charge.
    pub name: String,
    /// The idempotency key of the request.
    pub key: String,
    /// The card.
    pub card: String,
    /// The amount in cents.
    pub amount: i64,
    /// `true` if the card was declined, and nothing was charged.
    pub declined: bool,
}

impl Ledger {
    /// Opens the file at `path`, or creates it.
    ///
    /// # Errors
    ///
    /// Returns an error if the file cannot be opened, or is no ledger.
    pub fn open(path: &Path) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        let mut file = options.read(true).append(true).create(true).open(path)?;
        let mut text = String::new();
        file.read_to_string(&mut text)?;
        // An incomplete line has had no response.
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        file.set_len(whole as u64)?;
        let charges = text[..whole].lines().map(serde_json::from_str);
        let charges = charges.collect::<Result<_, _>>()?;
        Ok(Self(Mutex::new(Inner {
            file,
            charges,
            forgotten: 0,
        })))
    }

    /// Charges `card`, unless this key has been used: then returns the earlier outcome. Returns `None` if the key was used
    /// for another request. A card is declined if its name begins with `declined`.
    ///
    /// # Errors
    ///
    /// Returns an error if the file cannot be written: nothing is charged.
    pub fn charge(&self, key: &str, card: &str, amount: i64) -> io::Result<Option<Charge>> {
        let mut inner = self.inner();
        if let Some(charge) = inner.charges[inner.forgotten..]
            .iter()
            .find(|charge| charge.key == key)
        {
            let is_same = charge.card == card && charge.amount == amount;
            return Ok(is_same.then(|| charge.clone()));
        }
        let charge = Charge {
            name: format!("charge-{}", inner.charges.len() + 1),
            key: key.to_owned(),
            card: card.to_owned(),
            amount,
            declined: card.starts_with("declined"),
        };
        let line = serde_json::to_string(&charge)? + "\n";
        inner.file.write_all(line.as_bytes())?;
        inner.charges.push(charge.clone());
        Ok(Some(charge))
    }

    /// Ignores all stored keys, until the ledger is opened again.
    pub fn forget(&self) {
        let mut inner = self.inner();
        inner.forgotten = inner.charges.len();
    }

    /// Returns all charges in the order of their requests.
    #[must_use]
    pub fn charges(&self) -> Vec<Charge> {
        self.inner().charges.clone()
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use ::tests::scratch::Scratch;

    use super::*;

    #[test]
    fn key_is_charged_once_across_reopened_ledgers() {
        let scratch = Scratch::new();
        let path = scratch.file("ledger");
        let ledger = Ledger::open(&path).unwrap();
        let first = ledger.charge("k", "card-1", 5).unwrap().unwrap();
        assert_eq!(ledger.charge("k", "card-1", 6).unwrap(), None);
        assert_eq!(ledger.charge("k", "card-2", 5).unwrap(), None);
        assert!(
            ledger
                .charge("l", "declined-1", 5)
                .unwrap()
                .unwrap()
                .declined
        );

        // The process was killed in the middle of a line.
        let mut text = fs::read_to_string(&path).unwrap();
        text.push_str("{\"name\":");
        fs::write(&path, text).unwrap();
        let ledger = Ledger::open(&path).unwrap();
        assert_eq!(ledger.charge("k", "card-1", 5).unwrap(), Some(first));
        ledger.charge("m", "card-1", 5).unwrap();
        let ledger = Ledger::open(&path).unwrap();
        assert_eq!(ledger.charges().len(), 3);
    }
}
