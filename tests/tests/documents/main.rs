//! The first commands of the documentation, run as they stand.

mod first_command;
mod testing;
mod tutorial;
