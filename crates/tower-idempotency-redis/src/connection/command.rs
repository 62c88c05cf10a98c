//! Commands on one connection.

use std::io;

use redis::{Cmd, Pipeline, RedisError, RedisResult, Value, aio::ConnectionLike};
use tokio::time::{Instant, timeout_at};

/// Sends a command and returns its reply. Error replies of the server become errors.
pub(crate) async fn send(mut connection: impl ConnectionLike, command: &Cmd) -> RedisResult<Value> {
    connection
        .req_packed_command(command)
        .await?
        .extract_error()
}

/// Sends a pipeline of two commands and returns both replies. Error replies of the server become errors.
pub(crate) async fn send_pair(
    mut connection: impl ConnectionLike,
    pipeline: Pipeline,
) -> RedisResult<(Value, Value)> {
    let mut replies = connection
        .req_packed_commands(&pipeline, 0, 2)
        .await?
        .into_iter();
    match (replies.next(), replies.next()) {
        (Some(first), Some(second)) => Ok((first.extract_error()?, second.extract_error()?)),
        _ => Err((redis::ErrorKind::Parse, "expected two replies").into()),
    }
}

/// Returns the result of the call, or a timeout error once the deadline has passed.
pub(crate) async fn with_deadline<T>(
    deadline: Instant,
    call: impl Future<Output = RedisResult<T>>,
) -> RedisResult<T> {
    match timeout_at(deadline, call).await {
        Ok(result) => result,
        Err(_elapsed) => Err(no_reply_in_time()),
    }
}

/// Returns the error of a call whose deadline has passed.
pub(crate) fn no_reply_in_time() -> RedisError {
    let message = "the server did not reply in time";
    io::Error::new(io::ErrorKind::TimedOut, message).into()
}
