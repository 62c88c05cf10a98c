//! Rides, one at a time and many at once while everything fails: on a throwaway PostgreSQL.

mod crashes;
mod harness;
mod phases;
mod processes;
mod receipts;
mod simulator;
