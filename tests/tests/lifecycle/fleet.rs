//! The fleet and its judge, on a store that a fleet of one can have: memory, which goes with its process.

use std::time::Duration;

use tests::fleet::{Blow, Fleet, Load};

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

#[tokio::test(flavor = "multi_thread")]
async fn a_fleet_that_nothing_befalls_executes_each_key_once() {
    // A machine that stands still for a moment is no blow: here no lease ends.
    let fleet = Fleet::start(1, &["--lease", "15s"]);
    let lease = Duration::from_secs(15);
    let history = fleet.run(Load { lease, ..load() }).await;
    let sums = history.sums();
    println!("{sums}");
    assert_eq!((sums.keys, sums.strikes, sums.struck), (40, 0, 0));
    assert_eq!(history.effects.len(), 40);
    // Three clients for each key.
    let answered = history.attempts.iter().filter(|it| it.answer().is_some());
    assert_eq!(answered.count(), 120);
    assert_eq!(history.doubles().join("\n"), "");
    assert_eq!(history.unexplained().join("\n"), "");
    assert_eq!(history.contradictions().join("\n"), "");
    assert_eq!(history.are_free_within(2 * LEASE), Ok(()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_forgets_with_its_process_is_found_out() {
    let fleet = Fleet::start(1, &["--lease", "400ms"]);
    let history = fleet.run(Load { blows: 5, ..load() }).await;
    println!("{}", history.sums());
    assert_eq!(history.strikes.len(), 5);
    assert!(!history.doubles().is_empty(), "records are lost");
    assert!(!history.contradictions().is_empty(), "answers differ");
    let unexplained = history.unexplained();
    assert!(!unexplained.is_empty(), "what was answered runs again");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_is_paused_answers_late_and_what_it_stored() {
    let fleet = Fleet::start(1, &["--lease", "400ms"]);
    let load = Load {
        blows: 3,
        blow: Blow::Pause(2 * LEASE),
        ..load()
    };
    let history = fleet.run(load).await;
    let sums = history.sums();
    println!("{sums}");
    assert_eq!(sums.strikes, 3);
    assert!(sums.late > 0 && sums.late_and_outrun == 0, "{sums}");
    assert_eq!(history.contradictions().join("\n"), "");
}
