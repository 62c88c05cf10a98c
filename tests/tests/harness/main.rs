//! The helpers that other tests rely on: servers, and the proxy that injects faults.

mod proxy;
mod servers;
