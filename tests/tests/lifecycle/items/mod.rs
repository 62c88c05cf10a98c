//! Items of a batch, each under a key of its own.

mod faults;
mod grpc;
mod keys;
mod orphans;
mod rebuilt_heads;
mod requests;

use std::convert::Infallible;

use http::{Request, request};
use tower_idempotency::{
    Error, IdempotencyLayer, MemoryStore,
    items::{Item, ItemOutcome, ItemResult},
    run_once::{Outcome, WorkError},
    testing::Effects,
};

type Results<E = Infallible> = Result<Vec<ItemResult<String, E>>, Error>;

fn layer() -> IdempotencyLayer {
    IdempotencyLayer::new(MemoryStore::new())
}

/// Returns the head of a batch request of this caller.
fn head_of(caller: &str) -> request::Parts {
    let req = Request::post("/payments/batch").header("authorization", caller);
    req.body(()).expect("a valid request").into_parts().0
}

fn items(keys: &[&str]) -> Vec<Item<String>> {
    let item = |key: &&str| Item::new(*key, format!("pay {key}"), (*key).to_owned());
    keys.iter().map(item).collect()
}

fn numbered(count: usize) -> Vec<Item<String>> {
    let item = |n| Item::new(format!("k{n}"), "pay", format!("k{n}"));
    (0..count).map(item).collect()
}

async fn run(layer: &IdempotencyLayer, effects: &Effects, batch: Vec<Item<String>>) -> Results {
    run_as(layer, "alice", effects, batch).await
}

/// Runs work that counts an effect for each item and returns its input.
async fn run_as(
    layer: &IdempotencyLayer,
    caller: &str,
    effects: &Effects,
    batch: Vec<Item<String>>,
) -> Results {
    let items = layer.items(&head_of(caller)).expect("a principal");
    let effects = effects.clone();
    let work = async move |key: String, _lease| {
        effects.add(&key);
        Ok::<_, WorkError<Infallible>>(key)
    };
    items.run(batch, work).await
}

/// Returns the status of each result.
fn statuses<T, E>(results: &[ItemResult<T, E>]) -> Vec<u16> {
    let statuses = results.iter().map(|result| result.status().as_u16());
    statuses.collect()
}

fn is_replayed<T, E>(result: &ItemResult<T, E>) -> bool {
    matches!(
        result.outcome(),
        ItemOutcome::Returned(Outcome::Replayed(_))
    )
}
