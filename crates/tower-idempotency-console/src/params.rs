//! Fields of queries and forms, and the filters of listings.

use std::time::Duration;

use serde_json::{Map, Value};
use tower_idempotency::inspect::{IdPrefix, PageToken, Query, State};

use crate::error::PageError;

/// Fields of a query or a form, in their order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Params(Vec<(String, String)>);

impl Params {
    pub(crate) fn parse(text: &[u8]) -> Self {
        let pairs = form_urlencoded::parse(text).take(MAX_FIELDS);
        let pairs = pairs.map(|(name, value)| (name.into_owned(), value.into_owned()));
        Self(pairs.collect())
    }

    /// Creates fields from the members of a JSON object: strings, or a number as the status. `null` counts as absent.
    pub(crate) fn from_json(object: &Map<String, Value>) -> Result<Self, PageError> {
        let mut pairs = Vec::new();
        for (name, value) in object {
            let text = match value {
                Value::Null => continue,
                Value::String(text) => text.clone(),
                Value::Number(status) if name == "status" => status.to_string(),
                _ => {
                    return Err(PageError::bad_request(format!(
                        "Expected a string as the member {name}. Nothing was changed."
                    )));
                }
            };
            pairs.push((name.clone(), text));
        }
        Ok(Self(pairs))
    }

    /// Returns an error if a field has another name than these.
    pub(crate) fn check_names(&self, names: &[&str]) -> Result<(), PageError> {
        let mut fields = self.0.iter();
        match fields.find(|(field, _)| !names.contains(&field.as_str())) {
            None => Ok(()),
            Some((field, _)) => Err(PageError::bad_request(format!(
                "Expected only {}, found {field}. Nothing was changed.",
                names.join(", ")
            ))),
        }
    }

    /// Replaces each CRLF by LF in the fields with this name.
    ///
    /// Browsers send each line break of a text area as CRLF.
    pub(crate) fn with_line_feeds(mut self, name: &str) -> Self {
        for (field, value) in &mut self.0 {
            if *field == name {
                *value = value.replace("\r\n", "\n");
            }
        }
        self
    }

    /// Returns the first value that is not empty.
    pub(crate) fn get<'a>(&'a self, name: &'a str) -> Option<&'a str> {
        self.all(name).next()
    }

    /// Returns all values that are not empty.
    pub(crate) fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        let pairs = self.0.iter();
        pairs
            .filter(move |(field, value)| field == name && !value.is_empty())
            .map(|(_, value)| value.as_str())
    }

    /// Returns the filters of the listing from which this form was opened.
    pub(crate) fn back(&self) -> String {
        let query = self.get("back").unwrap_or_default();
        let filters = Filters::parse(&Self::parse(query.as_bytes()));
        filters.map_or_else(|_| String::new(), |filters| filters.to_query())
    }
}

/// Filters of a listing.
#[derive(Clone, Debug)]
pub(crate) struct Filters {
    pub(crate) state: State,
    pub(crate) older: Option<Duration>,
    pub(crate) operation: String,
    pub(crate) owner: String,
    pub(crate) id: Option<IdPrefix>,
    pub(crate) limit: u16,
    pub(crate) after: Option<PageToken>,
}

impl Filters {
    /// The names of the fields.
    pub(crate) const NAMES: [&str; 7] = [
        "state",
        "older",
        "operation",
        "owner",
        "id",
        "limit",
        "after",
    ];

    pub(crate) fn new(state: State) -> Self {
        Self {
            state,
            older: None,
            operation: String::new(),
            owner: String::new(),
            id: None,
            limit: PAGE,
            after: None,
        }
    }

