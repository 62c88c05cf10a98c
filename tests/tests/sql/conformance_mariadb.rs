//! MariaDB passes the suite with each default isolation level of its sessions.

use tests::{conformance_modes, servers::mariadb::MariaDbServer};
use tokio::sync::OnceCell;
use tower_idempotency::conformance::Subject;
use tower_idempotency_sqlx::MySqlStore;

macro_rules! at {
    ($name:ident, $level:literal $(, faults = $faults:ident)?) => {
        mod $name {
            use std::sync::OnceLock;

            use super::*;

            async fn store() -> Subject<MySqlStore> {
                static SERVER: OnceLock<MariaDbServer> = OnceLock::new();
                static MIGRATED: OnceCell<()> = OnceCell::const_new();
                let level = concat!("transaction-isolation=", $level);
                let server = SERVER.get_or_init(|| MariaDbServer::start(&[level]));
                let store = MySqlStore::from_url(&server.url()).expect("an URL");
                let migrate = async || store.migrate().await.expect("the test server runs");
                MIGRATED.get_or_init(migrate).await;
                Subject::new(store).with_push(false)
            }

            conformance_modes! { mod suite, subject = store $(, faults = $faults)? }
        }
    };
}

at! { read_uncommitted, "READ-UNCOMMITTED", faults = replies }
at! { read_committed, "READ-COMMITTED", faults = replies }
at! { repeatable_read, "REPEATABLE-READ" }
at! { serializable, "SERIALIZABLE", faults = replies }
