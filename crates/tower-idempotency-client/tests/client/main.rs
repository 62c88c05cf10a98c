//! Tests of the layers through their public interface, on the paused clock and over sockets.

#![expect(clippy::unwrap_used, reason = "tests, their helpers included")]

mod bodies;
mod caller_verdicts;
mod codes;
mod costs;
mod delays;
mod dialects;
mod grpc;
mod harness;
mod keys;
mod lifetime;
mod limits;
mod outbox;
mod outbox_contract;
mod outbox_file;
mod outbox_golden;
mod outbox_memory;
mod outbox_races;
mod recorded;
mod recovery_limits;
#[cfg(feature = "reqwest")]
mod reqwest_client;
mod sockets;
mod sticky;
mod storm;
mod telemetry;
mod verdicts;
mod warnings;
