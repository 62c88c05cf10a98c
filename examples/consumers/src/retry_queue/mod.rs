//! A queue in a database: growing delays, dead letters, and messages that need attention.
//!
//! A message is stored once, in one state. Each [`Move`] is one statement. Its condition: the message is still in the state
//! and at the delivery that the consumer or the operator saw. A process that is killed leaves the message before the move or
//! after it. Of two processes that move it at once, one succeeds.

mod message;
mod postgres;
mod queue;
mod redis;

pub(crate) use self::message::QUEUE_RETENTION;
pub use self::{
    message::{Message, Move, Resolution, State},
    postgres::PostgresQueue,
    queue::RetryQueue,
    redis::RedisQueue,
};
