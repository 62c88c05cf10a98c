use std::{error::Error, fmt, time::Duration};

use axum::{
    body::{Body, Bytes},
    http::{Request, StatusCode, header::CONTENT_TYPE},
};
use http_body_util::BodyExt;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use serde_json::{Value, json};
use tokio::time::timeout;

/// A client of the provider that charges cards.
#[derive(Clone, Debug)]
pub struct Payments {
    client: Client<HttpConnector, Body>,
    url: String,
    patience: Duration,
}

/// The provider's verdict.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "callers must handle every variant")]
pub enum Verdict {
    /// The provider charged the card.
    Charged {
        /// The provider's name for the charge.
        charge: String,
    },
    /// The provider will not charge the card.
    Declined,
    /// The provider replays a failure. It may have charged the card, and another call with this key does not change that.
    FailureReplayed,
}

/// The outcome is unknown: the provider may have charged the card. Call it again with the same key.
#[derive(Debug)]
pub struct Unavailable(Option<Box<dyn Error + Send + Sync>>);

impl Payments {
    /// Returns a client of the provider at this URL, whose calls have `patience` as their timeout.
    #[must_use]
    pub fn new(url: &str, patience: Duration) -> Self {
        Self {
            client: Client::builder(TokioExecutor::new()).build_http(),
            url: url.to_owned(),
            patience,
        }
    }

    /// Charges a card once for each `key`, for any number of calls. `fare` is in cents.
    ///
    /// # Errors
    ///
    /// Returns an error if no complete response arrives in time, or if the response is no verdict.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the provider may have charged the card, as after an error.
    pub async fn charge(&self, key: &str, card: &str, fare: i64) -> Result<Verdict, Unavailable> {
        let asked = timeout(self.patience, self.send_charge(key, card, fare)).await;
        let (status, is_replay, body) = asked
            .map_err(|late| Unavailable(Some(late.into())))?
            .map_err(|error| Unavailable(Some(error)))?;
        match status {
            StatusCode::CREATED => {
                let body: Value = serde_json::from_slice(&body).unwrap_or_default();
                let charge = body["charge"].as_str().ok_or(Unavailable(None))?;
                Ok(Verdict::Charged {
                    charge: charge.to_owned(),
                })
            }
            StatusCode::PAYMENT_REQUIRED => Ok(Verdict::Declined),
            _ if is_replay => Ok(Verdict::FailureReplayed),
            _ => Err(Unavailable(None)),
        }
    }

    async fn send_charge(
        &self,
        key: &str,
        card: &str,
        fare: i64,
    ) -> Result<(StatusCode, bool, Bytes), Box<dyn Error + Send + Sync>> {
        let body = json!({ "card": card, "amount": fare }).to_string();
        let req = Request::post(format!("{}/charges", self.url))
            .header("idempotency-key", key)
            .header(CONTENT_TYPE, "application/json")
            .body(Body::from(body))?;
        let (head, body) = self.client.request(req).await?.into_parts();
        let is_replay = head.headers.contains_key("idempotent-replayed");
        Ok((head.status, is_replay, body.collect().await?.to_bytes()))
    }
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("expected a verdict of the provider, found none")
    }
}

impl Error for Unavailable {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.as_deref().map(|source| source as _)
    }
}
