//! A checked model of the lease protocol: some requests under one key, a store that keeps the contract, and every order in
//! which calls, crashes, lost calls, lost and late replies, pauses and expiries can come. `docs/internals/verification.md`
//! says what it covers.

#![expect(clippy::unwrap_used, reason = "tests, their helpers included")]

mod asked;
mod clients;
mod history;
mod holds;
mod mutant;
mod mutants;
mod operated;
mod properties;
mod replay;
mod sequences;
mod state;
mod store;
mod system;
mod tiers;
