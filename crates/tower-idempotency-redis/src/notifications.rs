//! Notifications of completions and releases: one connection for all waiters of a store.
//!
//! A notification is a hint. While the connection is down no notification arrives, and waiters poll the store.

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

/// The subscriptions of a store. Connects for the first waiter, and stays connected.
pub(crate) struct Notifications {
    shared: Arc<Shared>,
    task: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    connect: Box<dyn Fn() -> BoxFuture<'static, RedisResult<PubSub>> + Send + Sync>,
    /// Limit for each of connecting, subscribing and unsubscribing.
    step_timeout: Duration,
    channels: Mutex<HashMap<String, Channel>>,
    /// Notified when there is a channel to subscribe to.
    has_new_channel: Notify,
}

struct Channel {
    state: watch::Sender<ChannelState>,
    waiters: usize,
    /// Time at which the last waiter left.
    idle_since: Instant,
}

#[derive(Clone, Copy, Default)]
struct ChannelState {
    is_subscribed: bool,
    /// Number of messages, and of disconnections during which messages may have been missed.
    messages: u64,
}

/// A waiter's subscription to one channel.
pub(crate) struct Subscription {
    shared: Arc<Shared>,
    name: String,
    state: watch::Receiver<ChannelState>,
    /// Value of [`ChannelState::messages`] when the subscription began.
    messages_before: u64,
}

impl Notifications {
    pub(crate) fn new<F>(
        step_timeout: Duration,
        connect: impl Fn() -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = RedisResult<PubSub>> + Send + 'static,
    {
        Self {
            shared: Arc::new(Shared {
                connect: Box::new(move || connect().boxed()),
                step_timeout,
                channels: Mutex::default(),
                has_new_channel: Notify::new(),
            }),
            task: Mutex::default(),
        }
    }

    /// Subscribes to a channel.
    ///
    /// The subscription receives messages published after [`wait_until_subscribed`](Subscription::wait_until_subscribed)
    /// has returned.
    pub(crate) fn subscribe(&self, name: &str) -> Subscription {
        let state = {
            let mut channels = self.shared.channels();
            if !channels.contains_key(name) {
                self.shared.has_new_channel.notify_one();
                channels.insert(name.to_owned(), Channel::new());
            }
            channels.get_mut(name).map_or_else(
                || unreachable!("inserted if it was missing"),
                |channel| {
                    channel.waiters += 1;
                    channel.state.subscribe()
                },
            )
        };
        self.ensure_task();
        let messages_before = state.borrow().messages;
        Subscription {
            shared: Arc::clone(&self.shared),
            name: name.to_owned(),
            state,
            messages_before,
        }
    }

    /// Spawns the task unless it is running. The task ends with the runtime that it was spawned on.
    fn ensure_task(&self) {
        let mut task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        if task.as_ref().is_none_or(JoinHandle::is_finished) {
            self.shared.mark_disconnected();
            *task = Some(tokio::spawn(Arc::clone(&self.shared).run()));
        }
    }
}

impl Drop for Notifications {
    fn drop(&mut self) {
        let task = self.task.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(task) = task.take() {
            task.abort();
        }
    }
}

impl Subscription {
    /// Waits until the server has confirmed the subscription.
    pub(crate) async fn wait_until_subscribed(&mut self) {
        // The sender lives as long as the channel has waiters.
        self.state.wait_for(|state| state.is_subscribed).await.ok();
    }

    /// Waits until a message arrives, or until the connection is lost and a message may have been missed.
    pub(crate) async fn wait_for_message(&mut self) {
        let before = self.messages_before;
        self.state
            .wait_for(|state| state.messages != before)
            .await
            .ok();
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        if let Some(channel) = self.shared.channels().get_mut(&self.name) {
            channel.waiters -= 1;
            channel.idle_since = Instant::now();
        }
    }
}

impl Channel {
    fn new() -> Self {
        Self {
            state: watch::Sender::default(),
            waiters: 0,
            idle_since: Instant::now(),
        }
    }
}

impl Shared {
    /// Connects, receives messages, and reconnects with backoff. Never returns.
    async fn run(self: Arc<Self>) {
        let mut delay = MIN_BACKOFF;
        loop {
            if let Ok(Ok(connection)) = timeout(self.step_timeout, (self.connect)()).await {
                self.has_new_channel.notify_one();
                // A server that accepts the connection may still refuse subscriptions.
                if self.receive(connection).await {
                    delay = MIN_BACKOFF;
                }
            }
            self.mark_disconnected();
            self.remove_idle();
            sleep(delay).await;
            delay = (delay * 2).min(MAX_BACKOFF);
        }
    }

