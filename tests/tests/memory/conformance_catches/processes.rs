//! Two clients of one server reveal a store that follows the rules only within its process.

use tower_idempotency::conformance::{Processes, Subject};

use super::{
    fails_case,
    mutant::{Flaw, Mutant},
};

fn one_process(flaw: Flaw) -> Subject<Mutant> {
    Subject::new(Mutant::new(flaw))
}

fn two_processes(flaw: Flaw) -> Subject<Processes<Mutant>> {
    let first = Mutant::new(flaw);
    let second = first.second_process();
    Subject::new(Processes::new([first, second]))
}

#[test]
fn lock_within_process_is_detected() {
    let flaw = Flaw::ClaimIsAtomicInItsProcess;
    for case in [
        "one_of_32_concurrent_claims_is_granted",
        "one_of_32_claims_takes_over_orphan",
    ] {
        assert!(!fails_case(one_process(flaw), case), "{case}");
        assert!(!fails_case(two_processes(Flaw::Nothing), case), "{case}");
        assert!(fails_case(two_processes(flaw), case), "{case} passes");
    }
}

#[test]
fn notification_within_process_is_detected() {
    for case in [
        "completion_wakes_waiters",
        "release_wakes_waiters",
        "takeover_release_wakes_waiters",
    ] {
        assert!(!fails_case(one_process(Flaw::Nothing), case), "{case}");
        let notifying = two_processes(Flaw::Nothing);
        assert!(fails_case(notifying, case), "{case} passes");
        let polling = two_processes(Flaw::Nothing).with_push(false);
        assert!(!fails_case(polling, case), "{case}");
    }
}
