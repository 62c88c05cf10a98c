//! The protocol without one of its rules: each mutant breaks the property that the rule protects.

use stateright::{Checker, HasDiscoveries, Model};

use crate::{
    holds::{system, tiered},
    mutant::Mutant,
    properties::{AGREE, COMMITS, EFFECTS, FREE, ONCE, OTHER, OWN, SAME, STORED, TIER},
    store::Orphans,
    system::System,
};

/// Returns the smallest number of steps after which the property is broken, or `None` if it always holds.
pub(crate) fn breaks(system: &System, property: &'static str) -> Option<usize> {
    let mut system = system.clone();
    system.properties = vec![property];
    let checked = system.checker().finish_when(HasDiscoveries::Any);
    let path = checked.spawn_bfs().join().discovery(property)?;
    println!("broken: {property}\n{path}");
    Some(path.into_actions().len())
}

fn takeover_system() -> System {
    system(3)
}

fn long_retention_system() -> System {
    let mut system = system(3);
    system.rules.times.retention = 2 * system.rules.times.lease;
    system
}

fn refusing() -> System {
    System {
        orphans: Orphans::Refuse,
        ..system(3)
    }
}

fn in_transactions() -> System {
    System {
        transactional: true,
        ..system(3)
    }
}

fn with_another_request() -> System {
    System {
        others: 1,
        ..system(3)
    }
}

/// A system that holds without mutants: see `three_requests_in_processes_with_slow_tiers`.
fn with_tiers() -> System {
    tiered(3, 3, true)
}

/// Makes a test for each mutant: the properties that it breaks, each with the smallest number of steps.
macro_rules! caught {
    ($($mutant:ident $system:ident breaks $($property:ident after $steps:literal)and+;)*) => { $(
        #[test]
        #[allow(non_snake_case, reason = "named for the mutant")]
        fn $mutant() {
            let mut system = $system();
            system.rules.mutant = Some(Mutant::$mutant);
            $(assert_eq!(breaks(&system, $property), Some($steps), "{}", $property);)+
        }
    )* };
}

caught! {
    // F-095
    NoOwnToken takeover_system breaks OWN after 2;
    UnfencedComplete takeover_system breaks STORED after 7 and AGREE after 7;
    ReleaseByAnyone takeover_system breaks EFFECTS after 7;
    ReleaseFreesTakeovers takeover_system breaks EFFECTS after 8;
    LeaseAsLongAsTheRetention long_retention_system breaks FREE after 1;
    // F-103
    ExpiryBySweeperOnly takeover_system breaks FREE after 1;
    TakeoverIsHidden takeover_system breaks EFFECTS after 5;
    TakeoverOfAnotherRequest with_another_request breaks SAME after 3;
    RefuseIsIgnored refusing breaks ONCE after 5;
    UnfencedCommit in_transactions breaks ONCE after 5 and STORED after 5;
    // F-038
    OwnResponseAfterLostLease takeover_system breaks AGREE after 7;
    // F-053
    ReadThenOverwrite takeover_system breaks STORED after 6 and AGREE after 8;
    // F-003
    DropReleases takeover_system breaks EFFECTS after 5;
    // F-059
    WaiterRemoves takeover_system breaks EFFECTS after 6 and STORED after 5 and AGREE after 8;
    // F-034
    ResponseBeforeRecord takeover_system breaks AGREE after 5;
    ResponseToAnotherRequest with_another_request breaks OTHER after 4;
    CommitAfterExpiry in_transactions breaks COMMITS after 5;
    // F-981
    RefusedCompletionIsKept with_tiers breaks TIER after 6 and AGREE after 9;
    // F-982
    RepeatedCompletionIsKept with_tiers breaks TIER after 7 and AGREE after 11;
    // F-985
    AgeAloneCounts with_tiers breaks TIER after 6 and AGREE after 10;
    // F-985
    LifeCountsFromReply with_tiers breaks TIER after 6 and AGREE after 10;
}

/// Without mutants, no property is broken in these systems.
#[test]
fn unmutated_model_holds() {
    for (system, properties) in [
        (takeover_system(), &[STORED, AGREE, EFFECTS, OWN, FREE][..]),
        (long_retention_system(), &[FREE]),
        (refusing(), &[ONCE]),
        (in_transactions(), &[ONCE, STORED, COMMITS]),
        (with_another_request(), &[OTHER, SAME]),
    ] {
        for property in properties {
            assert_eq!(breaks(&system, property), None, "{property}");
        }
    }
}
