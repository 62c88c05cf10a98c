//! The console over real sockets.

mod access;
mod attacks;
mod browsing;
mod harness;
mod live;
mod prefixes;
mod resolving;
