//! Tests of `idempotency proxy` as a process: signals, crashes, and upstreams in other languages.

#![expect(clippy::unwrap_used, reason = "tests, their helpers included")]

mod admin_console;
mod crash;
mod descriptors;
mod harness;
mod languages;
mod process;
mod sockets;
mod variables;
