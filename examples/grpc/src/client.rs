//! A client that retries a payment under one key.

use std::{net::SocketAddr, time::Duration};

use tokio::time::{sleep, timeout};
use tonic::{
    Code, Request, Response, Status,
    metadata::{Ascii, MetadataValue},
    transport::{Channel, Endpoint, Error},
};

use crate::{
    messages::{PayRequest, Payment},
    payments::payments_client::PaymentsClient,
};

const ATTEMPTS: u32 = 50;
const BACKOFF: Duration = Duration::from_millis(5);
const MAX_BACKOFF: Duration = Duration::from_secs(1);
/// The timeout of one attempt. A longer execution continues, and a later attempt gets its response.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(10);
/// The timeout of a connection attempt, and of the reply to a ping.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(5);

/// Connects at the first call, and again after each broken connection. A connection without a reply to a ping is broken.
///
/// # Errors
///
/// None: the address is valid.
pub fn connect(addr: SocketAddr) -> Result<PaymentsClient<Channel>, Error> {
    let endpoint = Endpoint::from_shared(format!("http://{addr}"))?
        .connect_timeout(CONNECTION_TIMEOUT)
        .http2_keep_alive_interval(ATTEMPT_TIMEOUT)
        .keep_alive_timeout(CONNECTION_TIMEOUT);
    Ok(PaymentsClient::new(endpoint.connect_lazy()))
}

/// Creates a request with this key.
#[must_use]
pub fn with_key<T>(message: T, key: &MetadataValue<Ascii>) -> Request<T> {
    let mut req = Request::new(message);
    req.metadata_mut().insert("idempotency-key", key.clone());
    req
}

/// Pays once, however often the connection breaks. Each attempt has the same key and the same message.
///
/// # Errors
///
/// Returns the last status if it is final, or after 50 attempts.
pub async fn pay(
    client: &mut PaymentsClient<Channel>,
    key: &MetadataValue<Ascii>,
    payment: &PayRequest,
) -> Result<Response<Payment>, Status> {
    let mut backoff = BACKOFF;
    for _ in 1..ATTEMPTS {
        let status = match attempt(client, key, payment).await {
            Ok(res) => return Ok(res),
            Err(status) => status,
        };
        let Some(delay) = delay(&status, backoff) else {
            return Err(status);
        };
        sleep(delay).await;
        backoff = (backoff * 2).min(MAX_BACKOFF);
    }
    attempt(client, key, payment).await
}

/// Makes one attempt. Without a timeout, the call to an unresponsive server would not end.
async fn attempt(
    client: &mut PaymentsClient<Channel>,
    key: &MetadataValue<Ascii>,
    payment: &PayRequest,
) -> Result<Response<Payment>, Status> {
    let paid = timeout(ATTEMPT_TIMEOUT, client.pay(with_key(payment.clone(), key))).await;
    paid.unwrap_or_else(|elapsed| Err(Status::deadline_exceeded(elapsed.to_string())))
}

/// Returns the delay before the next attempt, or `None` if there must be none. The server may send it (gRFC A6).
fn delay(status: &Status, backoff: Duration) -> Option<Duration> {
    let pushback = status.metadata().get("grpc-retry-pushback-ms");
    if let Some(pushback) = pushback.and_then(|value| value.to_str().ok()) {
        // -1 and anything else that is no number means that the client must not retry.
        return pushback.parse().ok().map(Duration::from_millis);
    }
    // The first attempt may have paid. Without a key, a retry after these codes could pay twice.
    let is_temporary = matches!(
        status.code(),
        Code::Unavailable
            | Code::Unknown
            | Code::Internal
            | Code::Cancelled
            | Code::DeadlineExceeded
            | Code::ResourceExhausted
            | Code::Aborted
    );
    is_temporary.then_some(backoff)
}
