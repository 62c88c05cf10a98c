//! Bounds on what is in flight, counted across all clones of a layer.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use tokio::sync::Notify;

use crate::telemetry;

/// The bounds of one layer.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    pub(crate) max_in_flight: usize,
    pub(crate) max_buffered: usize,
}

/// How many exchanges run and how many bytes they buffer.
#[derive(Default)]
pub(crate) struct Limits {
    in_flight: AtomicUsize,
    buffered: AtomicUsize,
    /// Of those, how many are held for clients alone.
    unsent: AtomicUsize,
    giving_back: AtomicUsize,
    /// Of those, how many have no answer so far.
    unanswered: AtomicUsize,
    draining: AtomicBool,
    idle: Notify,
}

/// One exchange's place, for as long as it runs, in the caller's hands or in a task of its own.
pub(crate) struct Place {
    pub(crate) buffer: Buffer,
}

/// A lease that is given back once its request was refused, for as long as that takes: counted beside what is in flight, or a
/// store that hangs would keep everybody out.
pub(crate) struct GivingBack {
    limits: Arc<Limits>,
    answered: bool,
}

/// What somebody has buffered of what all may together; given back when it is dropped.
pub(crate) struct Buffer {
    limits: Arc<Limits>,
    bytes: usize,
}

/// What is collected of an answer that its handler would have made only as its client took it: buffered, and counted once more,
/// as nothing says when a client takes it. Given back when it is dropped.
pub(crate) struct Unsent {
    buffer: Buffer,
}

/// Why an exchange was turned away.
pub(crate) enum NoPlace {
    Draining,
    Full,
    TooManyBytes,
}

impl Limits {
    /// A place among at most `max`.
    pub(crate) fn enter(self: &Arc<Self>, max: usize) -> Result<Place, NoPlace> {
        let entered = add_within(&self.in_flight, 1, max);
        let place = entered.then(|| {
            telemetry::in_flight(1.0);
            Place {
                buffer: self.buffer(),
            }
        });
        // Entered first: whoever drains sees this request, or it sees that.
        if self.draining.load(Ordering::SeqCst) {
            return Err(NoPlace::Draining);
        }
        place.ok_or(NoPlace::Full)
    }

    /// Holds nothing yet.
    pub(crate) fn buffer(self: &Arc<Self>) -> Buffer {
        Buffer {
            limits: Arc::clone(self),
            bytes: 0,
        }
    }

    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::SeqCst);
    }

    /// What a drain waits for.
    pub(crate) fn in_flight(&self) -> usize {
        // In this order: who gives back is counted there before it is no longer counted here.
        let in_flight = self.in_flight.load(Ordering::SeqCst);
        in_flight + self.unanswered.load(Ordering::SeqCst)
    }

    /// Resolves when nothing is in flight.
    pub(crate) async fn idle(&self) {
        loop {
            let idle = self.idle.notified();
            let mut idle = std::pin::pin!(idle);
            idle.as_mut().enable();
            if self.in_flight() == 0 {
                return;
            }
            idle.await;
        }
    }
}

impl Place {
    /// A second place, for what else the request leaves behind.
    pub(crate) fn beside(&self) -> Self {
        let limits = &self.buffer.limits;
        limits.in_flight.fetch_add(1, Ordering::SeqCst);
        telemetry::in_flight(1.0);
        Self {
            buffer: limits.buffer(),
        }
    }

    /// Leaves the place to another, and is one of at most `max` that give back; stays what it is where there are so many.
    pub(crate) fn give_back(self, max: usize) -> Result<GivingBack, Self> {
        let limits = &self.buffer.limits;
        if !add_within(&limits.giving_back, 1, max) {
            return Err(self);
        }
        limits.unanswered.fetch_add(1, Ordering::SeqCst);
        Ok(GivingBack {
            limits: Arc::clone(limits),
            answered: false,
        })
    }
}

impl GivingBack {
    /// Whoever drains need not wait for it any longer.
    pub(crate) fn answered(&mut self) {
        if !std::mem::replace(&mut self.answered, true)
            && self.limits.unanswered.fetch_sub(1, Ordering::SeqCst) == 1
        {
            self.limits.idle.notify_waiters();
        }
    }
}

impl Drop for GivingBack {
    fn drop(&mut self) {
        self.answered();
        self.limits.giving_back.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Buffer {
    /// Takes `bytes` more of the `max` that all may buffer together.
    pub(crate) fn take(&mut self, bytes: usize, max: usize) -> bool {
        let granted = add_within(&self.limits.buffered, bytes, max);
        if granted {
            self.bytes += bytes;
        }
        granted
    }

    /// Holds nothing yet.
    pub(crate) fn unsent(&self) -> Unsent {
        Unsent {
            buffer: self.limits.buffer(),
        }
    }

    /// Counts for `bytes` from now on; what is missing of them is there, whether it fits or not.
    pub(crate) fn keep(&mut self, bytes: usize) {
        let more = bytes.saturating_sub(self.bytes);
        if more > 0 {
            self.bytes += more;
            self.limits.buffered.fetch_add(more, Ordering::Relaxed);
        }
        self.shrink(bytes);
    }

    /// Gives back all but `bytes`.
    pub(crate) fn shrink(&mut self, bytes: usize) {
        let back = self.bytes.saturating_sub(bytes);
        if back > 0 {
            self.bytes -= back;
            self.limits.buffered.fetch_sub(back, Ordering::Relaxed);
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.keep(0);
    }
}

impl Unsent {
    /// Takes `bytes` more of what is for clients that read slowly: half of `max`, or others could upload nothing, and not the
    /// last eighth, or answers that come in one piece would go unrecorded.
    pub(crate) fn take(&mut self, bytes: usize, max: usize) -> bool {
        let unsent = &self.buffer.limits.unsent;
        if !add_within(unsent, bytes, max / 2) {
            return false;
        }
        let granted = self.buffer.take(bytes, max - max / 8);
        if !granted {
            self.buffer.limits.unsent.fetch_sub(bytes, Ordering::SeqCst);
        }
        granted
    }

    /// Counts for `bytes`, whether they fit or not: those that they are given for did.
    pub(crate) fn keeping(mut self, bytes: usize) -> Self {
        self.buffer.limits.unsent.fetch_add(bytes, Ordering::SeqCst);
        self.buffer.keep(bytes);
        self
    }

    /// Gives back all but `bytes`.
    pub(crate) fn shrink(&mut self, bytes: usize) {
        let back = self.buffer.bytes.saturating_sub(bytes);
        self.buffer.shrink(bytes);
        if back > 0 {
            self.buffer.limits.unsent.fetch_sub(back, Ordering::SeqCst);
        }
    }
}

impl Drop for Unsent {
    fn drop(&mut self) {
        self.shrink(0);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let limits = &self.buffer.limits;
        telemetry::in_flight(-1.0);
        if limits.in_flight.fetch_sub(1, Ordering::SeqCst) == 1 {
            limits.idle.notify_waiters();
        }
    }
}

fn add_within(counter: &AtomicUsize, n: usize, max: usize) -> bool {
    counter
        .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |used| {
            used.checked_add(n).filter(|sum| *sum <= max)
        })
        .is_ok()
}
