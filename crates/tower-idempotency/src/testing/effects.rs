use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, PoisonError},
};

/// Counts of the effects of a handler, by key. Clones share the counts.
///
/// A status does not show how often a handler had its effect: a duplicate that executed may get the right response. So a
/// test counts effects. The handler calls [`add`](Self::add) where it has its effect, and the test calls
/// [`assert_once`](Self::assert_once).
///
/// ```
/// use tower_idempotency::testing::Effects;
///
/// let effects = Effects::new();
/// effects.add("8e03978e-40d5");
/// effects.assert_once(["8e03978e-40d5"]);
/// assert_eq!(effects.count("another"), 0);
/// ```
#[derive(Clone, Debug, Default)]
pub struct Effects {
    counts: Arc<Mutex<BTreeMap<String, u64>>>,
}

impl Effects {
    /// Creates counts of zero.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Counts one effect of this key.
    pub fn add(&self, key: &str) {
        *self.counts().entry(key.to_owned()).or_default() += 1;
    }

    /// Returns the number of effects of this key.
    #[must_use]
    pub fn count(&self, key: &str) -> u64 {
        self.counts().get(key).copied().unwrap_or_default()
    }

    /// Returns the number of effects of all keys.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.counts().values().sum()
    }

    /// Asserts that each of these keys had exactly one effect, and that no other key had any.
    ///
    /// # Panics
    ///
    /// If a key had no effect or several. The message names each such key and its number of effects.
    #[track_caller]
    pub fn assert_once<K: AsRef<str>>(&self, keys: impl IntoIterator<Item = K>) {
        let keys: BTreeSet<_> = keys
            .into_iter()
            .map(|key| key.as_ref().to_owned())
            .collect();
        let counts = self.counts().clone();
        let missing = keys.iter().filter(|key| !counts.contains_key(*key));
        let missing = missing.map(|key| format!("{key:?} had no effect"));
        let others = counts.iter().filter_map(|(key, count)| {
            let is_expected = keys.contains(key);
            match count {
                1 if is_expected => None,
                _ if is_expected => Some(format!("{key:?} had {count} effects")),
                _ => Some(format!("{key:?} had {count} effects, but is not expected")),
            }
        });
        let wrong: Vec<_> = missing.chain(others).collect();
        assert!(
            wrong.is_empty(),
            "expected one effect for each key: {}",
            wrong.join("; ")
        );
    }

    fn counts(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, u64>> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_wrong_key_is_named() {
        let effects = Effects::new();
        for key in ["once", "twice", "twice", "other"] {
            effects.add(key);
        }
        let clone = effects.clone();
        let failed =
            std::panic::catch_unwind(move || clone.assert_once(["once", "twice", "never"]));
        let message = *failed.unwrap_err().downcast::<String>().unwrap();
        assert_eq!(
            message,
            "expected one effect for each key: \"never\" had no effect; \
             \"other\" had 1 effects, but is not expected; \"twice\" had 2 effects"
        );
        assert_eq!((effects.total(), effects.count("twice")), (4, 2));
    }
}
