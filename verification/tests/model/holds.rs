//! The protocol without mutations: every property in every state, and the consequences of a store that loses its data.

use std::time::Instant;

use stateright::{Checker, HasDiscoveries, Model};

use crate::{
    mutants::breaks,
    properties::{self, AGREE, EFFECTS, FREE, ONCE, OTHER, OWN, SAME, STORED, TIER},
    store::{Orphans, Rules, Times},
    system::System,
    tiers::TierRules,
};

/// Returns a system of equal requests under one key, with all events except late calls and loss of data.
pub(crate) fn system(clients: usize) -> System {
    System {
        clients,
        others: 0,
        orphans: Orphans::TakeOver,
        transactional: false,
        late_calls: false,
        data_loss: false,
        tiers: None,
        rules: Rules {
            times: Times {
                lease: 1,
                orphan_retention: 1,
                retention: 1,
            },
            mutant: None,
        },
        properties: Vec::new(),
    }
}

/// Returns a system of equal requests in two processes with tiers. A record lives for two ticks, and a tier keeps it
/// for `age`. If `is_delayed`, time may pass before a tier stores a record that the store has accepted or reported.
pub(crate) fn tiered(clients: usize, age: u8, is_delayed: bool) -> System {
    let mut system = system(clients);
    system.rules.times.retention = 2;
    system.tiers = Some(TierRules { age, is_delayed });
    system
}

/// Checks every property in every reachable state. Asserts that there are `states` of them, so that the number in
/// `docs/internals/verification.md` is correct.
fn holds(mut system: System, states: usize) {
    let (orphans, transactional) = (system.orphans, system.transactional);
    system.properties = properties::reachable_states(orphans, transactional);
    if let Some(tiers) = system.tiers {
        system.properties.push("each tier has the record");
        if tiers.age < system.rules.times.retention {
            system.properties.push("a tier no longer has the record");
        }
    }
    let seen = system.clone().checker().finish_when(HasDiscoveries::All);
    seen.spawn_bfs().join().assert_properties();

    system.properties = properties::invariants(orphans, transactional);
    if system.tiers.is_some() {
        system.properties.push(TIER);
    }
    let began = Instant::now();
    let checked = system.checker().spawn_bfs().join();
    let (found, depth) = (checked.unique_state_count(), checked.max_depth());
    println!("{found} states, {depth} deep, {:?}", began.elapsed());
    checked.assert_properties();
    assert_eq!(found, states);
}

#[test]
fn four_requests_that_take_orphans_over() {
    holds(system(4), 117_537);
}

#[test]
fn four_requests_that_refuse_orphans() {
    let orphans = Orphans::Refuse;
    holds(
        System {
            orphans,
            ..system(4)
        },
        11_330,
    );
}

#[test]
fn four_requests_in_transactions() {
    let transactional = true;
    holds(
        System {
            transactional,
            ..system(4)
        },
        19_402,
    );
}

#[test]
fn three_requests_and_other_under_same_key() {
    let others = 1;
    holds(
        System {
            others,
            ..system(4)
        },
        168_481,
    );
}

#[test]
fn three_requests_with_late_calls() {
    let late_calls = true;
    holds(
        System {
            late_calls,
            ..system(3)
        },
        208_377,
    );
}

#[test]
fn three_refusing_requests_with_late_calls() {
    let (late_calls, orphans) = (true, Orphans::Refuse);
    holds(
        System {
            late_calls,
            orphans,
            ..system(3)
        },
        27_281,
    );
}

#[test]
fn three_transactional_requests_with_late_calls() {
    let (late_calls, transactional) = (true, true);
    holds(
        System {
            late_calls,
            transactional,
            ..system(3)
        },
        51_264,
    );
}

// F-980, F-985
#[test]
fn three_requests_in_processes_with_tiers() {
    holds(tiered(3, 1, false), 56_267);
}

// F-985
#[test]
fn three_requests_in_processes_with_slow_tiers() {
    holds(tiered(3, 3, true), 68_054);
}

#[test]
fn two_requests_with_tiers_and_other_under_same_key() {
    let others = 1;
    holds(
        System {
            others,
            ..tiered(3, 3, false)
        },
        43_820,
    );
}

#[test]
fn two_requests_with_tiers_and_late_calls() {
    let late_calls = true;
    holds(
        System {
            late_calls,
            ..tiered(2, 3, true)
        },
        37_015,
    );
}

#[test]
fn three_transactional_requests_with_tiers() {
    let transactional = true;
    holds(
        System {
            transactional,
            ..tiered(3, 3, true)
        },
        19_395,
    );
}

// F-986
/// A store that loses its data leaves records in the tiers, and breaks the agreement of responses as without tiers.
#[test]
fn store_data_loss_leaves_record_in_tier() {
    let lossy = System {
        data_loss: true,
        ..tiered(2, 3, false)
    };
    for broken in [TIER, AGREE, EFFECTS] {
        assert!(breaks(&lossy, broken).is_some(), "{broken}");
    }
    for kept in [STORED, OWN, FREE, OTHER, SAME] {
        assert_eq!(breaks(&lossy, kept), None, "{kept}");
    }
}

// F-107
/// The protocol cannot protect against a store that loses acknowledged data: effects double in every mode, and clients
/// may receive different responses. Records are still not overwritten, and no client is locked out.
#[test]
fn store_data_loss_doubles_effects_in_every_mode() {
    let lossy = System {
        data_loss: true,
        ..system(3)
    };
    let refusing = System {
        orphans: Orphans::Refuse,
        ..lossy.clone()
    };
    let transactional = System {
        transactional: true,
        ..lossy.clone()
    };
    for system in [lossy, refusing, transactional] {
        for broken in [EFFECTS, ONCE, AGREE] {
            assert!(breaks(&system, broken).is_some(), "{broken}");
        }
        for kept in [STORED, OWN, FREE, OTHER, SAME] {
            assert_eq!(breaks(&system, kept), None, "{kept}");
        }
    }
}
