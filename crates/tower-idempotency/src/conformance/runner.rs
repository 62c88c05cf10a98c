//! Runner of the cases.

use std::{fmt, pin::Pin, time::Duration};

use tokio::{runtime::Builder, time::timeout};

use super::{AnyStore, Plan, Subject, cases, inspect_cases};
use crate::store::Store;

/// The runtime of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "the suite is not API-stable")]
pub enum CaseRuntime {
    /// A single thread, optionally with a paused clock.
    CurrentThread {
        /// `true` if the clock starts paused.
        start_paused: bool,
    },
    /// Four threads, so that cases have real races.
    MultiThread,
}

/// Runs a case on a runtime of its own.
///
/// # Panics
///
/// If the case panics, or if it takes longer than ten minutes of its clock.
pub fn run(runtime: CaseRuntime, case: impl Future<Output = ()>) {
    let runtime = match runtime {
        CaseRuntime::CurrentThread { start_paused } => Builder::new_current_thread()
            .enable_all()
            .start_paused(start_paused)
            .build(),
        CaseRuntime::MultiThread => Builder::new_multi_thread()
            .worker_threads(4)
            .enable_all()
            .build(),
    };
    let runtime = runtime.expect("a test can have a runtime");
    let result = runtime.block_on(async { timeout(CASE_TIMEOUT, case).await });
    result.expect("a case must end within the time limit");
}

/// A case of the suite.
#[derive(Clone, Copy)]
pub struct Case {
    name: &'static str,
    is_threaded: bool,
    body: fn(Subject<AnyStore>) -> Pin<Box<dyn Future<Output = ()>>>,
}

impl Case {
    /// Returns every case: first the cases that wait, then those that race threads.
    #[must_use]
    pub const fn all() -> &'static [Self] {
        ALL
    }

    /// Returns every case of [`Inspect`](crate::inspect::Inspect). Their subjects need
    /// [`with_inspector`](Subject::with_inspector).
    #[must_use]
    pub const fn inspect() -> &'static [Self] {
        INSPECT
    }

    /// Returns the case of this name.
    ///
    /// # Panics
    ///
    /// If there is no such case.
    #[must_use]
    pub fn named(name: &str) -> Self {
        let case = ALL.iter().chain(INSPECT).find(|case| case.name == name);
        *case.unwrap_or_else(|| panic!("no case {name}"))
    }

    /// Returns the name, which is that of the function in [`cases`] or [`inspect_cases`].
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.name
    }

    /// Runs the case on a runtime of its own, through `plan` if it returns one.
    ///
    /// `plan` receives [`Subject::pause`]. `start_paused` applies to cases that do not race threads.
    ///
    /// # Panics
    ///
    /// If the store breaks the contract, or after ten minutes of the case's clock.
    pub fn run<S: Store>(
        self,
        start_paused: bool,
        subject: impl AsyncFnOnce() -> Subject<S>,
        plan: impl FnOnce(Duration) -> Option<Plan>,
    ) {
        let runtime = if self.is_threaded {
            CaseRuntime::MultiThread
        } else {
            CaseRuntime::CurrentThread { start_paused }
        };
        run(runtime, async {
            let subject = subject().await;
            match plan(subject.pause()) {
                Some(plan) => self.check(subject.through(plan)).await,
                None => self.check(subject).await,
            }
        });
    }

    /// Runs the case on the current runtime.
    ///
    /// # Panics
    ///
    /// If the store breaks the contract.
    pub async fn check<S: Store>(self, subject: Subject<S>) {
        (self.body)(subject.erased()).await;
    }
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Case").field(&self.name).finish()
    }
}

macro_rules! case_list {
    ({ $list:ident, $cases:ident } paced [$($paced:ident)*] threaded [$($threaded:ident)*]) => {
        const $list: &[Case] = &[
            $( Case {
                name: stringify!($paced),
                is_threaded: false,
                body: |subject| Box::pin(async move { $cases::$paced(&subject).await }),
            }, )*
            $( Case {
                name: stringify!($threaded),
                is_threaded: true,
                body: |subject| Box::pin(async move { $cases::$threaded(&subject).await }),
            }, )*
        ];
    };
}

crate::__conformance_cases! { [case_list] ALL, cases }
crate::__inspect_cases! { [case_list] INSPECT, inspect_cases }

/// Runs every case on one store, one after the other, up to the first that panics.
///
/// Prefer [`conformance_tests!`](crate::conformance_tests): it names each failure, and also runs the cases through
/// faults and on several threads.
///
/// # Panics
///
/// If the store breaks the contract.
pub async fn every_case<S: Store>(subject: Subject<S>) {
    let subject = subject.erased();
    for case in ALL {
        (case.body)(subject.clone()).await;
    }
}

const CASE_TIMEOUT: Duration = Duration::from_secs(600);
