//! `/events`: the counts as server-sent events. All browsers share one query.

use std::{
    convert::Infallible,
    sync::{Arc, Weak},
    time::Duration,
};

use askama::Template as _;
use axum::{
    extract::{RawQuery, State},
    response::{
        IntoResponse as _, Response,
        sse::{Event, KeepAlive, Sse},
    },
};
use futures_util::stream;
use http::{HeaderName, HeaderValue, StatusCode, header::CACHE_CONTROL};
use tokio::{sync::mpsc, time::timeout};

use super::overview::LivePart;
use crate::{console::Shared, error::PageError, live::Watch};

/// A browser reconnects after this time, so that the access hook decides again.
const MAX_STREAM: Duration = Duration::from_secs(300);
/// Makes nginx forward each event at once.
const ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

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
    let (sender, receiver) = mpsc::channel(1);
    // In a task, because the stream of a browser that reads nothing is not polled.
    tokio::spawn(timeout(MAX_STREAM, send_counts(weak, watch, base, sender)));
    let stream = stream::unfold(receiver, async |mut receiver| {
        let html: String = receiver.recv().await?;
        let event = Event::default().event("counts").data(html);
        Some((Ok::<_, Infallible>(event), receiver))
    });
    let events = Sse::new(stream).keep_alive(KeepAlive::default());
    let mut res = events.into_response();
    let headers = res.headers_mut();
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(ACCEL_BUFFERING, HeaderValue::from_static("no"));
    Ok(res)
}

/// Sends the counts each time that they change, until the browser disconnects or the console shuts down.
async fn send_counts(
    shared: Weak<Shared>,
    watch: Watch,
    base: String,
    sender: mpsc::Sender<String>,
) {
    let Watch {
        mut snapshot,
        mut closed,
    } = watch;
    loop {
        // A browser that reads slowly gets the latest counts.
        let ready = async {
            snapshot.changed().await.ok()?;
            sender.reserve().await.ok()
        };
        let permit = tokio::select! {
            biased;
            _ = closed.wait_for(|closed| *closed) => return,
            () = sender.closed() => return,
            permit = ready => permit,
        };
        let (Some(permit), Some(shared)) = (permit, shared.upgrade()) else {
            return;
        };
        let Some(counts) = snapshot.borrow_and_update().clone() else {
            continue;
        };
        let Ok(html) = LivePart::new(&shared, &counts, &base).render() else {
            return;
        };
        permit.send(html);
    }
}
