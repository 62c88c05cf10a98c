//! The response that an operator gives to the decision `complete`: its status and its headers, as text.
//!
//! The console and the tool `idempotency` accept the same texts.

use http::{HeaderName, HeaderValue, StatusCode};

/// Parses the status of a response that retries get: 200 to 599.
///
/// Returns `None` for other texts. A status of 1xx is not the status of a response, and clients do not know a class above 5xx.
///
/// ```
/// use tower_idempotency_console::response::parse_status;
///
/// assert_eq!(parse_status("201").unwrap(), 201);
/// assert!(parse_status("101").is_none());
/// assert!(parse_status("600").is_none());
/// ```
#[must_use]
pub fn parse_status(text: &str) -> Option<StatusCode> {
    let status: StatusCode = text.trim().parse().ok()?;
    (200..600).contains(&status.as_u16()).then_some(status)
}

/// Parses a header of the form `name: value`.
///
/// Returns `None` for other texts.
///
/// ```
/// use tower_idempotency_console::response::parse_header;
///
/// let (name, value) = parse_header("Location: /orders/1").unwrap();
/// assert_eq!((name.as_str(), value.to_str().unwrap()), ("location", "/orders/1"));
/// assert!(parse_header("location").is_none());
/// ```
#[must_use]
pub fn parse_header(text: &str) -> Option<(HeaderName, HeaderValue)> {
    let (name, value) = text.split_once(':')?;
    Some((name.trim().parse().ok()?, value.trim().parse().ok()?))
}

/// The statuses that [`parse_status`] accepts, for messages.
pub const STATUSES: &str = "200 to 599";
