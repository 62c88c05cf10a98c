//! The check of a table.

use tower_idempotency::store::{
    CheckError, CheckErrorKind, Claim, Fingerprint, KeyId, Store, StoreError, Token, Ttl,
};

use crate::{
    error::{DynamoDbError, DynamoDbErrorKind},
    store::DynamoDbStore,
    table_client::TableClient,
    writes::Attempts,
};

impl DynamoDbStore {
    /// Checks the table, its index and its TTL, and acquires and releases the lease of a random key twice.
    pub(crate) async fn check_table(&self) -> Result<(), CheckError> {
        let inner = &*self.inner;
        let incomplete = |problem| CheckError::new(CheckErrorKind::Incomplete, problem, CREATE);
        let Some(table) = inner
            .describe()
            .await
            .map_err(|error| check_error(&error))?
        else {
            return Err(incomplete(format!(
                "the table {:?} is missing",
                inner.table
            )));
        };
        TableClient::check_key(&table).map_err(|error| part_error(&error, RENAME))?;
        inner
            .check_index(&table)
            .map_err(|error| part_error(&error, ADD_INDEX))?;
        if !inner
            .is_ttl_enabled()
            .await
            .map_err(|error| part_error(&error, MOVE_TTL))?
        {
            let problem = format!(
                "the table {:?} has no TTL on the attribute `ttl`, so expired items are never deleted",
                inner.table
            );
            return Err(CheckError::new(
                CheckErrorKind::Incomplete,
                problem,
                ENABLE_TTL,
            ));
        }
        let id = random_id().map_err(|error| unreachable(&error))?;
        let compared = inner.read_and_compare_clocks(&id).await;
        compared.map_err(|error| check_error(&error))?;
        self.probe(id).await.map_err(|error| unreachable(&error))
    }

    /// Acquires and releases the lease of a random key: by an update, and by the write that replaces an expired entry. The entry
    /// expires after two seconds if the release fails.
    async fn probe(&self, id: KeyId) -> Result<(), StoreError> {
        let inner = &*self.inner;
        let mut claim = Claim::new(id, Fingerprint::from_bytes(*id.as_bytes()))?;
        claim.lease = Ttl::from_secs(1);
        claim.orphan_retention = Ttl::from_secs(1);
        // An attempt that is applied late acquires a key that no request has.
        inner.acquire(&claim, Attempts::OfOptions).await?;
        self.release(&claim.lease_ref(1)).await?;
        let moment = inner.options.clock.read();
        // A failed condition is no error: an earlier attempt may have stored the item, and its reply was lost.
        inner
            .replace_expired(&claim, moment, Attempts::OfOptions)
            .await?;
        self.release(&claim.lease_ref(1)).await
    }
}

fn random_id() -> Result<KeyId, StoreError> {
    let (first, second) = (Token::random()?, Token::random()?);
    let mut id = [0; 32];
    id[..16].copy_from_slice(first.as_bytes());
    id[16..].copy_from_slice(second.as_bytes());
    Ok(KeyId::from_bytes(id))
}

fn unreachable(error: &StoreError) -> CheckError {
    CheckError::unreachable(error, RIGHTS)
}

/// Returns the error of a check of one part of the table. `remedy` applies if the table lacks the part, or has another one.
fn part_error(error: &DynamoDbError, remedy: &'static str) -> CheckError {
    if error.kind() == DynamoDbErrorKind::Unusable {
        CheckError::new(CheckErrorKind::Incomplete, error.to_string(), remedy)
    } else {
        check_error(error)
    }
}

fn check_error(error: &DynamoDbError) -> CheckError {
    let (kind, remedy) = match error.kind() {
        DynamoDbErrorKind::Refused => (CheckErrorKind::Denied, RIGHTS),
        DynamoDbErrorKind::ClockSkew => (CheckErrorKind::Unsafe, SYNCHRONIZE),
        _ => (CheckErrorKind::Unreachable, REACHABLE),
    };
    CheckError::new(kind, error.to_string(), remedy)
}

const CREATE: &str = "call `create_table`, or create the table as in docs/stores/dynamodb.md";
// A table with another key has no entries of this store. The entries of a service in use are in another table.
const RENAME: &str =
    "correct the name of the table, or for a new service call `create_table` with another name";
// The remedies name no new table: in that one, all requests would execute again.
const ADD_INDEX: &str = "add or replace the index as in docs/stores/dynamodb.md";
const MOVE_TTL: &str =
    "disable the TTL, wait until it is off (up to an hour), and enable it on `ttl`";
const ENABLE_TTL: &str =
    "enable TTL on the attribute `ttl`, or call `create_table`, once no TTL is being disabled";
const RIGHTS: &str = "check the credentials and the clock, and permit GetItem, PutItem, UpdateItem, DeleteItem, Query, \
                      DescribeTable and DescribeTimeToLive";
const SYNCHRONIZE: &str = "synchronize the clock of this machine";
const REACHABLE: &str = "check the endpoint, the region and the network";

#[cfg(test)]
mod tests;
