//! The fleet and its judge, on a store that a fleet of one can have: memory, which goes with its process.

use std::time::Duration;

use tests::{
    fleet::{Blow, Fleet, Load},
    gate::within,
    oracle::History,
};

const LEASE: Duration = Duration::from_millis(400);

fn load() -> Load {
    Load {
        path: "/slow/20".to_owned(),
        at_a_time: 4,
        keys: 40,
        poll: Duration::from_millis(20),
        lease: LEASE,
        blows: 0,
        blow: Blow::Kill,
        at_once: 1,
        respite: Duration::from_millis(100),
        seed: 1,
    }
}

/// Runs fleets under this load until what is to be judged has happened to one, and returns its history.
///
/// Which requests a blow meets is a matter of time.
///
/// # Panics
///
/// When it does not happen within four minutes.
async fn until(happened: impl Fn(&History) -> bool, load: Load) -> History {
    within(Duration::from_secs(240), async {
        for seed in 1.. {
            let fleet = Fleet::start(1, &["--lease", "400ms"]);
            let load = Load {
                seed,
                ..load.clone()
            };
            let history = fleet.run(load).await;
            println!("{}", history.sums());
            if happened(&history) {
                return history;
            }
        }
        unreachable!("the deadline comes first")
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fleet_that_nothing_befalls_executes_each_key_once() {
    // A machine that stands still for a moment is no blow: here no lease ends.
    let fleet = Fleet::start(1, &["--lease", "15s"]);
    let lease = Duration::from_secs(15);
    let history = fleet.run(Load { lease, ..load() }).await;
    let sums = history.sums();
    println!("{sums}");
    assert!(sums.keys >= load().keys, "{sums}");
    assert_eq!((sums.strikes, sums.struck), (0, 0));
    assert_eq!(history.effects.len(), sums.keys);
    // Three clients for each key.
    let answered = history.attempts.iter().filter(|it| it.answer().is_some());
    assert_eq!(answered.count(), 3 * sums.keys);
    assert_eq!(history.doubles().join("\n"), "");
    assert_eq!(history.unexplained().join("\n"), "");
    assert_eq!(history.contradictions().join("\n"), "");
    assert_eq!(history.are_free_within(2 * lease), Ok(()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_forgets_with_its_process_is_found_out() {
    // Records are lost, answers differ, and what was answered runs again.
    let is_found_out = |history: &History| {
        let (doubles, differing) = (history.doubles(), history.contradictions());
        let unexplained = history.unexplained();
        !(doubles.is_empty() || differing.is_empty() || unexplained.is_empty())
    };
    let load = Load { blows: 5, ..load() };
    let history = until(is_found_out, load).await;
    assert_eq!(history.strikes.len(), 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_is_paused_answers_late_and_what_it_stored() {
    let load = Load {
        blows: 3,
        blow: Blow::Pause(2 * LEASE),
        ..load()
    };
    let judged = |history: &History| {
        let sums = history.sums();
        assert_eq!((sums.strikes, sums.late_and_outrun), (3, 0), "{sums}");
        assert_eq!(history.contradictions().join("\n"), "");
        sums.late > 0
    };
    until(judged, load).await;
}
