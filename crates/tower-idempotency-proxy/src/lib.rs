//! A reverse proxy that makes unsafe requests to any HTTP service safe to retry.
//!
//! The proxy is [`tower_idempotency`] in front of a service in any language. The service needs no change: clients send
//! `Idempotency-Key` to the proxy, and the proxy sends each request to the service once. The program `idempotency proxy`
//! runs it with a TOML file. Use this crate to embed it in another program.
//!
//! ```
//! use tower_idempotency_proxy::{Config, Proxy};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = Config::from_toml(
//!     r#"
//!     [listen]
//!     address = "127.0.0.1:0"
//!     [store]
//!     url = "memory"
//!     [upstream.app]
//!     url = "http://127.0.0.1:3000"
//!     [[route]]
//!     path = "/v1/charges"
//!     upstream = "app"
//!     "#,
//! )?;
//! let proxy = Proxy::bind(config).await?;
//! assert_ne!(proxy.address().port(), 0);
//! let shutdown = async { /* wait for a signal */ };
//! assert!(proxy.serve(shutdown).await);
//! # Ok(())
//! # }
//! ```
//!
//! # Outcomes
//!
//! Without a response, a proxy does not know if its upstream executed the request. It distinguishes three cases:
//!
//! | the upstream | the client gets | the key |
//! |---|---|---|
//! | did not get a byte of the request | 502 `upstream-unreachable`, `Retry-After` | is free |
//! | got the request, and then the connection broke or the timeout passed | 502 or 504 `outcome-unknown` | needs attention |
//! | responds with 502, 504, 520 or 524, as another proxy does | the response | needs attention |
//!
//! The preset of the route decides if any other response is recorded. The proxy sends a request a second time only if the
//! HTTP library returned it unsent, because the upstream had closed an idle connection.
//!
//! # Crate features
//!
//! `redis`, `postgres`, `mysql`, `sqlite` and `dynamodb` build the stores, and `tls` adds TLS to them. No feature is enabled
//! by default; without one there is only the store `memory`, for one process.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod addresses;
mod admin;
mod body;
mod client_stream;
mod config;
mod connection;
mod headers;
mod lengths;
mod problem;
mod proxy;
mod route;
mod routes;
mod service;
mod sockets;
mod telemetry;
mod tls;
mod upstream;

pub use self::{
    addresses::connect_first,
    config::{Config, ConfigError, ConsoleConfig},
    proxy::{BindError, Proxy, ProxyHandle},
    sockets::Sockets,
};
