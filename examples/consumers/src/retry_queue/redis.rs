use std::time::Duration;

use deadpool_redis::{
    Manager, Pool,
    redis::{AsyncConnectionConfig, FromRedisValue, Script, ToRedisArgs},
};

use super::{Message, Move, RetryQueue, State, message::millis, queue::TIMEOUT};
use crate::Failure;

/// A retry queue in Redis: a hash of messages, and a sorted set of ids for each state, in the order of their times.
///
/// Each call is one script, which Redis executes as a whole. The server must not evict keys, and must persist them if
/// messages are to survive it. The keys have a common hash tag, which a cluster needs; a cluster also needs another client.
#[derive(Clone, Debug)]
pub struct RedisQueue(Pool);

impl RedisQueue {
    /// Connects to the server at this URL, and loads the scripts.
    ///
    /// # Errors
    ///
    /// Returns an error if the server cannot be reached, or refuses.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, nothing is changed but the script cache of the server.
    pub async fn connect(url: &str) -> Result<Self, Failure> {
        // The default is half a second, after which the outcome of a call is unknown.
        let config = AsyncConnectionConfig::new().set_response_timeout(Some(TIMEOUT));
        let pool = Pool::builder(Manager::new_with_config(url, config)?).build()?;
        let mut connection = pool.get().await?;
        for code in [SEND, RECEIVE, MOVE, LIST, PURGE] {
            Script::new(code).load_async(&mut connection).await?;
        }
        Ok(Self(pool))
    }

    /// Runs a script on the messages and the ids in these states.
    async fn run<T: FromRedisValue>(
        &self,
        code: &str,
        states: &[State],
        arguments: impl ToRedisArgs,
    ) -> Result<T, Failure> {
        let script = Script::new(code);
        let mut call = script.key("{messages}");
        for state in states {
            call.key(format!("{{messages}}:{state}"));
        }
        call.arg(arguments);
        let mut connection = self.0.get().await?;
        Ok(call.invoke_async(&mut connection).await?)
    }
}

impl RetryQueue for RedisQueue {
    async fn send(&self, id: &str, body: &str) -> Result<bool, Failure> {
        self.run(SEND, &[State::Queued], (id, body)).await
    }

    async fn receive(&self, visibility: Duration) -> Result<Option<Message>, Failure> {
        let received: Option<String> = self
            .run(RECEIVE, &[State::Queued], millis(visibility))
            .await?;
        let message = received.map(|it| serde_json::from_str(&it));
        Ok(message.transpose()?)
    }

    async fn apply(&self, next: &Move) -> Result<bool, Failure> {
        let round = next.round.map_or_else(String::new, |it| it.to_string());
        let reason = next.reason.as_deref().unwrap_or_default();
        let arguments = (
            (&next.id, next.delivery, next.from.name(), next.to.name()),
            (next.failures, millis(next.delay), round, reason),
        );
        self.run(MOVE, &[next.from, next.to], arguments).await
    }

    async fn list(&self, state: State, limit: u32) -> Result<Vec<Message>, Failure> {
        let listed: Vec<String> = self.run(LIST, &[state], limit.min(MOST)).await?;
        let messages = listed.iter().map(|it| serde_json::from_str(it));
        Ok(messages.collect::<Result<_, _>>()?)
    }

    async fn purge(&self) -> Result<u64, Failure> {
        let mut all = 0;
        loop {
            let purged: u64 = self.run(PURGE, &[State::Done], MOST).await?;
            all += purged;
            if purged == 0 {
                return Ok(all);
            }
        }
    }
}

const SEND: &str = include_str!("scripts/send.lua");
const RECEIVE: &str = include_str!("scripts/receive.lua");
const MOVE: &str = include_str!("scripts/move.lua");
const LIST: &str = include_str!("scripts/list.lua");
const PURGE: &str = include_str!("scripts/purge.lua");
/// The largest number of messages in a call. While a script runs, the server executes nothing else.
const MOST: u32 = 1000;
