//! Clients with an outbox that are killed repeatedly, behind a relay that breaks their connections.
//!
//! 300 operations on each store; `FULL=1` makes them 5,000. `scripts/campaign client` runs any number.

use std::path::Path;

use fleets::outbox_clients::{Clients, StoreKind};
use tests::few_or;

/// Runs campaigns until each case was seen. On a machine that stalls, a client may end before it is killed.
async fn run(store: StoreKind) {
    let operations = few_or(300, 5000);
    let mut seen = [0; 5];
    for round in 0..ROUNDS {
        let clients = Clients {
            store,
            operations,
            between_kills: 40,
            seed: 18 + round,
        };
        let program = Path::new(env!("CARGO_BIN_EXE_orders"));
        let tally = clients.run(program, |_, _| {}).await;
        println!("{}, seed {}: {tally}", store.name(), clients.seed);
        assert!(tally.is_clean(), "{tally}");
        let counts = [
            tally.kills,
            tally.recovered,
            tally.reported_not_executed,
            usize::try_from(tally.replays).expect("a count"),
            usize::try_from(tally.broken).expect("a count"),
        ];
        for (seen, count) in seen.iter_mut().zip(counts) {
            *seen += count;
        }
        if seen.iter().zip(CASES).all(|(seen, least)| *seen >= least) {
            return;
        }
    }
    panic!("kills, recovered, not executed, replays, broken: {seen:?} of {CASES:?}");
}

/// Least number of kills, of recovered operations, of reports of not executed, of replays, and of broken connections.
const CASES: [usize; 5] = [4, 10, 1, 10, 20];
const ROUNDS: u64 = 10;

#[tokio::test(flavor = "multi_thread")]
async fn killed_clients_execute_once_on_memory() {
    run(StoreKind::Memory).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_clients_execute_once_on_postgres() {
    run(StoreKind::Postgres).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_clients_execute_once_on_redis() {
    run(StoreKind::Redis).await;
}