    /// Receives messages until the connection fails, or a request on it fails or times out. Returns `true` if a subscription
    /// succeeded.
    async fn receive(&self, connection: PubSub) -> bool {
        let mut has_subscribed = false;
        let (mut sink, mut messages) = connection.split();
        let mut sweep = interval(IDLE);
        sweep.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let result = tokio::select! {
                message = messages.next() => match message {
                    Some(message) => {
                        self.notify_waiters(message.get_channel_name());
                        continue;
                    }
                    None => return has_subscribed,
                },
                () = self.has_new_channel.notified() => {
                    let names = self.unsubscribed();
                    if names.is_empty() {
                        continue;
                    }
                    let result = timeout(self.step_timeout, sink.subscribe(&names)).await;
                    if matches!(result, Ok(Ok(()))) {
                        has_subscribed = true;
                        self.mark_subscribed(&names);
                    }
                    result
                }
                _ = sweep.tick() => {
                    let names = self.remove_idle();
                    if names.is_empty() {
                        continue;
                    }
                    timeout(self.step_timeout, sink.unsubscribe(&names)).await
                }
            };
            if !matches!(result, Ok(Ok(()))) {
                return has_subscribed;
            }
        }
    }

    fn notify_waiters(&self, name: &str) {
        if let Some(channel) = self.channels().get(name) {
            channel.state.send_modify(|state| state.messages += 1);
        }
    }

    /// Returns the names of the channels to subscribe to.
    fn unsubscribed(&self) -> Vec<String> {
        let channels = self.channels();
        let unsubscribed = channels
            .iter()
            .filter(|(_name, channel)| !channel.state.borrow().is_subscribed);
        unsubscribed.map(|(name, _channel)| name.clone()).collect()
    }

    fn mark_subscribed(&self, names: &[String]) {
        let channels = self.channels();
        for channel in names.iter().filter_map(|name| channels.get(name)) {
            channel
                .state
                .send_modify(|state| state.is_subscribed = true);
        }
    }

    /// Removes the channels that have had no waiter for `IDLE`, and returns their names.
    ///
    /// A waiter unsubscribes and subscribes again each time it polls the store, so a channel outlives its waiters for a
    /// while.
    fn remove_idle(&self) -> Vec<String> {
        let is_idle =
            |channel: &Channel| channel.waiters == 0 && channel.idle_since.elapsed() >= IDLE;
        let mut channels = self.channels();
        channels
            .extract_if(|_name, channel| is_idle(channel))
            .map(|(name, _channel)| name)
            .collect()
    }

    /// Marks all channels as unsubscribed and wakes their waiters. They may have missed a message, so they query the store.
    fn mark_disconnected(&self) {
        for channel in self.channels().values() {
            channel.state.send_modify(|state| {
                state.messages += u64::from(state.is_subscribed);
                state.is_subscribed = false;
            });
        }
    }

    fn channels(&self) -> MutexGuard<'_, HashMap<String, Channel>> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Time after which a channel without waiters is removed. Longer than the longest delay between two polls of a waiter (1 s).
const IDLE: Duration = Duration::from_secs(2);
/// Delays between two attempts to connect.
const MIN_BACKOFF: Duration = Duration::from_millis(50);
const MAX_BACKOFF: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use std::{future::pending, io};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn idle_channels_are_removed_while_disconnected() {
        let refused = Notifications::new(Duration::from_secs(1), || async {
            Err(io::Error::from(io::ErrorKind::ConnectionRefused).into())
        });
        let hanging = Notifications::new(Duration::from_secs(1), pending);
        for notifications in [refused, hanging] {
            for n in 0..1_000 {
                drop(notifications.subscribe(&n.to_string()));
            }
            let waiter = notifications.subscribe("has a waiter");
            sleep(IDLE + MAX_BACKOFF + Duration::from_secs(2)).await;
            assert_eq!(notifications.shared.channels().len(), 1);
            drop(waiter);
            sleep(IDLE + MAX_BACKOFF + Duration::from_secs(2)).await;
            assert_eq!(notifications.shared.channels().len(), 0);
        }
    }
}
