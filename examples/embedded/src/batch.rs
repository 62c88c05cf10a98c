//! Many deposits in one request. Each deposit is committed with its own record, so a batch may be killed in the middle.

use axum::{
    Json,
    http::{StatusCode, request},
    response::{IntoResponse, Response},
};
use serde::Deserialize;
use serde_json::{Value, json};
use tower_idempotency::{
    IdempotencyLayer, Lease,
    items::{Item, ItemResult},
    run_once::WorkError,
};
use tower_idempotency_sqlx::{CommitError, TransactionError};

use crate::{
    Bank, Failure,
    bank::{Deposit, Receipt, write},
};

#[derive(Debug, Deserialize)]
pub(crate) struct KeyedDeposit {
    key: String,
    #[serde(flatten)]
    deposit: Deposit,
}

pub(crate) async fn deposit_all(
    layer: &IdempotencyLayer,
    bank: Bank,
    head: request::Parts,
    batch: Vec<KeyedDeposit>,
) -> Response {
    let item = |keyed: KeyedDeposit| {
        // The fingerprint is the content of the item, without its key.
        let content = json!(keyed.deposit).to_string();
        Item::new(keyed.key, content, keyed.deposit)
    };
    let batch = batch.into_iter().map(item).collect();
    let work = async move |deposit: Deposit, lease| {
        let made = make(&bank, &lease, &deposit).await;
        made.inspect_err(|error| tracing::warn!(?error, "an item has no outcome yet"))
    };
    let results = match layer.items(&head) {
        Ok(items) => items.run(batch, work).await,
        Err(error) => Err(error),
    };
    match results {
        Ok(results) => {
            let entries: Vec<_> = results.iter().map(entry).collect();
            (StatusCode::MULTI_STATUS, Json(entries)).into_response()
        }
        Err(error) => (error.status(), error.detail().to_owned()).into_response(),
    }
}

/// Makes the deposit of an item.
async fn make(
    bank: &Bank,
    lease: &Lease,
    deposit: &Deposit,
) -> Result<Receipt, WorkError<Failure>> {
    let begun = bank.store.begin(lease, &bank.pool).await;
    let mut tx = begun.map_err(TransactionError::into_work_error::<Failure>)?;
    let written = write(&mut tx, deposit).await;
    let receipt = written.map_err(Failure::from)?;
    // The deposit, the new balance and the receipt are committed together or not at all.
    let committed = tx.commit_value(receipt).await;
    committed.map_err(CommitError::into_work_error)
}

/// Returns the entry of an item in the response.
fn entry(result: &ItemResult<Receipt, Failure>) -> Value {
    json!({
        "status": result.status().as_u16(),
        "receipt": result.value(),
        "code": result.error().map(|error| error.kind().code()),
        "retryable": !result.is_final(),
    })
}