    pub(crate) fn parse(params: &Params) -> Result<Self, PageError> {
        let mut filters = Self::new(State::NeedsAttention);
        if let Some(state) = params.get("state") {
            let listed = state.parse().ok().filter(|it| *it != State::Unreadable);
            filters.state = listed.ok_or_else(|| {
                PageError::bad_request(
                    "Expected in-progress, orphaned, needs-attention or completed as the state.",
                )
            })?;
        }
        if let Some(older) = params.get("older") {
            let older = humantime::parse_duration(older.trim());
            filters.older = Some(older.map_err(|_| {
                PageError::bad_request("Expected a duration as in 10m or 1h 30m as the age.")
            })?);
        }
        if let Some(id) = params.get("id") {
            let id = id.trim().parse();
            filters.id = Some(id.map_err(|_| {
                PageError::bad_request("Expected 8 to 64 hexadecimal digits as the id.")
            })?);
        }
        for (name, field) in [
            ("operation", &mut filters.operation),
            ("owner", &mut filters.owner),
        ] {
            let text = params.get(name).unwrap_or_default();
            if text.len() > MAX_TEXT {
                return Err(PageError::bad_request(format!(
                    "Expected at most {MAX_TEXT} bytes as the {name}."
                )));
            }
            text.clone_into(field);
        }
        if let Some(limit) = params.get("limit") {
            let limit = limit.parse().ok().filter(|it| (1..=PAGE).contains(it));
            filters.limit = limit.ok_or_else(|| {
                PageError::bad_request(format!("Expected 1 to {PAGE} as the limit."))
            })?;
        }
        if let Some(after) = params.get("after") {
            let after = after.parse();
            filters.after = Some(after.map_err(|_| {
                PageError::bad_request("Expected the page token of an earlier page.")
            })?);
        }
        Ok(filters)
    }

    pub(crate) fn query(&self) -> Query {
        let mut query = Query::new(self.state).with_limit(self.limit);
        if let Some(older) = self.older {
            query = query.with_older_than(older);
        }
        if !self.operation.is_empty() {
            query = query.with_operation(self.operation.as_str());
        }
        if !self.owner.is_empty() {
            query = query.with_owner(self.owner.as_str());
        }
        if let Some(id) = self.id {
            query = query.with_id_prefix(id);
        }
        query.with_page(self.after.clone())
    }

    pub(crate) fn older_text(&self) -> String {
        let older = self.older.map(humantime::format_duration);
        older.map(|older| older.to_string()).unwrap_or_default()
    }

    pub(crate) fn id_text(&self) -> String {
        self.id.map(|id| id.to_string()).unwrap_or_default()
    }

    /// Returns the filters as a query.
    pub(crate) fn to_query(&self) -> String {
        let mut query = form_urlencoded::Serializer::new(String::new());
        query.append_pair("state", self.state.name());
        for (name, value) in [
            ("older", self.older_text()),
            ("operation", self.operation.clone()),
            ("owner", self.owner.clone()),
            ("id", self.id_text()),
        ] {
            if !value.is_empty() {
                query.append_pair(name, &value);
            }
        }
        if self.limit != PAGE {
            query.append_pair("limit", &self.limit.to_string());
        }
        if let Some(after) = &self.after {
            query.append_pair("after", &after.to_string());
        }
        query.finish()
    }
}

/// Largest number of entries of a page, and of rows that one request resolves.
pub(crate) const PAGE: u16 = 50;
const MAX_TEXT: usize = 16 * 1024;
const MAX_FIELDS: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    fn filters(query: &str) -> Result<Filters, PageError> {
        Filters::parse(&Params::parse(query.as_bytes()))
    }

    #[test]
    fn query_of_filters_parses_back() {
        let query =
            "state=in-progress&older=10m&operation=POST+%2Fa%26b&owner=h%3A1&id=01234567&limit=7";
        let parsed = filters(query).unwrap();
        assert_eq!(parsed.to_query(), query);
        assert_eq!(parsed.operation, "POST /a&b");
    }

    #[test]
    fn invalid_filters_are_rejected() {
        for query in [
            "state=unreadable",
            "state=x",
            "older=soon",
            "id=0123",
            "limit=0",
            "limit=51",
            "limit=-1",
            "limit=65537",
            "after=x",
            &format!("owner={}", "x".repeat(MAX_TEXT + 1)),
        ] {
            let error = filters(query).unwrap_err();
            assert_eq!(error.status, 400, "{query}");
        }
    }

    #[test]
    fn back_contains_filters_alone() {
        let back = |text: &str| Params::parse(text.as_bytes()).back();
        assert_eq!(back("back=state%3Dorphaned%26x%3D1"), "state=orphaned");
        assert_eq!(back("back=//evil.example"), "state=needs-attention");
        assert_eq!(back("back=state%3Dx"), "");
    }
}
