//! The connection that listens for notifications about changed entries.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use sqlx::{
    Acquire as _, ConnectOptions, Connection as _,
    postgres::{PgConnectOptions, PgListener, PgPoolOptions},
};
use tokio::{
    sync::{Notify, watch},
    task::JoinHandle,
    time::{sleep, timeout},
};
use tower_idempotency::store::KeyId;

use crate::{SqlError, hex, timeout::with_timeout};

/// Forwards the notifications of a channel to waiters. The first waiter starts the connection.
pub(super) struct Listener {
    options: PgConnectOptions,
    channel: String,
    subscribers: Arc<Subscribers>,
    task: Mutex<Option<JoinHandle<()>>>,
}

struct Subscribers {
    by_key: Mutex<HashMap<KeyId, Vec<Arc<Notify>>>>,
    /// Set while the connection listens: later notifications arrive.
    is_listening: watch::Sender<bool>,
}

/// Subscription of one waiter to one key. Its drop unsubscribes.
pub(super) struct Subscription<'a> {
    subscribers: &'a Subscribers,
    id: KeyId,
    notify: Arc<Notify>,
    is_listening: watch::Receiver<bool>,
}

impl Listener {
    pub(super) fn new(options: PgConnectOptions, channel: String) -> Self {
        Self {
            options: options.extra_float_digits(None).disable_statement_logging(),
            channel,
            subscribers: Arc::new(Subscribers {
                by_key: Mutex::default(),
                is_listening: watch::Sender::new(false),
            }),
            task: Mutex::new(None),
        }
    }

    /// Subscribes to notifications about `id`.
    ///
    /// After [`wait_until_listening`](Subscription::wait_until_listening) has returned, no notification is missed.
    pub(super) fn subscribe(&self, id: KeyId) -> Subscription<'_> {
        self.ensure_task();
        let notify = Arc::new(Notify::new());
        let mut by_key = self.subscribers.by_key();
        by_key.entry(id).or_default().push(Arc::clone(&notify));
        drop(by_key);
        Subscription {
            subscribers: &self.subscribers,
            id,
            notify,
            is_listening: self.subscribers.is_listening.subscribe(),
        }
    }

    /// Starts the task unless it is running. A task of a runtime that was shut down is not running.
    fn ensure_task(&self) {
        let mut task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        if task.as_ref().is_none_or(JoinHandle::is_finished) {
            self.subscribers.is_listening.send_replace(false);
            let (options, channel) = (self.options.clone(), self.channel.clone());
            *task = Some(tokio::spawn(listen(
                options,
                channel,
                Arc::clone(&self.subscribers),
            )));
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let task = self.task.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(task) = task {
            task.abort();
        }
    }
}

impl Subscribers {
    fn by_key(&self) -> MutexGuard<'_, HashMap<KeyId, Vec<Arc<Notify>>>> {
        self.by_key.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn notify(&self, id: &KeyId) {
        for subscriber in self.by_key().get(id).into_iter().flatten() {
            subscriber.notify_one();
        }
    }

    /// Notifies all subscribers, because notifications may have been missed before the connection listened.
    fn notify_all(&self) {
        for subscriber in self.by_key().values().flatten() {
            subscriber.notify_one();
        }
    }
}

impl Subscription<'_> {
    /// Waits until the connection listens. Waits without a limit while the server cannot be reached.
    pub(super) async fn wait_until_listening(&mut self) {
        // The sender cannot be dropped: this subscription borrows its owner.
        self.is_listening
            .wait_for(|is_listening| *is_listening)
            .await
            .ok();
    }

    pub(super) async fn notified(&self) {
        self.notify.notified().await;
    }
}

impl Drop for Subscription<'_> {
    fn drop(&mut self) {
        let mut by_key = self.subscribers.by_key();
        if let Some(subscribers) = by_key.get_mut(&self.id) {
            subscribers.retain(|subscriber| !Arc::ptr_eq(subscriber, &self.notify));
            if subscribers.is_empty() {
                by_key.remove(&self.id);
            }
        }
    }
}

/// Listens until the task is aborted. Reconnects a second after each failure.
async fn listen(options: PgConnectOptions, channel: String, subscribers: Arc<Subscribers>) {
    loop {
        if let Err(error) = listen_once(&options, &channel, &subscribers).await {
            tracing::debug!(%error, "notifications lost, waiters poll until the listener reconnects");
        }
        subscribers.is_listening.send_replace(false);
        sleep(RECONNECT_DELAY).await;
    }
}

/// Listens until the connection fails or no longer replies.
async fn listen_once(
    options: &PgConnectOptions,
    channel: &str,
    subscribers: &Subscribers,
) -> Result<(), SqlError> {
    let pool = PgPoolOptions::new()
        .max_connections(1)
        .max_lifetime(None)
        .idle_timeout(None)
        .connect_lazy_with(options.clone());
    let mut listener = PgListener::connect_with(&pool).await?;
    listener.eager_reconnect(false);
    // Boxed, because its future is large in an optimized build.
    with_timeout(async { Ok(Box::pin(listener.listen(channel)).await?) }).await?;
    subscribers.is_listening.send_replace(true);
    subscribers.notify_all();
    loop {
        let Ok(notification) = timeout(PING_AFTER, listener.try_recv()).await else {
            // Either there was no notification, or the connection is dead. A firewall or a crashed server drops a
            // connection without notice. If the ping fails, sqlx sends `UNLISTEN` in a task of its own, which ends when the
            // kernel closes the connection.
            let ping = async { Ok(listener.acquire().await?.ping().await?) };
            with_timeout(ping).await?;
            continue;
        };
        let Some(notification) = notification? else {
            return Ok(());
        };
        let id = hex::decode(notification.payload()).and_then(|bytes| bytes.try_into().ok());
        if let Some(id) = id {
            subscribers.notify(&KeyId::from_bytes(id));
        }
    }
}

/// Time without a notification after which the connection is pinged. Shorter than the idle timeout of most firewalls and
/// proxies.
const PING_AFTER: Duration = Duration::from_secs(60);
const RECONNECT_DELAY: Duration = Duration::from_secs(1);
