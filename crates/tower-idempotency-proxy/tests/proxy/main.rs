//! Tests of the proxy over sockets, with upstreams that count their effects and break.

#![expect(clippy::unwrap_used, reason = "tests, their helpers included")]

mod accept;
mod admin;
mod bodiless;
mod breaks;
mod close_delimited;
mod expect;
mod forwarding;
mod grpc;
mod harness;
mod informational;
mod lifecycle;
mod observe;
mod outcomes;
mod protocols;
mod shared_connection;
mod smuggling;
mod streams;
mod tls;
mod websocket;
