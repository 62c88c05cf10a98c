use std::{future::Future, time::Duration};

use super::{Message, Move, State};
use crate::Failure;

/// A queue that delivers each message at least once. A consumer or an operator [moves](Move) it to its next state.
///
/// All methods return an error if the database cannot be reached, or refuses. The statement may have been executed: repeat
/// the call. If a future is dropped, the same applies.
pub trait RetryQueue: Clone + Send + Sync + 'static {
    /// Adds a message. Returns `false` if the queue has one with this id, with any body and state.
    fn send(&self, id: &str, body: &str) -> impl Future<Output = Result<bool, Failure>> + Send;

    /// Returns the message that has been due for the longest time, if there is one. It is delivered again after `visibility`
    /// unless it is moved before.
    fn receive(
        &self,
        visibility: Duration,
    ) -> impl Future<Output = Result<Option<Message>, Failure>> + Send;

    /// Moves a message. Returns `false` if the message has been delivered or moved since, and changes nothing then.
    fn apply(&self, next: &Move) -> impl Future<Output = Result<bool, Failure>> + Send;

    /// Returns the messages in a state, at most `limit`, those that are due first at the front.
    fn list(
        &self,
        state: State,
        limit: u32,
    ) -> impl Future<Output = Result<Vec<Message>, Failure>> + Send;

    /// Deletes finished messages whose time has passed, and returns their number. Run it regularly.
    fn purge(&self) -> impl Future<Output = Result<u64, Failure>> + Send;
}

/// The timeout of a call to the database. A consumer whose call fails repeats it.
pub(super) const TIMEOUT: Duration = Duration::from_secs(10);
