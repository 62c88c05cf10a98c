//! Simulates a queue that delivers at least once, and does on purpose what real queues do occasionally.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// A queue in this process.
#[derive(Debug)]
pub struct Queue {
    is_fifo: bool,
    visibility: Duration,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    messages: BTreeMap<u64, Message>,
    sent: u64,
    deliveries: u64,
    deletions: u64,
    dead: Vec<(String, String)>,
}

#[derive(Debug)]
struct Message {
    group: String,
    body: String,
    visible: Instant,
}

/// A delivered message. Unless it is deleted, it is delivered again.
#[derive(Clone, Debug)]
pub struct Delivery {
    number: u64,
    /// The content of the message.
    pub body: String,
}

impl Queue {
    /// Keeps the messages of a group in order: the next one is not delivered before the one before it is deleted.
    #[must_use]
    pub fn fifo(visibility: Duration) -> Self {
        Self::new(true, visibility)
    }

    /// Keeps no order, delivers every third message twice at once, and loses every fifth deletion.
    #[must_use]
    pub fn standard(visibility: Duration) -> Self {
        Self::new(false, visibility)
    }

    fn new(is_fifo: bool, visibility: Duration) -> Self {
        Self {
            is_fifo,
            visibility,
            state: Mutex::default(),
        }
    }

    /// Sends a message.
    pub fn send(&self, group: impl Into<String>, body: impl Into<String>) {
        let mut state = self.state();
        state.sent += 1;
        let (number, message) = (
            state.sent,
            Message {
                group: group.into(),
                body: body.into(),
                visible: Instant::now(),
            },
        );
        state.messages.insert(number, message);
    }

    /// Returns a message that no consumer handles, or whose visibility timeout has passed.
    pub fn receive(&self) -> Option<Delivery> {
        let mut state = self.state();
        let now = Instant::now();
        let number = if self.is_fifo {
            let mut seen = BTreeSet::new();
            let mut first = state
                .messages
                .iter()
                .filter(|(_, it)| seen.insert(&it.group));
            let ready = first.find(|(_, it)| it.visible <= now);
            ready.map(|(number, _)| *number)
        } else {
            let mut latest = state.messages.iter().rev();
            latest
                .find(|(_, it)| it.visible <= now)
                .map(|(number, _)| *number)
        }?;
        state.deliveries += 1;
        let stays = !self.is_fifo && state.deliveries.is_multiple_of(3);
        let message = state.messages.get_mut(&number)?;
        if !stays {
            message.visible = now + self.visibility;
        }
        Some(Delivery {
            number,
            body: message.body.clone(),
        })
    }

    /// Deletes a message that was handled.
    pub fn delete(&self, delivery: &Delivery) {
        let mut state = self.state();
        state.deletions += 1;
        if self.is_fifo || !state.deletions.is_multiple_of(5) {
            state.messages.remove(&delivery.number);
        }
    }

    /// Moves the message to the dead letters with the reason. It is not delivered again, and an operator can inspect it.
    pub fn move_to_dead_letters(&self, delivery: Delivery, why: String) {
        let mut state = self.state();
        state.messages.remove(&delivery.number);
        state.dead.push((why, delivery.body));
    }

    /// Returns `true` if all messages were deleted or moved to the dead letters.
    pub fn is_empty(&self) -> bool {
        self.state().messages.is_empty()
    }

    /// Returns the number of deliveries so far.
    pub fn deliveries(&self) -> u64 {
        self.state().deliveries
    }

    /// Returns the dead letters, each as reason and message.
    pub fn dead_letters(&self) -> Vec<(String, String)> {
        self.state().dead.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
