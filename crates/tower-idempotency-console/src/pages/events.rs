//! `/events`: the counts as server-sent events. All browsers share one query.

use std::{convert::Infallible, sync::Arc, time::Duration};

use askama::Template as _;
use axum::{
    extract::{RawQuery, State},
    response::{
        IntoResponse as _, Response,
        sse::{Event, KeepAlive, Sse},
    },
};
use futures_util::stream;
use http::{HeaderValue, StatusCode, header::CACHE_CONTROL};
use tokio::time::Instant;

use super::overview::LivePart;
use crate::{console::Shared, error::PageError, live::Watch};

/// A browser reconnects after this time, so that the access hook decides again.
const MAX_STREAM: Duration = Duration::from_secs(300);

pub(crate) async fn events(
    State(shared): State<Arc<Shared>>,
    RawQuery(query): RawQuery,
) -> Result<Response, PageError> {
    let Some(watch) = shared.live.watch() else {
        return Err(PageError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "Too many browsers watch this console.",
        ));
    };
    // Links of the fragment are relative to the page that shows it.
    let base = match query.as_deref() {
        Some("") | None => "./".to_owned(),
        Some(query) => {
            let segment = query.strip_prefix("from=").unwrap_or_default();
            let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~%".contains(&byte);
            if segment.is_empty() || segment.len() > 255 || !segment.bytes().all(is_plain) {
                return Err(PageError::bad_request(
                    "Expected the last segment of the page.",
                ));
            }
            format!("./{segment}/")
        }
    };
    // The stream must not keep the router alive.
    let weak = Arc::downgrade(&shared);
    drop(shared);
    let end = Instant::now() + MAX_STREAM;
    let state = (weak, watch, base);
    let stream = stream::unfold(state, move |(weak, mut watch, base)| async move {
        loop {
            let Watch { snapshot, closed } = &mut watch;
            tokio::select! {
                biased;
                _ = closed.wait_for(|closed| *closed) => return None,
                () = tokio::time::sleep_until(end) => return None,
                changed = snapshot.changed() => changed.ok()?,
            }
            let shared = weak.upgrade()?;
            let Some(counts) = watch.snapshot.borrow_and_update().clone() else {
                continue;
            };
            let html = LivePart::new(&shared, &counts, &base).render().ok()?;
            drop(shared);
            let event = Event::default().event("counts").data(html);
            return Some((Ok::<_, Infallible>(event), (weak, watch, base)));
        }
    });
    let events = Sse::new(stream).keep_alive(KeepAlive::default());
    let mut res = events.into_response();
    res.headers_mut()
        .insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(res)
}
