//! An outbox in memory that fails on request.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, SystemTime},
};

use tower_idempotency_client::{Entry, Outbox, OutboxError};

/// Outbox in memory that can fail, and counts its calls.
#[derive(Default)]
pub(crate) struct Memory {
    entries: Mutex<Vec<(u64, Entry, bool)>>,
    fails: Mutex<Option<&'static str>>,
    delays: Mutex<Vec<(&'static str, Duration)>>,
    /// Largest number of entries that a call has read.
    pub(crate) read: AtomicU32,
    pub(crate) hangs: AtomicU32,
}

impl Memory {
    /// Lets the calls of one method fail.
    pub(crate) fn fail(&self, method: Option<&'static str>) {
        *self.fails.lock().unwrap() = method;
    }

    /// Delays the calls of one method. Replaces its earlier delay.
    pub(crate) fn delay(&self, method: &'static str, delay: Duration) {
        let mut delays = self.delays.lock().unwrap();
        delays.retain(|(delayed, _)| *delayed != method);
        delays.push((method, delay));
    }

    async fn wait(&self, method: &str) {
        let delay = {
            let delays = self.delays.lock().unwrap();
            let mut delays = delays.iter().filter(|(delayed, _)| *delayed == method);
            delays.next().map(|(_, delay)| *delay)
        };
        if let Some(delay) = delay {
            tokio::time::sleep(delay).await;
        }
    }

    fn check(&self, method: &str) -> Result<(), OutboxError> {
        match *self.fails.lock().unwrap() {
            Some(failing) if failing == method => Err(OutboxError::new("disk full")),
            _ => Ok(()),
        }
    }

    pub(crate) fn keys(&self) -> Vec<String> {
        let entries = self.entries.lock().unwrap();
        let keys = entries.iter().map(|(_, entry, _)| entry.key().to_owned());
        keys.collect()
    }

    fn mark(&self, key: &str, at: Option<SystemTime>, provider: Option<u64>) -> Option<Entry> {
        let mut entries = self.entries.lock().unwrap();
        let found = entries
            .iter_mut()
            .find(|(_, entry, _)| entry.key() == key)?;
        if let Some(at) = at {
            found.1 = found.1.clone().or_first_sent(at);
        }
        if let Some(provider) = provider {
            found.1 = found.1.clone().or_provider(provider);
        }
        found.2 = true;
        Some(found.1.clone())
    }
}

impl Outbox for Memory {
    async fn store(&self, entry: &Entry) -> Result<Option<Entry>, OutboxError> {
        if self.hangs.load(Ordering::Relaxed) > 0 {
            std::future::pending::<()>().await;
        }
        self.wait("store").await;
        self.check("store")?;
        if let Some(stored) = self.mark(entry.key(), entry.first_sent(), entry.provider()) {
            return Ok(Some(stored));
        }
        let mut entries = self.entries.lock().unwrap();
        let position = entries.last().map_or(1, |(position, ..)| position + 1);
        entries.push((position, entry.clone(), false));
        Ok(None)
    }

    async fn resume(
        &self,
        key: &str,
        at: SystemTime,
        provider: Option<u64>,
    ) -> Result<Option<Entry>, OutboxError> {
        self.wait("resume").await;
        self.check("resume")?;
        Ok(self.mark(key, Some(at), provider))
    }

    async fn discard(&self, key: &str, first_sent: SystemTime) -> Result<bool, OutboxError> {
        self.wait("discard").await;
        self.check("discard")?;
        let mut entries = self.entries.lock().unwrap();
        let before = entries.len();
        entries.retain(|(_, entry, is_resumed)| {
            entry.key() != key || entry.first_sent() != Some(first_sent) || *is_resumed
        });
        Ok(entries.len() < before)
    }

    async fn remove(&self, key: &str) -> Result<(), OutboxError> {
        self.wait("remove").await;
        self.check("remove")?;
        let mut entries = self.entries.lock().unwrap();
        entries.retain(|(_, entry, _)| entry.key() != key);
        Ok(())
    }

    async fn pending(&self, after: u64, limit: u32) -> Result<Vec<(u64, Entry)>, OutboxError> {
        self.wait("pending").await;
        self.check("pending")?;
        let entries = self.entries.lock().unwrap();
        let entries = entries.iter().filter(|(position, ..)| *position > after);
        let entries = entries.map(|(position, entry, _)| (*position, entry.clone()));
        let entries: Vec<_> = entries.take(limit as usize).collect();
        let count = u32::try_from(entries.len()).unwrap();
        self.read.fetch_max(count, Ordering::Relaxed);
        Ok(entries)
    }
}
