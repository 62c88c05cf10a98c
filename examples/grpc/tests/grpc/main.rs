//! The layer with the server and the client of tonic, over sockets. Effects are counted at the handler.

mod calls;
mod codes;
mod framing;
mod harness;
mod retries;
mod streams;
mod web;
