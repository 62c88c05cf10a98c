//! Hears of completions and releases: one connection for all waiters of a store.
//!
//! What is heard is a hint. While the connection is down nothing is heard, and whoever waits looks from time to time.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures_util::{FutureExt, StreamExt, future::BoxFuture};
use redis::{RedisResult, aio::PubSub};
use tokio::{
    sync::{Notify, watch},
    task::JoinHandle,
    time::{Instant, MissedTickBehavior, interval, sleep, timeout},
};

/// Connects when the first waiter comes, and stays connected.
pub(crate) struct Listener {
    shared: Arc<Shared>,
    task: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    dial: Box<dyn Fn() -> BoxFuture<'static, RedisResult<PubSub>> + Send + Sync>,
    /// How long connecting and subscribing may take each.
    limit: Duration,
    channels: Mutex<HashMap<String, Channel>>,
    /// There is a channel to subscribe to.
    news: Notify,
}

struct Channel {
    state: watch::Sender<State>,
    waiting: usize,
    /// When the last waiter left.
    idle_since: Instant,
}

#[derive(Clone, Copy, Default)]
struct State {
    subscribed: bool,
    heard: u64,
}

/// A waiter's ear on one channel.
pub(crate) struct Listening {
    shared: Arc<Shared>,
    name: String,
    state: watch::Receiver<State>,
    heard: u64,
}

