//! A checked model of the lease protocol: some requests under one key, and a store that fulfills the contract. The
//! checker visits every order of calls, crashes, lost calls, lost and late replies, pauses and expiries.
//! `docs/internals/verification.md` describes its scope.

#![expect(clippy::unwrap_used, reason = "tests, their helpers included")]

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
mod store_calls;
mod system;
mod tiers;
