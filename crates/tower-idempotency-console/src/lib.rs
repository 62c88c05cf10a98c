//! A web console for the operators of [`tower_idempotency`]: lists, explains and resolves the keys of any store.
//!
//! The console is an axum [`Router`](axum::Router) to nest in a service. `idempotency serve` runs it alone. It needs no
//! JavaScript; with it, counts are live. `docs/operations/console.md` explains each decision of an operator.
//!
//! ```
//! use axum::{Router, body::Body, http::Request};
//! use tower_idempotency::{MemoryStore, inspect::Inspector};
//! use tower_idempotency_console::{Access, Console, audit::AuditLog};
//!
//! /// Set by the authentication of the application.
//! #[derive(Clone)]
//! struct User { name: String, is_operator: bool }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let store = MemoryStore::new().with_details();
//! let console = Console::new(Inspector::new(store), |head| match head.extensions.get::<User>() {
//!     Some(user) if user.is_operator => Access::resolve(user.name.as_str()),
//!     Some(user) => Access::read(user.name.as_str()),
//!     None => Access::None,
//! })
//! .with_title("payments")
//! .with_audit_log(AuditLog::new("/var/log/payments/idempotency-audit.jsonl"));
//! let app: Router = Router::new().nest_service("/ops/idempotency", console.into_router());
//!
//! # use tokio::net::TcpListener;
//! # use tokio::io::{AsyncReadExt, AsyncWriteExt};
//! # let listener = TcpListener::bind("127.0.0.1:0").await?;
//! # let address = listener.local_addr()?;
//! # tokio::spawn(axum::serve(listener, app).into_future());
//! # let mut client = tokio::net::TcpStream::connect(address).await?;
//! # client.write_all(b"GET /ops/idempotency/ HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await?;
//! # let mut response = String::new();
//! # client.read_to_string(&mut response).await?;
//! // A request without a user gets 403.
//! assert!(response.starts_with("HTTP/1.1 403 "));
//! # Ok(())
//! # }
//! ```
//!
//! # Safety
//!
//! - **No default access.** The hook of [`Console::new`] decides for each request. There is no console without it.
//! - **No log, no change.** Each change is in the [audit log](audit) before it is made. Without a log nothing can be
//!   resolved.
//! - **A decision applies to what was seen.** If the entry has changed, nothing is changed, and the page shows the present
//!   entry with status 409.
//! - **Another site cannot act.** A POST of a browser needs `same-origin` or `none` as `Sec-Fetch-Site`, or an `Origin` that
//!   equals the host. A POST with neither header passes: it is that of a program.
//! - **What clients have sent is text.** Pages escape it. A recorded body is only downloaded, as `text/plain`, sandboxed.
//! - **Browsers do not multiply the load.** All of them share one query of the store.

mod access;
mod act;
mod api;
mod assets;
pub mod audit;
mod audit_file;
mod audit_table;
mod chart;
mod console;
// For the program `idempotency`, which requires this very version.
#[doc(hidden)]
pub mod describe;
mod error;
mod filters;
mod guard;
mod live;
mod metrics;
mod pages;
mod panics;
mod params;
// For the program `idempotency`, which requires this very version.
#[doc(hidden)]
pub mod response;
mod routes;
pub mod scrape;
mod source;

pub use self::{
    access::Access,
    console::{Changes, Console, OriginError},
};
