//! Runs many cases of the conformance suite concurrently.
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
pub fn run_all_cases<S: Store>(
    subject: impl AsyncFn() -> Subject<S> + Sync,
    plan: impl Fn(Duration) -> Option<Plan> + Sync,
) {
    run_chosen_cases(MAX_CASES_OF_CALL, |_| true, subject, plan);
}

/// Runs every case about operators on the stores that `subject` makes, on 16 threads. The subjects have an inspector.
///
/// # Panics
///
/// Panics if a case panics: lists all cases that did, with the beginning of their messages.
pub fn run_all_inspect_cases<S: Store>(subject: impl AsyncFn() -> Subject<S> + Sync) {
    run_cases(Case::inspect(), MAX_CASES_OF_CALL, &|case| {
        case.run(false, &subject, |_| None);
    });
}

/// Like [`run_all_cases`], but on `threads` threads, and without the cases whose names `is_chosen` rejects. It is for a server
/// that a few cases keep busy.
///
/// # Panics
///
/// Panics if a case panics: lists all cases that did, with the beginning of their messages.
pub fn run_chosen_cases<S: Store>(
    threads: usize,
    is_chosen: impl Fn(&str) -> bool,
    subject: impl AsyncFn() -> Subject<S> + Sync,
    plan: impl Fn(Duration) -> Option<Plan> + Sync,
) {
    let cases = Case::all().iter().copied();
    let chosen: Vec<_> = cases.filter(|case| is_chosen(case.name())).collect();
    assert!(!chosen.is_empty(), "no case is chosen");
    run_cases(&chosen, threads, &|case| {
        case.run(false, &subject, &plan);
    });
}

fn run_cases(cases: &[Case], threads: usize, run: &(dyn Fn(Case) + Sync)) {
    let failed = Mutex::new(Vec::new());
    let cases = Mutex::new(cases.to_vec());
    let next = || cases.lock().unwrap_or_else(PoisonError::into_inner).pop();
    thread::scope(|scope| {
        let work = || {
            while let Some(case) = next() {
                let _permit = CasePermit::acquire();
                // Each case has its own thread, because a panic shows the name of its thread.
                let thread = thread::Builder::new().name(case.name().to_owned());
                let result = thread
                    .spawn_scoped(scope, move || run(case))
                    .expect("a thread")
                    .join();
                if let Err(panic) = result {
                    let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                    failed.push(format!("{}: {}", case.name(), panic_message(&*panic)));
                }
            }
        };
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        for worker in workers {
            worker.join().expect("a worker does not panic");
        }
    });
    let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    assert!(failed.is_empty(), "failed: {failed:#?}");
}

/// Returns the beginning of a panic's message. A long message may be cut at its beginning, which would hide the failed case.
fn panic_message(panic: &(dyn Any + Send)) -> String {
    let message = panic.downcast_ref::<String>().map(String::as_str);
    let message = message.or_else(|| panic.downcast_ref::<&str>().copied());
    message.unwrap_or("no message").chars().take(300).collect()
}

/// Permit to run one case, from a semaphore of the process. It limits the processors and connections that concurrent sets of
/// cases need.
struct CasePermit;

static AVAILABLE_PERMITS: Mutex<usize> = Mutex::new(MAX_CASES_OF_PROCESS);
static PERMIT_RELEASED: Condvar = Condvar::new();

impl CasePermit {
    /// Waits for a permit.
    fn acquire() -> Self {
        let available = AVAILABLE_PERMITS
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let available = PERMIT_RELEASED.wait_while(available, |available| *available == 0);
        *available.unwrap_or_else(PoisonError::into_inner) -= 1;
        Self
    }
}

impl Drop for CasePermit {
    fn drop(&mut self) {
        *AVAILABLE_PERMITS
            .lock()
            .unwrap_or_else(PoisonError::into_inner) += 1;
        PERMIT_RELEASED.notify_one();
    }
}

/// Defines a module with five tests of the suite: `direct` without faults, and one for each [`Plan`]. These are
/// `calls_lost`, `replies_lost`, `slow` and `alternating`.
///
/// With `faults = replies` it defines only `direct`, `replies_lost` and `alternating`. Use this if another module runs all five
/// with another setting of the same server. A lost or slow call sends the server the same statements as `direct`.
#[macro_export]
macro_rules! conformance_modes {
    (mod $name:ident, subject = $subject:expr $(,)?) => {
        $crate::conformance_modes! {
            mod $name, subject = $subject, plans = {
                direct: |_| None,
                calls_lost: |_| Some(Plan::CallsLost),
                replies_lost: |_| Some(Plan::RepliesLost),
                slow: |pause| Some(Plan::Slow(pause)),
                alternating: |pause| Some(Plan::Alternating(pause)),
            }
        }
    };
    (mod $name:ident, subject = $subject:expr, faults = replies $(,)?) => {
        $crate::conformance_modes! {
            mod $name, subject = $subject, plans = {
                direct: |_| None,
                replies_lost: |_| Some(Plan::RepliesLost),
                alternating: |pause| Some(Plan::Alternating(pause)),
            }
        }
    };
    (mod $name:ident, subject = $subject:expr, plans = { $($test:ident: $plan:expr,)+ }) => {
        mod $name {
            #[allow(unused_imports, reason = "not every closure needs the imports")]
            use super::*;
            use ::tower_idempotency::conformance::Plan;

            $(
                #[test]
                fn $test() {
                    $crate::conformance::run_all_cases($subject, $plan);
                }
            )+
        }
    };
}

/// Maximum number of concurrent cases of one call.
const MAX_CASES_OF_CALL: usize = 16;

/// Maximum number of concurrent cases of all calls in the process.
const MAX_CASES_OF_PROCESS: usize = 32;
