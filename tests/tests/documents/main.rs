//! The first commands of the documentation, run without changes.

mod first_command;
mod project;
mod testing;
mod tutorial;
