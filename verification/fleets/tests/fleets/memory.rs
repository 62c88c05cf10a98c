//! A fleet of one process with an in-memory store, which is lost with its process, and the oracle.

use std::{fmt, time::Duration};

use fleets::fleet::{Case, Fleet, Load, StrikeKind, until_seen};
use verification::oracle::{History, Sums};

const LEASE: Duration = Duration::from_millis(400);

fn load() -> Load {
    Load {
        path: "/slow/20".to_owned(),
        at_a_time: 4,
        keys: 40,
        poll: Duration::from_millis(20),
        lease: LEASE,
        strike_count: 0,
        strike_kind: StrikeKind::Kill,
        at_once: 1,
        strike_interval: Duration::from_millis(100),
        seed: 1,
    }
}

async fn run(load: Load, round: u64) -> History {
    let seed = load.seed + round;
    let fleet = Fleet::start(1, &["--lease", "400ms"]);
    fleet.run(Load { seed, ..load }).await
}

#[tokio::test(flavor = "multi_thread")]
async fn undisturbed_fleet_executes_each_key_once() {
    // The lease is long, so that it does not expire if the machine stalls.
    let fleet = Fleet::start(1, &["--lease", "15s"]);
    let lease = Duration::from_secs(15);
    let history = fleet.run(Load { lease, ..load() }).await;
    let sums = history.sums();
    println!("{sums}");
    assert!(sums.keys >= load().keys, "{sums}");
    assert_eq!((sums.strikes, sums.struck), (0, 0));
    assert_eq!(history.effects.len(), sums.keys);
    // Three clients request each key.
    let answered = history.attempts.iter().filter(|it| it.response().is_some());
    assert_eq!(answered.count(), 3 * sums.keys);
    assert_eq!(history.excess_effects().join("\n"), "");
    assert_eq!(history.unexplained_effects().join("\n"), "");
    assert_eq!(history.contradictions().join("\n"), "");
    assert_eq!(history.keys_without_response().join("\n"), "");
}

// F-114
#[tokio::test(flavor = "multi_thread")]
async fn fleet_detects_store_lost_with_process() {
    // Records are lost, responses differ, and a request that had its response is executed again.
    let cases: [Case<Violations>; 3] = [
        ("excess effects", |found| found.excess),
        ("contradictions", |found| found.contradictions),
        ("unexplained", |found| found.unexplained),
    ];
    until_seen(&cases, async |round| {
        let history = run(
            Load {
                strike_count: 5,
                ..load()
            },
            round,
        )
        .await;
        assert_eq!(history.strikes.len(), 5);
        Violations {
            excess: history.excess_effects().len(),
            contradictions: history.contradictions().len(),
            unexplained: history.unexplained_effects().len(),
            sums: history.sums(),
        }
    })
    .await;
}

/// The violations that the oracle found.
struct Violations {
    excess: usize,
    contradictions: usize,
    unexplained: usize,
    sums: Sums,
}

impl fmt::Display for Violations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.sums.fmt(f)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn paused_process_returns_its_stored_record() {
    let load = Load {
        strike_count: 3,
        strike_kind: StrikeKind::Pause(2 * LEASE),
        ..load()
    };
    let late: Case<Sums> = ("late", |sums| sums.late);
    until_seen(&[late], async |round| {
        let history = run(load.clone(), round).await;
        let sums = history.sums();
        assert_eq!(sums.strikes, 3, "{sums}");
        // The late response is also the one that the other clients of its key received.
        assert_eq!(history.contradictions().join("\n"), "");
        sums
    })
    .await;
}
