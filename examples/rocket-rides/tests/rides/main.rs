//! Rides, one at a time and many at once while everything fails: on a throwaway PostgreSQL.

mod cast;
mod crashes;
mod phases;
mod receipts;
mod simulator;
mod stage;
