//! Deposits, one at a time and many at once while the bank is killed.

mod batches;
mod deposits;
mod kills;
mod totals;
