//! The life of a lease: outages, cancellation, disconnects, shutdown and transactions.
//!
//! Tests without a socket or a server run on a paused clock, so that no timeout passes because of a slow machine.

mod cancellation;
mod disconnects_h1;
mod disconnects_h2;
mod endless_handlers;
mod error_texts;
mod failures;
mod items;
mod leases;
mod needs_attention;
mod operators;
mod outage;
mod panicking_store;
mod races;
mod run_once;
mod shutdown;
mod take_over;
mod tiered;
mod transactions;
