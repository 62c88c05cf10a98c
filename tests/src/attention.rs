//! A service whose executions need attention.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicBool, Ordering},
};

use axum::{Extension, Router, response::IntoResponse};
use http::StatusCode;
use tower_idempotency::{IdempotencyLayer, Lease, NeedsAttention};

use crate::{Effects, TestResponse, app, created, post, send};

/// A service that returns `NeedsAttention` until [`set_needs_attention`](Self::set_needs_attention) changes that. It counts its
/// executions.
#[derive(Debug)]
pub struct AttentionService {
    /// The service.
    pub app: Router,
    /// Its layer.
    pub layer: IdempotencyLayer,
    /// The number of executions.
    pub effects: Effects,
    needs_attention: Arc<AtomicBool>,
    takeovers: Arc<Mutex<Vec<bool>>>,
}

impl AttentionService {
    /// Creates the service behind this layer.
    #[must_use]
    pub fn new(layer: IdempotencyLayer) -> Self {
        let needs_attention = Arc::new(AtomicBool::new(true));
        let takeovers = Arc::<Mutex<Vec<bool>>>::default();
        let (flag, flags) = (Arc::clone(&needs_attention), Arc::clone(&takeovers));
        let (app, effects) = app(layer.clone(), move |n, req| {
            let lease = req.extensions().get::<Lease>().expect("a lease").clone();
            flags.lock().expect("no panic").push(lease.is_takeover());
            let needs_attention = flag.load(Ordering::SeqCst);
            async move {
                if needs_attention {
                    let attention = NeedsAttention::new("refund-failed");
                    let attention = attention.with_reason(format!("refund re_{n}"));
                    return (StatusCode::BAD_GATEWAY, Extension(attention)).into_response();
                }
                created(n)
            }
        });
        Self {
            app,
            layer,
            effects,
            needs_attention,
            takeovers,
        }
    }

    /// Sets the outcome of later executions: `NeedsAttention`, or success.
    pub fn set_needs_attention(&self, needs_attention: bool) {
        self.needs_attention
            .store(needs_attention, Ordering::SeqCst);
    }

    /// Sends the request of this key.
    pub async fn send_request(&self, key: &str) -> TestResponse {
        send(&self.app, post("/cancel", key, "{}")).await
    }

    /// Asserts that the request is refused, with the code for clients and without the reason for operators.
    ///
    /// # Panics
    ///
    /// Panics if it gets another response.
    pub async fn assert_refused(&self, key: &str) {
        let refused = self.send_request(key).await;
        assert_eq!(refused.status, StatusCode::CONFLICT, "{refused:?}");
        assert!(refused.text().contains(r#""reason":"refund-failed""#));
        assert!(!refused.text().contains("refund re_"), "{refused:?}");
    }

    /// Returns the takeover flag of each execution.
    ///
    /// # Panics
    ///
    /// Panics if an execution panicked.
    #[must_use]
    pub fn takeovers(&self) -> Vec<bool> {
        self.takeovers.lock().expect("no panic").clone()
    }
}
