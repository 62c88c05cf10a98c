//! The memory store, and the conformance suite on it.

mod conformance;
mod conformance_catches;
mod tiered;
