//! The name of a layer: a label of its metrics, and a field of its events.

use std::sync::Arc;
#[cfg(feature = "metrics")]
use std::sync::OnceLock;

use crate::error::ConfigError;
#[cfg(feature = "metrics")]
use crate::metrics::LayerKeys;

/// The name of a layer, if it has one. Clones share it.
#[derive(Clone, Default)]
pub(crate) struct LayerName(Option<Arc<Named>>);

/// A name, and the series of the metrics that have it.
struct Named {
    name: Box<str>,
    #[cfg(feature = "metrics")]
    keys: Arc<LayerKeys>,
    #[cfg(feature = "metrics")]
    at_request: OnceLock<()>,
}

/// Largest number of characters of a name.
const MAX_LEN: usize = 64;

impl LayerName {
    /// Creates a name, and registers the metrics that have it.
    pub(crate) fn new(name: &str) -> Result<Self, ConfigError> {
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
        if name.is_empty() || name.len() > MAX_LEN || !name.bytes().all(is_allowed) {
            return Err(ConfigError::new(
                "a name of 1 to 64 characters of a-z, A-Z, 0-9, _, . and -",
                format!("{name:?}"),
            ));
        }
        let named = Named {
            name: Box::from(name),
            #[cfg(feature = "metrics")]
            keys: LayerKeys::new(name),
            #[cfg(feature = "metrics")]
            at_request: OnceLock::new(),
        };
        #[cfg(feature = "metrics")]
        named.keys.register();
        Ok(Self(Some(Arc::new(named))))
    }

    /// Returns the name, for events.
    pub(crate) fn as_str(&self) -> Option<&str> {
        self.0.as_ref().map(|named| &*named.name)
    }
}

#[cfg(feature = "metrics")]
impl LayerName {
    /// Returns the keys of the series that have the name, or `None` if the layer has no name.
    pub(crate) fn keys(&self) -> Option<&LayerKeys> {
        self.0.as_ref().map(|named| &*named.keys)
    }

    /// Registers the metrics that have the name at the first call. Any other call is one atomic load.
    pub(crate) fn at_request(&self) {
        if let Some(named) = &self.0 {
            named.at_request.get_or_init(|| named.keys.register());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_few_characters() {
        let longest = "a".repeat(64);
        for name in ["a", "Z", "0", "_", ".", "-", "pay-v1.2_x", &longest] {
            let layer = LayerName::new(name).unwrap();
            assert_eq!(layer.as_str(), Some(name));
        }
        let too_long = "a".repeat(65);
        for name in ["", " ", "a b", "a\"", "a\n", "a/b", "a{b}", "ä", &too_long] {
            let error = LayerName::new(name).err().map(|error| error.to_string());
            let expected = format!(
                "expected a name of 1 to 64 characters of a-z, A-Z, 0-9, _, . and -, found {name:?}"
            );
            assert_eq!(error, Some(expected));
        }
    }
}
