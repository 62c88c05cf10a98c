use std::{fmt, time::Duration};

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use tower_idempotency::Ttl;

use crate::Failure;

/// A stored message of a [retry queue](super::RetryQueue). Times are milliseconds since 1970 by the clock of the database.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// The id that the producer chose.
    pub id: String,
    /// The content.
    pub body: String,
    /// The state.
    pub state: State,
    /// The number of deliveries so far, which names the latest one. It never decreases.
    pub delivery: i64,
    /// The number of failed attempts since the message was sent or redriven.
    pub failures: u32,
    /// The delivery after which an operator resolved the message as [not sent](Resolution::NotSent), or 0.
    pub round: i64,
    /// The time of the last move.
    pub since: i64,
    /// The time of the next delivery of a queued message, and of the deletion of a finished one.
    pub due: i64,
    /// The reason of the last move that had one.
    pub reason: String,
}

/// The state of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// The message waits for its next delivery, or a consumer handles it.
    Queued,
    /// The message failed permanently, without an effect. An operator can redrive it.
    DeadLetter,
    /// The message may have had its effect. No consumer handles it until an operator resolves it.
    NeedsAttention,
    /// The message had its effect. It is stored for a while, so that the queue refuses its id.
    Done,
}

/// The operator's decision about a message that needs attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Resolution {
    /// The message had its effect. It is done.
    Sent,
    /// The message had no effect and will have none: the process that handled it has ended. It is queued under another key.
    NotSent,
}

/// A change of state. It happens only if the message is still in the former state and at the same delivery.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    pub(crate) id: String,
    pub(crate) delivery: i64,
    pub(crate) from: State,
    pub(crate) to: State,
    pub(crate) failures: u32,
    /// Unchanged if absent.
    pub(crate) round: Option<i64>,
    /// Unchanged if absent.
    pub(crate) reason: Option<String>,
    pub(crate) delay: Duration,
}

impl Message {
    /// Returns the idempotency key: the id, and the round.
    ///
    /// A redriven message keeps its key, which was released. A message that was resolved as not sent gets another key. Its
    /// former key stays refused, so a consumer that still has an earlier delivery executes nothing.
    #[must_use]
    pub fn key(&self) -> String {
        format!("{}/{}", self.round, self.id)
    }

    /// Returns the move to [`State::Done`], for a message that had its effect.
    #[must_use]
    pub fn done(&self) -> Move {
        Move {
            to: State::Done,
            ..self.postpone(QUEUE_RETENTION.as_duration())
        }
    }

    /// Returns the move after a failed attempt without an effect: the message is delivered again after `delay`.
    #[must_use]
    pub fn retry(&self, delay: Duration, reason: String) -> Move {
        Move {
            failures: self.failures + 1,
            reason: Some(reason),
            ..self.postpone(delay)
        }
    }

    /// Returns the move of a message that was not tried: it is delivered again after `delay`, and no failure is counted.
    #[must_use]
    pub fn postpone(&self, delay: Duration) -> Move {
        Move {
            id: self.id.clone(),
            delivery: self.delivery,
            from: State::Queued,
            to: State::Queued,
            failures: self.failures,
            round: None,
            reason: None,
            delay,
        }
    }

    /// Returns the move to [`State::DeadLetter`], after an attempt that failed permanently without an effect.
    #[must_use]
    pub fn dead_letter(&self, reason: String) -> Move {
        Move {
            to: State::DeadLetter,
            ..self.retry(Duration::ZERO, reason)
        }
    }

    /// Returns the move to [`State::NeedsAttention`], after an attempt that may have had its effect.
    #[must_use]
    pub fn needs_attention(&self, reason: String) -> Move {
        Move {
            to: State::NeedsAttention,
            reason: Some(reason),
            ..self.postpone(Duration::ZERO)
        }
    }
}

impl Move {
    /// Returns the operator's move of a dead letter back to the queue, with all its attempts.
    ///
    /// `delivery` is that of the listed message. If the message fails again, it is a dead letter of another delivery, which
    /// this move does not redrive.
    #[must_use]
    pub fn redrive(id: &str, delivery: i64) -> Self {
        Self {
            id: id.to_owned(),
            delivery,
            from: State::DeadLetter,
            to: State::Queued,
            failures: 0,
            round: None,
            reason: None,
            delay: Duration::ZERO,
        }
    }

    /// Returns the operator's move of a message that needs attention. `delivery` is that of the listed message.
    #[must_use]
    pub fn resolve(id: &str, delivery: i64, resolution: Resolution) -> Self {
        let next = Self {
            from: State::NeedsAttention,
            ..Self::redrive(id, delivery)
        };
        match resolution {
            Resolution::Sent => Self {
                to: State::Done,
                delay: QUEUE_RETENTION.as_duration(),
                ..next
            },
            Resolution::NotSent => Self {
                round: Some(delivery),
                ..next
            },
        }
    }
}

impl State {
    /// Returns the name under which the state is stored.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::DeadLetter => "dead-letter",
            Self::NeedsAttention => "needs-attention",
            Self::Done => "done",
        }
    }
}

impl State {
    pub(super) fn from_name(name: &str) -> Result<Self, Failure> {
        let mut all = Self::value_variants().iter();
        let state = all.find(|it| it.name() == name).copied();
        state.ok_or_else(|| format!("expected a state, found {name}").into())
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Returns the duration in milliseconds, at most 100 years.
pub(super) fn millis(duration: Duration) -> i64 {
    duration.min(Ttl::MAX.as_duration()).as_millis() as i64
}

/// The time for which the queue and the layer recognise a finished message. That of SQS is as long.
pub(crate) const QUEUE_RETENTION: Ttl = Ttl::from_secs(14 * 24 * 60 * 60);
