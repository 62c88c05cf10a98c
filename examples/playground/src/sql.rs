//! The stores in SQL databases. Each creates its table when the playground starts.

use tower_idempotency_sqlx::{MySqlStore, PostgresStore, SqlError, SqliteStore};

use crate::args::error_chain;

pub(crate) async fn postgres(url: &str) -> Result<PostgresStore, String> {
    let store = PostgresStore::from_url(url).map_err(|error| sentence("postgres", error))?;
    let migrated = store.migrate().await;
    migrated.map_err(|error| sentence("postgres", error))?;
    Ok(store)
}

pub(crate) async fn mysql(url: &str) -> Result<MySqlStore, String> {
    let store = MySqlStore::from_url(url).map_err(|error| sentence("mysql", error))?;
    let migrated = store.migrate().await;
    migrated.map_err(|error| sentence("mysql", error))?;
    Ok(store)
}

/// Opens the store at a path. `store` is `sqlite:` and the path.
pub(crate) async fn sqlite(store: &str) -> Result<SqliteStore, String> {
    let path = store.strip_prefix("sqlite:").unwrap_or_default();
    if path.is_empty() {
        return Err("expected a path after sqlite:, as in sqlite:keys.db".to_owned());
    }
    let store = SqliteStore::new(path);
    let migrated = store.migrate().await;
    migrated.map_err(|error| sentence("sqlite", error))?;
    Ok(store)
}

/// Returns the message of an error, without the password that the URL may contain.
fn sentence(scheme: &str, error: SqlError) -> String {
    format!("cannot use the {scheme} store: {}", error_chain(error))
}
