//! Checks before the measurement: each contender does the work that its row claims.

use bytes::Bytes;
use http::HeaderMap;

use crate::{
    contenders::{Contender, Effects, Handler},
    requests::{order, request, send},
};

/// Checks the effects of each kind of request. Returns remarks about work that the contender leaves out.
///
/// # Panics
///
/// If a fresh key does not run the handler once, or a replay runs it or has another response.
pub async fn check(contender: &Contender, handler: Handler) -> Vec<String> {
    let name = contender.name;
    let effects = Effects::default();
    let app = contender.build(handler, &effects);
    let body = order();
    for count in 1..=2 {
        let (status, ..) = send(&app, request(&body, None)).await;
        assert!(status.is_success(), "{name}: {status}");
        assert_eq!(effects.count(), count, "{name}: no key runs the handler");
    }
    let key = Some("checked");
    let first = send(&app, request(&body, key)).await;
    assert!(first.0.is_success(), "{name}: {}", first.0);
    assert_eq!(effects.count(), 3, "{name}: a fresh key runs the handler");
    let mut remarks = Vec::new();
    if !contender.replays {
        return remarks;
    }
    for _ in 0..2 {
        let replay = send(&app, request(&body, key)).await;
        assert_eq!(effects.count(), 3, "{name}: a replay runs no handler");
        assert_eq!((replay.0, &replay.2), (first.0, &first.2), "{name}");
        let content_type = |headers: &HeaderMap| headers.get("content-type").cloned();
        assert_eq!(content_type(&replay.1), content_type(&first.1), "{name}");
    }
    let other = Bytes::from(String::from_utf8_lossy(&body).replace("EUR", "USD"));
    let (status, ..) = send(&app, request(&other, key)).await;
    if status.is_success() {
        remarks.push("replays for another body with the same key".to_owned());
    }
    assert_eq!(effects.count(), 3, "{name}: another body runs no handler");
    remarks.extend(concurrent(contender, handler).await);
    remarks
}

/// Sends 64 equal requests with one fresh key at the same time.
async fn concurrent(contender: &Contender, handler: Handler) -> Option<String> {
    let mut most = 0;
    for round in 0..20 {
        let effects = Effects::default();
        let app = contender.build(handler, &effects);
        let tasks: Vec<_> = (0..64)
            .map(|_| {
                let (app, req) = (app.clone(), request(&order(), Some(&format!("c{round}"))));
                tokio::spawn(async move { send(&app, req).await })
            })
            .collect();
        for task in tasks {
            task.await.expect("no panic");
        }
        assert!(effects.count() >= 1, "{}", contender.name);
        most = most.max(effects.count());
    }
    (most > 1).then(|| format!("executes concurrent requests with one key up to {most} times"))
}
