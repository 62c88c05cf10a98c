//! Bounds of all observations of a layer.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use crate::limits::add_within;

/// Store calls of observations at the same time. A quarter is reserved for the ends of judged executions.
const MAX_CALLS: usize = 64;

/// Bytes of request bodies that are stored until they are complete, because their fingerprint depends on their form.
const MAX_BYTES: usize = 16 * 1024 * 1024;

/// Counters of all observations of a layer. A request beyond a bound is not judged.
#[derive(Default)]
pub(crate) struct Observer {
    calls: AtomicUsize,
    bytes: AtomicUsize,
}

/// Permit of one store call.
pub(super) struct CallPermit(Arc<Observer>);

/// Bytes of one request body.
pub(super) struct HeldBytes {
    observer: Arc<Observer>,
    bytes: usize,
}

impl Observer {
    /// Returns a permit to judge a request, unless the store is busy.
    pub(super) fn permit_acquire(self: &Arc<Self>) -> Option<CallPermit> {
        self.permit(MAX_CALLS - MAX_CALLS / 4)
    }

    /// Returns a permit to end an execution that was judged.
    pub(super) fn permit_end(self: &Arc<Self>) -> Option<CallPermit> {
        self.permit(MAX_CALLS)
    }

    fn permit(self: &Arc<Self>, max: usize) -> Option<CallPermit> {
        add_within(&self.calls, 1, max).then(|| CallPermit(Arc::clone(self)))
    }

    /// Returns an empty account of bytes.
    pub(super) fn account(self: &Arc<Self>) -> HeldBytes {
        HeldBytes {
            observer: Arc::clone(self),
            bytes: 0,
        }
    }
}

impl HeldBytes {
    /// Adds bytes. Returns `false` if all observations together would hold too many.
    pub(super) fn add(&mut self, bytes: usize) -> bool {
        let is_added = add_within(&self.observer.bytes, bytes, MAX_BYTES);
        if is_added {
            self.bytes += bytes;
        }
        is_added
    }
}

impl Drop for CallPermit {
    fn drop(&mut self) {
        self.0.calls.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        self.observer.bytes.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_hold_and_are_returned() {
        let observer = Arc::new(Observer::default());
        let judging: Vec<_> = std::iter::from_fn(|| observer.permit_acquire()).collect();
        assert_eq!(judging.len(), 48);
        let ending: Vec<_> = std::iter::from_fn(|| observer.permit_end()).collect();
        assert_eq!(ending.len(), 16, "the rest is for ends");
        drop((judging, ending));
        assert!(observer.permit_acquire().is_some());

        let (mut one, mut other) = (observer.account(), observer.account());
        assert!(one.add(MAX_BYTES - 1) && other.add(1) && !other.add(1));
        drop(one);
        assert!(other.add(MAX_BYTES - 1));
        drop(other);
        assert_eq!(observer.bytes.load(Ordering::SeqCst), 0);
    }
}
