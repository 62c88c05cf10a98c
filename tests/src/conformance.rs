//! Runs many cases of the conformance suite at a time.
//!
//! Cases spend most of their time asleep, and the test harness runs only one test per processor at a time. The suite
//! would take minutes for a store with several settings. Here one test runs a set of cases, and its failure names the
//! failed cases.

use std::{
    any::Any,
    sync::{Condvar, Mutex, PoisonError},
    thread,
    time::Duration,
};

use tower_idempotency::{
    conformance::{Case, Plan, Subject},
    store::Store,
};

/// Runs every case on the stores that `subject` makes, through `plan`, on 16 threads.
///
/// # Panics
///
/// Panics if a case panics: lists all cases that did, with the beginning of their messages.
pub fn every_case_at_once<S: Store>(
    subject: impl AsyncFn() -> Subject<S> + Sync,
    plan: impl Fn(Duration) -> Option<Plan> + Sync,
) {
    every_case(Case::all(), AT_ONCE, &|case| {
        case.run(false, &subject, &plan);
    });
}

/// Runs every case about operators on the stores that `subject` makes, on 16 threads. The subjects have an inspector.
///
/// # Panics
///
/// Panics if a case panics: lists all cases that did, with the beginning of their messages.
pub fn every_inspect_case_at_once<S: Store>(subject: impl AsyncFn() -> Subject<S> + Sync) {
    every_case(Case::inspect(), AT_ONCE, &|case| {
        case.run(false, &subject, |_| None);
    });
}

/// Like [`every_case_at_once`], but runs at most this many cases at a time, and waits for a permit. This is for a server that
/// one set of cases already keeps busy.
///
/// # Panics
///
/// Panics if a case panics: lists all cases that did, with the beginning of their messages.
pub fn every_case_in_turn<S: Store>(
    at_once: usize,
    subject: impl AsyncFn() -> Subject<S> + Sync,
    plan: impl Fn(Duration) -> Option<Plan> + Sync,
) {
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    every_case(Case::all(), at_once, &|case| {
        case.run(false, &subject, &plan);
    });
}

fn every_case(cases: &[Case], at_once: usize, run: &(dyn Fn(Case) + Sync)) {
    let failed = Mutex::new(Vec::new());
    let cases = Mutex::new(cases.to_vec());
    let next = || cases.lock().unwrap_or_else(PoisonError::into_inner).pop();
    thread::scope(|scope| {
        let work = || {
            while let Some(case) = next() {
                let _turn = Turn::take();
                // Each case has its own thread, because a panic shows the name of its thread.
                let running = thread::Builder::new().name(case.name().to_owned());
                let ended = running
                    .spawn_scoped(scope, move || run(case))
                    .expect("a thread")
                    .join();
                if let Err(panic) = ended {
                    let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                    failed.push(format!("{}: {}", case.name(), said(&*panic)));
                }
            }
        };
        let workers: Vec<_> = (0..at_once).map(|_| scope.spawn(work)).collect();
        for worker in workers {
            worker.join().expect("a worker does not panic");
        }
    });
    let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    assert!(failed.is_empty(), "failed: {failed:#?}");
}

/// Returns the beginning of a panic's message. A long message may be cut at its beginning, which would hide the failed case.
fn said(panic: &(dyn Any + Send)) -> String {
    let said = panic.downcast_ref::<String>().map(String::as_str);
    let said = said.or_else(|| panic.downcast_ref::<&str>().copied());
    said.unwrap_or("no words").chars().take(300).collect()
}

/// The permit to run a case. Without it, several sets at once would wait for processors, and open more connections than
/// a server allows.
struct Turn;

static LEFT: Mutex<usize> = Mutex::new(AT_ONCE_IN_ALL);
static GIVEN_BACK: Condvar = Condvar::new();

impl Turn {
    fn take() -> Self {
        let left = LEFT.lock().unwrap_or_else(PoisonError::into_inner);
        let none = |left: &mut usize| *left == 0;
        let left = GIVEN_BACK.wait_while(left, none);
        *left.unwrap_or_else(PoisonError::into_inner) -= 1;
        Self
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        *LEFT.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        GIVEN_BACK.notify_one();
    }
}

/// Makes a module with five tests of the suite: `direct` without faults, and one for each [`Plan`]. These are
/// `calls_lost`, `replies_lost`, `slow` and `alternating`.
#[macro_export]
macro_rules! conformance_at_once {
    (mod $name:ident, subject = $subject:expr $(,)?) => {
        mod $name {
            #[allow(unused_imports, reason = "not every closure needs the imports")]
            use super::*;
            use ::tower_idempotency::conformance::Plan;

            #[test]
            fn direct() {
                $crate::conformance::every_case_at_once($subject, |_| None);
            }

            #[test]
            fn calls_lost() {
                $crate::conformance::every_case_at_once($subject, |_| Some(Plan::CallsLost));
            }

            #[test]
            fn replies_lost() {
                $crate::conformance::every_case_at_once($subject, |_| Some(Plan::RepliesLost));
            }

            #[test]
            fn slow() {
                $crate::conformance::every_case_at_once($subject, |pause| Some(Plan::Slow(pause)));
            }

            #[test]
            fn alternating() {
                $crate::conformance::every_case_at_once($subject, |pause| {
                    Some(Plan::Alternating(pause))
                });
            }
        }
    };
}

const AT_ONCE: usize = 16;
const AT_ONCE_IN_ALL: usize = 32;
