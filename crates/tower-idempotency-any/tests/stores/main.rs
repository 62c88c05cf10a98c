//! Stores that were opened from a URL.

mod conformance;
mod open;
