//! `/find`: an entry from its first digits, or from a key and its principal.

use std::sync::Arc;

use askama::Template;
use axum::{
    body::Bytes,
    extract::{RawQuery, State},
    response::Response,
};
use http::StatusCode;
use tower_idempotency::inspect::{IdPrefix, Inspect as _, State as EntryState};

use super::{Row, entries, html, label};
use crate::{
    console::Shared,
    describe::ids_of_key,
    error::PageError,
    guard::Visit,
    params::{Filters, Params},
};

#[derive(Template)]
#[template(path = "find.html")]
struct FindPage {
    visit: Visit,
    finds_keys: bool,
    id: String,
    rows: Vec<Row>,
    message: String,
    /// Listings that were not read to their end.
    rest: Vec<Rest>,
}

/// The rest of a listing in which the search stopped.
struct Rest {
    label: &'static str,
    /// The query of the listing that continues.
    query: String,
}

/// Shows the forms, and the entries whose ids begin with the digits.
pub(crate) async fn form(
    State(shared): State<Arc<Shared>>,
    visit: Visit,
    RawQuery(query): RawQuery,
) -> Result<Response, PageError> {
    let params = Params::parse(query.unwrap_or_default().as_bytes());
    let mut page = FindPage {
        visit,
        finds_keys: shared.layer().is_some(),
        id: params.get("id").unwrap_or_default().trim().to_owned(),
        rows: Vec::new(),
        message: String::new(),
        rest: Vec::new(),
    };
    if page.id.is_empty() {
        return Ok(html(StatusCode::OK, &page));
    }
    let prefix: IdPrefix = page
        .id
        .parse()
        .map_err(|_| PageError::bad_request("Expected 8 to 64 hexadecimal digits as the id."))?;
    (page.rows, page.rest) = rows(&shared, prefix).await?;
    if !page.rest.is_empty() {
        page.message =
            "The search is incomplete: the store has more entries than were examined.".to_owned();
    } else if page.rows.is_empty() {
        let lists_all = shared.inspector.abilities().can_list(EntryState::Completed);
        page.message = if prefix.to_key_id().is_some() {
            "The store has no such entry. It was deleted, or has expired."
        } else if lists_all {
            "No listed entry has this id. On Redis and DynamoDB, an entry outside of the index is found by its whole id only."
        } else {
            "No unresolved entry has this id. This store finds a completed entry by its whole id only."
        }
        .to_owned();
    }
    let status = if page.rows.is_empty() && page.rest.is_empty() {
        StatusCode::NOT_FOUND
    } else {
        StatusCode::OK
    };
    Ok(html(status, &page))
}

/// Returns the entries whose IDs begin with these digits, and the listings that were not read to their end.
async fn rows(shared: &Shared, prefix: IdPrefix) -> Result<(Vec<Row>, Vec<Rest>), PageError> {
    if let Some(id) = prefix.to_key_id() {
        let found = shared.call(shared.inspector.get(&id)).await?;
        let rows = found.iter().map(|it| Row::from(&it.entry)).collect();
        return Ok((rows, Vec::new()));
    }
    let (mut rows, mut rest): (Vec<Row>, _) = (Vec::new(), Vec::new());
    for &state in EntryState::ALL {
        if !shared.inspector.abilities().can_list(state) {
            continue;
        }
        let filters = Filters {
            id: Some(prefix),
            ..Filters::new(state)
        };
        let (entries, next) = entries::page(shared, &filters).await?;
        if next.is_some() {
            let filters = Filters {
                after: next,
                ..filters
            };
            rest.push(Rest {
                label: label(state),
                query: filters.to_query(),
            });
        }
        for entry in &entries {
            if rows.iter().all(|row| row.id != entry.id().to_hex()) {
                rows.push(Row::from(entry));
            }
        }
    }
    Ok((rows, rest))
}

/// Finds the entry of a key. The key is in the body of the request, because URLs are logged.
pub(crate) async fn find(
    State(shared): State<Arc<Shared>>,
    visit: Visit,
    body: Bytes,
) -> Result<Response, PageError> {
    let params = Params::parse(&body);
    let Some(layer) = shared.layer() else {
        return Err(PageError::not_found(
            "This console does not know the settings of the service, and finds entries by their ids only.",
        ));
    };
    let Some(key) = params.get("key") else {
        return Err(PageError::bad_request("Expected a key."));
    };
    let principal: Vec<&[u8]> = params.all("principal").map(str::as_bytes).collect();
    let mut rows = Vec::new();
    let ids = ids_of_key(&layer, key, &principal);
    let ids = ids.map_err(|error| PageError::bad_request(error.to_string()))?;
    for id in &ids {
        let found = shared.call(shared.inspector.get(id)).await?;
        rows.extend(found.iter().map(|it| Row::from(&it.entry)));
    }
    let is_found = !rows.is_empty();
    let page = FindPage {
        visit,
        finds_keys: true,
        id: String::new(),
        rows,
        message: if is_found {
            String::new()
        } else if ids.is_empty() {
            "This service does not identify an entry by its key and principal alone. Search for its id.".to_owned()
        } else {
            "The store has no entry of this key and this principal.".to_owned()
        },
        rest: Vec::new(),
    };
    let status = if is_found {
        StatusCode::OK
    } else {
        StatusCode::NOT_FOUND
    };
    Ok(html(status, &page))
}
