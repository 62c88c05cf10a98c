//! Finds the entry of an ID, or of its first digits.

use tower_idempotency::{
    inspect::{EntryDetails, IdPrefix, Inspect as _, Query, State},
    store::KeyId,
};

use crate::{
    context::Context,
    failure::{Exit, Failure},
};

/// Returns the entry with this ID. Refuses digits with which two entries begin.
pub(crate) async fn find(context: &Context, id: &IdPrefix) -> Result<EntryDetails, Failure> {
    let id = match id.to_key_id() {
        Some(id) => id,
        None => complete_id(context, id).await?,
    };
    let found = context.call(context.store.get(&id)).await?;
    found.ok_or_else(|| {
        let id = id.to_hex();
        let message = format!("the store has no entry {id}, or the entry has expired");
        Failure::new(Exit::NotFound, message)
    })
}

/// Returns the only ID that begins with these digits.
async fn complete_id(context: &Context, prefix: &IdPrefix) -> Result<KeyId, Failure> {
    let abilities = context.store.abilities();
    let mut ids: Vec<KeyId> = Vec::new();
    for &state in State::ALL {
        if !abilities.can_list(state) {
            continue;
        }
        let mut query = Query::new(state).with_id_prefix(*prefix);
        loop {
            let page = context.call(context.store.list(&query)).await?;
            ids.extend(page.entries.iter().map(|entry| *entry.id()));
            match page.next {
                Some(next) if ids.len() < 3 => query = query.with_page(Some(next)),
                _ => break,
            }
        }
    }
    ids.sort();
    ids.dedup();
    match ids[..] {
        [id] => Ok(id),
        [] if abilities.can_list(State::Completed) => Err(Failure::new(
            Exit::NotFound,
            format!(
                "no listed entry begins with {prefix}; on Redis and DynamoDB, \
                 an entry outside of the index is found by its whole id only"
            ),
        )),
        [] => Err(Failure::new(
            Exit::NotFound,
            format!(
                "no entry in progress, orphaned or needing attention begins with {prefix}, \
                 and this store finds a completed entry by its whole id only"
            ),
        )),
        _ => {
            let ids: Vec<_> = ids.iter().map(KeyId::to_hex).collect();
            Err(Failure::usage(format!(
                "several entries begin with {prefix}: {}",
                ids.join(", ")
            )))
        }
    }
}
