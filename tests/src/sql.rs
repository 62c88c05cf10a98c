//! The SQL stores on servers of the tests, and claims for them.

use tower_idempotency::store::{Claim, Fingerprint, KeyId, Token};
use tower_idempotency_sqlx::{MySqlStore, PostgresStore, SqliteStore};

use crate::{
    scratch::Scratch,
    servers::{mariadb::MariaDbServer, postgres::PostgresServer},
};

/// A store in a table of this name, which is made.
///
/// # Panics
///
/// When the server does not answer.
pub async fn postgres(server: &PostgresServer, table: &str) -> PostgresStore {
    let store = PostgresStore::from_url(&server.url()).expect("an URL");
    let store = store.with_table(table).expect("an identifier");
    store.migrate().await.expect("the test server runs");
    store
}

/// A store in a table of this name, which is made.
///
/// # Panics
///
/// When the server does not answer.
pub async fn mariadb(server: &MariaDbServer, table: &str) -> MySqlStore {
    let store = MySqlStore::from_url(&server.url()).expect("an URL");
    let store = store.with_table(table).expect("an identifier");
    store.migrate().await.expect("the test server runs");
    store
}

/// A store in a file there.
///
/// # Panics
///
/// When the file cannot be written.
pub async fn sqlite(scratch: &Scratch) -> SqliteStore {
    let store = SqliteStore::new(scratch.file("keys.db"));
    store.migrate().await.expect("a file that can be written");
    store
}

/// A claim on a key that nobody ever used.
///
/// # Panics
///
/// When there is no randomness.
#[must_use]
pub fn claim() -> Claim {
    let random = Token::random().expect(RANDOM);
    let mut id = [0; 32];
    id[..16].copy_from_slice(random.as_bytes());
    let claim = Claim::new(KeyId::from_bytes(id), Fingerprint::from_bytes([7; 32]));
    claim.expect(RANDOM)
}

/// The same request again, under its own token.
///
/// # Panics
///
/// When there is no randomness.
#[must_use]
pub fn duplicate(claim: &Claim) -> Claim {
    let mut duplicate = claim.clone();
    duplicate.token = Token::random().expect(RANDOM);
    duplicate
}

const RANDOM: &str = "tests run where there is randomness";
