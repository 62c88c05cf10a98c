//! Redis and Valkey as the store of [`tower_idempotency`].

#![cfg_attr(docsrs, feature(doc_cfg))]

mod check;
mod error;
mod link;
mod listen;
mod options;
mod redial;
mod scripts;
mod store;

pub use redis;

pub use self::{
    error::{ConnectError, ConnectErrorKind},
    options::{Eviction, RedisOptions},
    store::RedisStore,
};
