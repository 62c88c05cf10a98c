use std::time::Duration;

use super::{Entry, IdPrefix, InspectError, InspectErrorKind, PageToken, State};
use crate::digest::FieldDigest;

/// Selection of entries for [`Inspect::list`](super::Inspect::list): one state, optional filters, and a page.
///
/// ```
/// use std::time::Duration;
/// use tower_idempotency::inspect::{Query, State};
///
/// let stuck = Query::overdue(Duration::from_secs(600)).with_operation("POST /payments").with_limit(20);
/// assert_eq!(stuck.state(), State::InProgress);
/// assert_eq!(Query::new(State::Orphaned).limit(), 50);
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct Query {
    state: State,
    older_than: Option<Duration>,
    operation: Option<Box<str>>,
    owner: Option<Box<str>>,
    id_prefix: Option<IdPrefix>,
    limit: u16,
    page: Option<PageToken>,
}

impl Query {
    /// Selects all entries in this state, 50 on each page.
    pub const fn new(state: State) -> Self {
        Self {
            state,
            older_than: None,
            operation: None,
            owner: None,
            id_prefix: None,
            limit: 50,
            page: None,
        }
    }

    /// Selects the entries that have been in progress for longer than `expected`. Their handlers hang or are slow.
    pub const fn overdue(expected: Duration) -> Self {
        let mut query = Self::new(State::InProgress);
        query.older_than = Some(expected);
        query
    }

    /// Selects entries whose [age](Entry::age) is more than `age`. Default: every age.
    pub fn with_older_than(mut self, age: Duration) -> Self {
        self.older_than = Some(age);
        self
    }

    /// Selects entries whose operation begins with this text, such as `POST /payments`. Default: every operation.
    pub fn with_operation(mut self, prefix: impl Into<Box<str>>) -> Self {
        self.operation = Some(prefix.into());
        self
    }

    /// Selects entries of this owner: a host and process. Default: every owner.
    pub fn with_owner(mut self, owner: impl Into<Box<str>>) -> Self {
        self.owner = Some(owner.into());
        self
    }

    /// Selects entries whose ID begins with these digits. Default: every ID.
    pub fn with_id_prefix(mut self, prefix: IdPrefix) -> Self {
        self.id_prefix = Some(prefix);
        self
    }

    /// Sets the maximum number of entries of a page, from 1 to 1,000; other values count as the nearest of these. Default:
    /// 50.
    pub fn with_limit(mut self, limit: u16) -> Self {
        self.limit = limit.clamp(1, 1_000);
        self
    }

    /// Continues after this page. Default: the first page.
    pub fn with_page(mut self, page: Option<PageToken>) -> Self {
        self.page = page;
        self
    }

    /// Returns the state.
    #[must_use]
    pub const fn state(&self) -> State {
        self.state
    }

    /// Returns the age above which entries are selected.
    #[must_use]
    pub const fn older_than(&self) -> Option<Duration> {
        self.older_than
    }

    /// Returns the text with which the operation begins.
    #[must_use]
    pub fn operation(&self) -> Option<&str> {
        self.operation.as_deref()
    }

    /// Returns the owner.
    #[must_use]
    pub fn owner(&self) -> Option<&str> {
        self.owner.as_deref()
    }

    /// Returns the digits with which the ID begins.
    #[must_use]
    pub const fn id_prefix(&self) -> Option<&IdPrefix> {
        self.id_prefix.as_ref()
    }

    /// Returns the maximum number of entries of a page: 1 to 1,000.
    #[must_use]
    pub const fn limit(&self) -> u16 {
        self.limit
    }

    /// Returns the token of the page, or `None` for the first one.
    #[must_use]
    pub const fn page(&self) -> Option<&PageToken> {
        self.page.as_ref()
    }

    /// Returns `true` if the entry has the state and passes all filters. An unreadable entry only needs the ID.
    ///
    /// For implementors, whose index may return entries that do not match.
    #[must_use]
    pub fn matches(&self, entry: &Entry) -> bool {
        if self
            .id_prefix
            .is_some_and(|prefix| !prefix.matches(entry.id()))
        {
            return false;
        }
        if entry.state() == State::Unreadable {
            return true;
        }
        entry.state() == self.state
            && self.older_than.is_none_or(|age| entry.age > age)
            && self.owner().is_none_or(|owner| *entry.owner == *owner)
            && self
                .operation()
                .is_none_or(|prefix| entry.operation.starts_with(prefix))
    }

    /// Returns the digest of a store and of all parts of the query that every page has in common.
    fn digest(&self, store: &str) -> [u8; 8] {
        let mut hash = FieldDigest::new(None);
        hash.field(b"page")
            .field(store.as_bytes())
            .field(&[self.state.code()]);
        let older_than = self.older_than.map(|age| age.as_nanos().to_le_bytes());
        let id_prefix = self.id_prefix.map(|prefix| prefix.to_string());
        for filter in [
            older_than.as_ref().map(<[u8; 16]>::as_slice),
            self.operation().map(str::as_bytes),
            self.owner().map(str::as_bytes),
            id_prefix.as_deref().map(str::as_bytes),
        ] {
            hash.number(filter.map_or(0, |_| 1))
                .field(filter.unwrap_or_default());
        }
        let [a, b, c, d, e, f, g, h, ..] = hash.finish();
        [a, b, c, d, e, f, g, h]
    }
}

impl PageToken {
    /// Creates the token for the page after `position`. For implementors.
    ///
    /// `store` names the store and its table, such as `postgres payments`, so that no other store accepts the token.
    ///
    /// # Panics
    ///
    /// If the position has more than [`MAX_POSITION`](Self::MAX_POSITION) bytes, which is a bug of the implementor.
    #[must_use]
    pub fn new(store: &str, query: &Query, position: &[u8]) -> Self {
        assert!(
            position.len() <= Self::MAX_POSITION,
            "the position is too long"
        );
        Self {
            origin: query.digest(store),
            position: position.into(),
        }
    }

    /// Returns the position, if the token belongs to this store and this query. For implementors.
    ///
    /// An operator can edit the text of a token, so the position can be any bytes.
    ///
    /// # Errors
    ///
    /// [`InvalidPage`](InspectErrorKind::InvalidPage).
    pub fn position(&self, store: &str, query: &Query) -> Result<&[u8], InspectError> {
        if self.origin == query.digest(store) {
            Ok(&self.position)
        } else {
            Err(InspectError::new(InspectErrorKind::InvalidPage))
        }
    }
}
