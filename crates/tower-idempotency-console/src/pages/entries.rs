//! `/entries`: a page of a listing, with filters as GET parameters.

use std::{collections::HashSet, sync::Arc, time::Duration};

use askama::Template;
use axum::{
    extract::{RawQuery, State},
    response::Response,
};
use http::StatusCode;
use tokio::time::Instant;
use tower_idempotency::inspect::{Entry, Inspect as _, PageToken, State as EntryState};

use super::{Choice, Row, choices, html, label};
use crate::{
    console::Shared,
    describe::decisions_in,
    error::PageError,
    filters,
    guard::Visit,
    live::STATES,
    params::{Filters, PAGE, Params},
};

#[derive(Template)]
#[template(path = "entries.html")]
struct EntriesPage {
    visit: Visit,
    filters: Filters,
    states: Vec<StateOption>,
    label: &'static str,
    is_listed: bool,
    rows: Vec<Row>,
    /// Decisions for the ticked rows.
    choices: Vec<Choice>,
    back: String,
    /// The query of the next page. Empty after the last one.
    next: String,
    is_first: bool,
    /// The query of the first page.
    first: String,
}

struct StateOption {
    name: &'static str,
    label: &'static str,
    is_selected: bool,
}

/// Returns up to a page of entries. A store may examine many entries for each match, so this takes several calls, for at
/// most two seconds.
pub(crate) async fn page(
    shared: &Shared,
    filters: &Filters,
) -> Result<(Vec<Entry>, Option<PageToken>), PageError> {
    let deadline = Instant::now() + Duration::from_secs(2);
    let limit = usize::from(filters.limit);
    let mut query = filters.query();
    let (mut entries, mut listed) = (Vec::new(), HashSet::new());
    loop {
        let page = shared.call(shared.inspector.list(&query)).await?;
        // A listing in the order of lease ends repeats an entry whose lease is renewed between two pages.
        let new = page.entries.into_iter();
        entries.extend(new.filter(|entry| listed.insert(*entry.id())));
        match page.next {
            Some(next) if entries.len() < limit && Instant::now() < deadline => {
                let rest = limit - entries.len();
                let rest = u16::try_from(rest).unwrap_or(PAGE);
                query = query.with_limit(rest).with_page(Some(next));
            }
            next => return Ok((entries, next)),
        }
    }
}

pub(crate) async fn entries(
    State(shared): State<Arc<Shared>>,
    visit: Visit,
    RawQuery(query): RawQuery,
) -> Result<Response, PageError> {
    let filters = Filters::parse(&Params::parse(query.unwrap_or_default().as_bytes()))?;
    let is_listed = shared.inspector.abilities().can_list(filters.state);
    let (entries, next) = if is_listed {
        page(&shared, &filters).await?
    } else {
        (Vec::new(), None)
    };
    let next = next.map(|next| {
        let next = Filters {
            after: Some(next),
            ..filters.clone()
        };
        next.to_query()
    });
    let first = Filters {
        after: None,
        ..filters.clone()
    };
    let states = STATES.map(|state| StateOption {
        name: state.name(),
        label: label(state),
        is_selected: state == filters.state,
    });
    // A response differs from entry to entry, and is recorded on the page of one entry.
    let mut choices = choices(decisions_in(filters.state));
    choices.retain(|it| it.name != "complete");
    let page = EntriesPage {
        states: states.into(),
        label: label(filters.state),
        is_listed,
        rows: entries.iter().map(Row::from).collect(),
        choices: if filters.state == EntryState::Unreadable {
            Vec::new()
        } else {
            choices
        },
        back: filters.to_query(),
        next: next.unwrap_or_default(),
        is_first: filters.after.is_none(),
        first: first.to_query(),
        filters,
        visit,
    };
    Ok(html(StatusCode::OK, &page))
}