impl Listener {
    pub(crate) fn new<F>(limit: Duration, dial: impl Fn() -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = RedisResult<PubSub>> + Send + 'static,
    {
        Self {
            shared: Arc::new(Shared {
                dial: Box::new(move || dial().boxed()),
                limit,
                channels: Mutex::default(),
                news: Notify::new(),
            }),
            task: Mutex::default(),
        }
    }

    /// Begins to listen to a channel. What is published once it is [ready](Listening::ready) will be heard.
    pub(crate) fn listen(&self, name: &str) -> Listening {
        let state = {
            let mut channels = self.shared.channels();
            if !channels.contains_key(name) {
                self.shared.news.notify_one();
                channels.insert(name.to_owned(), Channel::new());
            }
            channels.get_mut(name).map_or_else(
                || unreachable!("inserted where it was missing"),
                |channel| {
                    channel.waiting += 1;
                    channel.state.subscribe()
                },
            )
        };
        self.run();
        let heard = state.borrow().heard;
        Listening {
            shared: Arc::clone(&self.shared),
            name: name.to_owned(),
            state,
            heard,
        }
    }

    /// Starts the task; again where the runtime that ran it is gone.
    fn run(&self) {
        let mut task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        if task.as_ref().is_none_or(JoinHandle::is_finished) {
            self.shared.deaf();
            *task = Some(tokio::spawn(Arc::clone(&self.shared).serve()));
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let task = self.task.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(task) = task.take() {
            task.abort();
        }
    }
}

impl Listening {
    /// Resolves once the server knows that we listen.
    pub(crate) async fn ready(&mut self) {
        // The sender lives as long as somebody waits.
        self.state.wait_for(|state| state.subscribed).await.ok();
    }

    /// Resolves when something was published, or when we may have missed it.
    pub(crate) async fn heard(&mut self) {
        let before = self.heard;
        self.state
            .wait_for(|state| state.heard != before)
            .await
            .ok();
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        if let Some(channel) = self.shared.channels().get_mut(&self.name) {
            channel.waiting -= 1;
            channel.idle_since = Instant::now();
        }
    }
}

impl Channel {
    fn new() -> Self {
        Self {
            state: watch::Sender::default(),
            waiting: 0,
            idle_since: Instant::now(),
        }
    }
}

impl Shared {
    async fn serve(self: Arc<Self>) {
        let mut pause = MIN_PAUSE;
        loop {
            if let Ok(Ok(connection)) = timeout(self.limit, (self.dial)()).await {
                self.news.notify_one();
                // A server that takes the connection may still not let us listen.
                if self.listen(connection).await {
                    pause = MIN_PAUSE;
                }
            }
            self.deaf();
            self.forget_idle();
            sleep(pause).await;
            pause = (pause * 2).min(MAX_PAUSE);
        }
    }

    /// Listens until the connection breaks, or does not answer in time; whether there was anything to be heard.
    async fn listen(&self, connection: PubSub) -> bool {
        let mut has_subscribed = false;
        let (mut sink, mut messages) = connection.split();
        let mut sweep = interval(IDLE);
        sweep.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let answered = tokio::select! {
                message = messages.next() => match message {
                    Some(message) => {
                        self.hear(message.get_channel_name());
                        continue;
                    }
                    None => return has_subscribed,
                },
                () = self.news.notified() => {
                    let names = self.unheard();
                    if names.is_empty() {
                        continue;
                    }
                    let answered = timeout(self.limit, sink.subscribe(&names)).await;
                    if matches!(answered, Ok(Ok(()))) {
                        has_subscribed = true;
                        self.subscribed(&names);
                    }
                    answered
                }
                _ = sweep.tick() => {
                    let names = self.forget_idle();
                    if names.is_empty() {
                        continue;
                    }
                    timeout(self.limit, sink.unsubscribe(&names)).await
                }
            };
            if !matches!(answered, Ok(Ok(()))) {
                return has_subscribed;
            }
        }
    }

    fn hear(&self, name: &str) {
        if let Some(channel) = self.channels().get(name) {
            channel.state.send_modify(|state| state.heard += 1);
        }
    }

    /// The channels to subscribe to.
    fn unheard(&self) -> Vec<String> {
        let channels = self.channels();
        let unheard = channels
            .iter()
            .filter(|(_name, channel)| !channel.state.borrow().subscribed);
        unheard.map(|(name, _channel)| name.clone()).collect()
    }

    fn subscribed(&self, names: &[String]) {
        let channels = self.channels();
        for channel in names.iter().filter_map(|name| channels.get(name)) {
            channel.state.send_modify(|state| state.subscribed = true);
        }
    }

    /// Forgets the channels that nobody has waited for lately, and names them. One that waits comes back between two
    /// looks, so channels outlive their waiters for a while.
    fn forget_idle(&self) -> Vec<String> {
        let is_idle =
            |channel: &Channel| channel.waiting == 0 && channel.idle_since.elapsed() >= IDLE;
        let mut channels = self.channels();
        channels
            .extract_if(|_name, channel| is_idle(channel))
            .map(|(name, _channel)| name)
            .collect()
    }

    /// Nothing is heard any more: whoever listens looks for himself.
    fn deaf(&self) {
        for channel in self.channels().values() {
            channel.state.send_modify(|state| {
                state.heard += u64::from(state.subscribed);
                state.subscribed = false;
            });
        }
    }

    fn channels(&self) -> MutexGuard<'_, HashMap<String, Channel>> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Longer than the longest pause between two looks of a waiter, which is a second.
const IDLE: Duration = Duration::from_secs(2);
/// Between two attempts to connect.
const MIN_PAUSE: Duration = Duration::from_millis(50);
const MAX_PAUSE: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use std::{future::pending, io};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn channels_are_forgotten_though_nobody_can_be_heard() {
        let refuses = Listener::new(Duration::from_secs(1), || async {
            Err(io::Error::from(io::ErrorKind::ConnectionRefused).into())
        });
        let hangs = Listener::new(Duration::from_secs(1), pending);
        for listener in [refuses, hangs] {
            for n in 0..1_000 {
                drop(listener.listen(&n.to_string()));
            }
            let waiting = listener.listen("somebody waits");
            sleep(IDLE + MAX_PAUSE + Duration::from_secs(2)).await;
            assert_eq!(listener.shared.channels().len(), 1);
            drop(waiting);
            sleep(IDLE + MAX_PAUSE + Duration::from_secs(2)).await;
            assert_eq!(listener.shared.channels().len(), 0);
        }
    }
}
