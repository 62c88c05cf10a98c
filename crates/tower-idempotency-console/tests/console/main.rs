//! The console over real sockets.

mod access;
mod attacks;
mod browsing;
mod harness;
mod live;
mod metrics;
mod observed;
mod prefixes;
mod resolving;
mod stores;
