use super::{InspectError, InspectErrorKind, Query, State};

/// The states that a store lists, and the details that it stores with an entry.
///
/// Every store reads and resolves each of its entries. A listing needs an index, which a store may not have for every state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abilities {
    unlisted: u8,
    details: bool,
    purge: bool,
    /// Settings with which the store would list a state, by [`State::code`].
    settings: [Option<&'static str>; State::ALL.len()],
}

impl Abilities {
    /// Returns the abilities of a store that lists every state, stores owner and operation, and purges expired entries.
    #[must_use]
    pub const fn all() -> Self {
        Self {
            unlisted: 0,
            details: true,
            purge: true,
            settings: [None; State::ALL.len()],
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

    /// Removes the ability to list this state, which the store has with a setting, such as
    /// `RedisOptions::with_completed_index(true)`. The error of [`check`](Self::check) names the setting.
    #[must_use]
    pub const fn without_list_unless(self, state: State, setting: &'static str) -> Self {
        let mut settings = self.settings;
        settings[state.code() as usize] = Some(setting);
        Self {
            settings,
            ..self.without_list(state)
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

    /// Returns the setting with which the store would list the entries of this state. Returns `None` if it lists them, or if no
    /// setting changes that.
    #[must_use]
    pub const fn setting_to_list(self, state: State) -> Option<&'static str> {
        self.settings[state.code() as usize]
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
    /// [`Unsupported`](InspectErrorKind::Unsupported). If the store lists the state with a setting, the source of the error
    /// names the setting.
    pub fn check(self, query: &Query) -> Result<(), InspectError> {
        let state = query.state();
        if self.can_list(state) {
            return Ok(());
        }
        Err(match self.setting_to_list(state) {
            Some(setting) => InspectError::unsupported_without(setting),
            None => InspectError::new(InspectErrorKind::Unsupported),
        })
    }
}
