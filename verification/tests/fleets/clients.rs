//! Clients with an outbox that are killed again and again, behind a relay that breaks their connections.
//!
//! 300 operations on each store; `FULL=1` makes them 5,000. `scripts/campaign client` runs any number.

use std::path::Path;

use tests::few_or;
use verification::clients::{Clients, StoreKind};

async fn run(store: StoreKind) {
    let operations = few_or(300, 5000);
    let clients = Clients {
        store,
        operations,
        between_kills: 40,
        seed: 18,
    };
    let program = Path::new(env!("CARGO_BIN_EXE_orders"));
    let tally = clients.run(program, |_, _| {}).await;
    println!("{}: {tally}", store.name());
    assert!(tally.is_clean(), "{tally}");
    // The cases were there.
    assert!(tally.kills >= operations / 40 / 2, "{tally}");
    assert!(tally.recovered > 0, "{tally}");
    assert!(tally.replays > 0, "{tally}");
    assert!(tally.reported_not_executed > 0, "{tally}");
    assert!(tally.broken >= 20, "{tally}");
}

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
