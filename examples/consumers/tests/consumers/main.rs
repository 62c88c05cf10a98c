//! Consumers of a queue and writers of a counter: killed, stopped and raced.

mod counter;
mod killed;
mod shipments;
mod stopping;
