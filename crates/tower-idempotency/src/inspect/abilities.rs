use super::{InspectError, InspectErrorKind, Query, State};

/// The states that a store lists, and the details that it stores with an entry.
///
/// Every store reads and resolves each of its entries. A listing needs an index, which a store may not have for every state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abilities {
    unlisted: u8,
    details: bool,
    purge: bool,
}

impl Abilities {
    /// Returns the abilities of a store that lists every state, stores owner and operation, and purges expired entries.
    #[must_use]
    pub const fn all() -> Self {
        Self {
            unlisted: 0,
            details: true,
            purge: true,
        }
    }

    /// Removes the ability to list this state.
    #[must_use]
    pub const fn without_list(self, state: State) -> Self {
        Self {
            unlisted: self.unlisted | state.bit(),
            ..self
        }
    }

    /// Removes owner and operation. They are then empty in every entry.
    #[must_use]
    pub const fn without_details(self) -> Self {
        Self {
            details: false,
            ..self
        }
    }

    /// Removes the ability to purge: the backend deletes expired entries itself.
    #[must_use]
    pub const fn without_purge(self) -> Self {
        Self {
            purge: false,
            ..self
        }
    }

    /// Returns `true` if the store lists the entries of this state. No store has a list of its unreadable entries.
    #[must_use]
    pub const fn can_list(self, state: State) -> bool {
        !matches!(state, State::Unreadable) && self.unlisted & state.bit() == 0
    }

    /// Returns `true` if the store stores the owner and the operation of an entry.
    #[must_use]
    pub const fn has_details(self) -> bool {
        self.details
    }

    /// Returns `true` if [`purge`](super::Inspect::purge) deletes expired entries.
    #[must_use]
    pub const fn can_purge(self) -> bool {
        self.purge
    }

    /// Returns an error unless the store lists the state of the query. Implementors call it first.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](InspectErrorKind::Unsupported).
    pub fn check(self, query: &Query) -> Result<(), InspectError> {
        if self.can_list(query.state()) {
            Ok(())
        } else {
            Err(InspectError::new(InspectErrorKind::Unsupported))
        }
    }
}
