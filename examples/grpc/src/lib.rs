//! A gRPC service with one protected method, and a client that retries.

pub mod client;
pub mod messages;
pub mod service;

/// The generated server and client.
pub mod payments {
    include!(concat!(env!("OUT_DIR"), "/payments.v1.Payments.rs"));
}
