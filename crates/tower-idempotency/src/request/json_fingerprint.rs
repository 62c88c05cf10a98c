//! The comparison of JSON bodies: numbers by value, and members that do not count.

use std::{fmt, sync::Arc};

use crate::error::ConfigError;

/// Comparison of JSON bodies, for [`FingerprintBy::json`](crate::FingerprintBy::json).
///
/// White space, the order of members and the escapes of strings never count. The order of array items counts, and `null` is not
/// the same as an absent member.
///
/// ```
/// use tower_idempotency::{FingerprintBy, IdempotencyLayer, JsonFingerprint, MemoryStore};
///
/// // Each attempt has another time and another trace.
/// let by = JsonFingerprint::new().without(["/sent_at", "/trace/id"])?.numbers_by_value();
/// let layer = IdempotencyLayer::new(MemoryStore::new()).with_fingerprint(FingerprintBy::json(by));
/// # Ok::<(), tower_idempotency::ConfigError>(())
/// ```
#[derive(Clone, Default)]
#[must_use]
pub struct JsonFingerprint {
    numbers_by_value: bool,
    without: Arc<[Box<[Token]>]>,
}

/// A step of a pointer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Token {
    /// A member. In an array, the item with this index.
    Name(Box<str>),
    /// Each item of an array, or the member `*`.
    Each,
}

impl Token {
    pub(super) fn is_member(&self, name: &str) -> bool {
        match self {
            Self::Name(token) => **token == *name,
            Self::Each => name == "*",
        }
    }

    pub(super) fn is_item(&self, index: usize) -> bool {
        match self {
            // An index has no leading zeros (RFC 6901, section 4).
            Self::Name(token) => {
                token.starts_with(|first: char| first.is_ascii_digit())
                    && **token == *index.to_string()
            }
            Self::Each => true,
        }
    }
}

impl JsonFingerprint {
    /// Compares everything, and numbers by their spelling: `1` is not `1.0`.
    pub fn new() -> Self {
        Self::default()
    }

    /// Compares numbers by their value: `1`, `1.0` and `10e-1` are the same.
    ///
    /// The comparison is exact: numbers of any size are not rounded. Minus zero is zero.
    ///
    /// Do not set it if the handler distinguishes two spellings of one number, such as an integer and a float. The second
    /// spelling then gets the response to the first one.
    pub fn numbers_by_value(self) -> Self {
        Self {
            numbers_by_value: true,
            ..self
        }
    }

    /// Leaves out the values to which these JSON pointers (RFC 6901) lead. Replaces the previous list. Default: none.
    ///
    /// The token `*` stands for each item of an array, and in an object for the member of that name. A pointer that leads
    /// nowhere has no effect. An array item that is left out still counts as an item.
    ///
    /// Leave out only values that have no influence on the effect. A request with another value there gets the recorded
    /// response.
    ///
    /// Do not leave out the `id` of JSON-RPC and MCP. A replay has the id of the first attempt, and clients discard a response
    /// whose id is not that of their request. Such a client must repeat the id in its retry. `/params/_meta` of MCP, which has
    /// the token for the progress, can be left out.
    ///
    /// # Errors
    ///
    /// Returns an error if a pointer is empty, does not begin with `/`, or contains `~` without a `0` or `1` behind it. An
    /// empty pointer would leave out the whole body.
    pub fn without<'a>(
        self,
        pointers: impl IntoIterator<Item = &'a str>,
    ) -> Result<Self, ConfigError> {
        let parsed: Result<Vec<_>, _> = pointers.into_iter().map(parse).collect();
        Ok(Self {
            without: parsed?.into(),
            ..self
        })
    }

    pub(super) fn pointers(&self) -> &[Box<[Token]>] {
        &self.without
    }

    /// Returns the pointers as text.
    pub(crate) fn left_out(&self) -> Vec<String> {
        let text = |token: &Token| match token {
            Token::Name(name) => format!("/{}", name.replace('~', "~0").replace('/', "~1")),
            Token::Each => "/*".to_owned(),
        };
        self.without
            .iter()
            .map(|pointer| pointer.iter().map(text).collect())
            .collect()
    }

    /// Returns `true` if numbers are compared by their value.
    pub(crate) fn is_by_value(&self) -> bool {
        self.numbers_by_value
    }
}

/// Parses a JSON pointer.
fn parse(pointer: &str) -> Result<Box<[Token]>, ConfigError> {
    let wrong = || ConfigError::new("a JSON pointer that begins with /", format!("`{pointer}`"));
    let tokens = pointer.strip_prefix('/').ok_or_else(wrong)?.split('/');
    tokens
        .map(|token| {
            if token == "*" {
                return Ok(Token::Each);
            }
            let escapes = token.split('~').skip(1);
            if escapes
                .into_iter()
                .any(|rest| !rest.starts_with(['0', '1']))
            {
                return Err(wrong());
            }
            Ok(Token::Name(
                token.replace("~1", "/").replace("~0", "~").into(),
            ))
        })
        .collect()
}

impl fmt::Debug for JsonFingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JsonFingerprint")
            .field("numbers_by_value", &self.numbers_by_value)
            .field("without", &self.left_out())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pointers_are_checked() {
        for wrong in ["", "id", "/a~", "/a~2b", "/~/b"] {
            assert!(JsonFingerprint::new().without([wrong]).is_err(), "{wrong}");
        }
        let right = ["/id", "/", "/a~1b/~0", "/items/*/id", "/items/0"];
        assert_eq!(
            JsonFingerprint::new().without(right).unwrap().left_out(),
            right
        );
    }
}
