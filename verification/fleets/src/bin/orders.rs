//! The client of a campaign, to be killed: `orders SERVER OUTBOX JOURNAL OPERATIONS`.

use std::env;

#[tokio::main]
async fn main() {
    let words: Vec<_> = env::args().skip(1).collect();
    fleets::outbox_clients::run_orders(&words).await;
}
