//! The one connection that listens for the end of leases.

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

use crate::{SqlError, bounded::bounded, hex};

/// Tells waiters what is told on a channel. The first of them has it connect.
pub(super) struct Listener {
    options: PgConnectOptions,
    channel: String,
    ears: Arc<Ears>,
    task: Mutex<Option<JoinHandle<()>>>,
}

struct Ears {
    waiting: Mutex<HashMap<KeyId, Vec<Arc<Notify>>>>,
    /// What is told from now on is heard.
    hears: watch::Sender<bool>,
}

/// A place among the waiters for one key; given up when dropped.
pub(super) struct Waiting<'a> {
    ears: &'a Ears,
    id: KeyId,
    told: Arc<Notify>,
    hears: watch::Receiver<bool>,
}

impl Listener {
    pub(super) fn new(options: PgConnectOptions, channel: String) -> Self {
        Self {
            options: options.extra_float_digits(None).disable_statement_logging(),
            channel,
            ears: Arc::new(Ears {
                waiting: Mutex::default(),
                hears: watch::Sender::new(false),
            }),
            task: Mutex::new(None),
        }
    }

    /// From now on what is told about `id` is kept for the waiter, once it [is heard](Waiting::is_heard).
    pub(super) fn wait_for(&self, id: KeyId) -> Waiting<'_> {
        self.listen();
        let told = Arc::new(Notify::new());
        let mut waiting = self.ears.waiting();
        waiting.entry(id).or_default().push(Arc::clone(&told));
        drop(waiting);
        Waiting {
            ears: &self.ears,
            id,
            told,
            hears: self.ears.hears.subscribe(),
        }
    }

    /// Starts the task, unless it is running. One that was started on a runtime that is no more is not.
    fn listen(&self) {
        let mut task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        if task.as_ref().is_none_or(JoinHandle::is_finished) {
            self.ears.hears.send_replace(false);
            let (options, channel) = (self.options.clone(), self.channel.clone());
            *task = Some(tokio::spawn(listen(
                options,
                channel,
                Arc::clone(&self.ears),
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

impl Ears {
    fn waiting(&self) -> MutexGuard<'_, HashMap<KeyId, Vec<Arc<Notify>>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, id: &KeyId) {
        for told in self.waiting().get(id).into_iter().flatten() {
            told.notify_one();
        }
    }

    /// Something may have been told while nobody listened.
    fn tell_all(&self) {
        for told in self.waiting().values().flatten() {
            told.notify_one();
        }
    }
}

impl Waiting<'_> {
    /// Until the channel is listened to: without end while the server cannot be reached.
    pub(super) async fn is_heard(&mut self) {
        // The sender lives as long as we borrow its owner.
        self.hears.wait_for(|hears| *hears).await.ok();
    }

    pub(super) async fn told(&self) {
        self.told.notified().await;
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut waiting = self.ears.waiting();
        if let Some(places) = waiting.get_mut(&self.id) {
            places.retain(|told| !Arc::ptr_eq(told, &self.told));
            if places.is_empty() {
                waiting.remove(&self.id);
            }
        }
    }
}

async fn listen(options: PgConnectOptions, channel: String, ears: Arc<Ears>) {
    loop {
        if let Err(error) = hear(&options, &channel, &ears).await {
            tracing::debug!(%error, "waiters look from time to time until notifications are heard again");
        }
        ears.hears.send_replace(false);
        sleep(PAUSE).await;
    }
}

/// Until the connection fails, or has fallen silent.
async fn hear(options: &PgConnectOptions, channel: &str, ears: &Ears) -> Result<(), SqlError> {
    let pool = PgPoolOptions::new()
        .max_connections(1)
        .max_lifetime(None)
        .idle_timeout(None)
        .connect_lazy_with(options.clone());
    let mut listener = PgListener::connect_with(&pool).await?;
    listener.eager_reconnect(false);
    bounded(async { Ok(listener.listen(channel).await?) }).await?;
    ears.hears.send_replace(true);
    ears.tell_all();
    loop {
        let Ok(told) = timeout(QUIET, listener.try_recv()).await else {
            // Nothing was told, or nothing can be any more: whatever lies on the way may forget an idle connection, and the
            // server be gone, without either end being told. If so, sqlx says `UNLISTEN` on it in a task of its own, which ends
            // when the kernel gives the connection up.
            let ping = async { Ok(listener.acquire().await?.ping().await?) };
            bounded(ping).await?;
            continue;
        };
        let Some(told) = told? else {
            return Ok(());
        };
        let id = hex::decode(told.payload()).and_then(|bytes| bytes.try_into().ok());
        if let Some(id) = id {
            ears.tell(&KeyId::from_bytes(id));
        }
    }
}

/// Short enough for the way to remember the connection, as a rule.
const QUIET: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_secs(1);
