use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Write},
    path::Path,
    sync::{Mutex, MutexGuard, PoisonError},
};

use serde::{Deserialize, Serialize};

/// What the provider was asked for, by key: a file with a line of JSON for each, which survives the provider.
#[derive(Debug)]
pub struct Ledger(Mutex<Inner>);

#[derive(Debug)]
struct Inner {
    file: File,
    charges: Vec<Charge>,
    /// The keys of so many of them are not known any more.
    forgotten: usize,
}

/// What became of a key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::exhaustive_structs, reason = "of an example")]
pub struct Charge {
    /// The provider's name for it.
    pub name: String,
    /// Under which it was asked for.
    pub key: String,
    /// Which card.
    pub card: String,
    /// In cents.
    pub amount: i64,
    /// Whether the card was declined, and nothing was charged.
    pub declined: bool,
}

impl Ledger {
    /// Opens the file at `path`, or makes it.
    ///
    /// # Errors
    ///
    /// When it cannot be opened, or is no ledger.
    pub fn open(path: &Path) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        let mut file = options.read(true).append(true).create(true).open(path)?;
        let mut text = String::new();
        file.read_to_string(&mut text)?;
        // A line without its end was never answered for.
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

    /// Charges `card`, unless this key has been used: then says again what became of it. `None` where it was used for
    /// something else. Cards whose name begins with `declined` are.
    ///
    /// # Errors
    ///
    /// When the file cannot be written: nothing is charged.
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

    /// Knows no key any more, until it is opened again.
    pub fn forget(&self) {
        let mut inner = self.inner();
        inner.forgotten = inner.charges.len();
    }

    /// All that it was asked for, in that order.
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
    use std::{env, fs, process};

    use super::*;

    #[test]
    fn a_key_is_charged_once_by_whoever_opens_the_ledger() {
        let path = env::temp_dir().join(format!("rocket-rides-ledger-{}", process::id()));
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

        // Killed in the middle of a line.
        let mut text = fs::read_to_string(&path).unwrap();
        text.push_str("{\"name\":");
        fs::write(&path, text).unwrap();
        let ledger = Ledger::open(&path).unwrap();
        assert_eq!(ledger.charge("k", "card-1", 5).unwrap(), Some(first));
        ledger.charge("m", "card-1", 5).unwrap();
        let ledger = Ledger::open(&path).unwrap();
        fs::remove_file(&path).unwrap();
        assert_eq!(ledger.charges().len(), 3);
    }
}
