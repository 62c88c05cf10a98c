//! Deposits, one at a time and many at once while the bank is killed.

mod books;
mod deposits;
mod kills;
