//! placeholder
mod key;
mod record;
pub mod store;
