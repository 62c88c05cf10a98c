//! The same sessions on every store.

use std::time::Duration;

use tests::{
    scratch::Scratch,
    servers::{
        dynamodb::{StandIn, shared},
        mariadb::MariaDbServer,
        postgres::PostgresServer,
        redis::{RedisCluster, RedisServer},
    },
};

use tower_idempotency_any::OpenOptions;

use crate::{
    document::resolve_in_three_commands,
    reading::read_in_each_form,
    run,
    scenario::{Keys, resolve_every_kind, resolve_removed_entry},
    session::FILTERS,
};

/// Compares a session with the snapshot. Stores with the same abilities have the same one.
fn check(session: &str, snapshot: &str) {
    insta::with_settings!({filters => FILTERS}, {
        insta::assert_snapshot!(snapshot, session);
    });
}

/// The tests of one store: its name, its snapshots, and the URLs of stores without tables. `$start` returns a function that
/// returns such a URL. `$setting` is the option that names the table or the prefix.
macro_rules! store_tests {
    ($name:ident, $snapshot:literal, $setting:expr, $start:expr) => {
        mod $name {
            use super::*;

            #[tokio::test(flavor = "multi_thread")]
            async fn operator_resolves_every_kind() {
                let url = $start;
                check(&resolve_every_kind(&url()).await, $snapshot);
            }

            #[tokio::test(flavor = "multi_thread")]
            async fn verbs_print_text_and_json() {
                let url = $start;
                let session = read_in_each_form(&url()).await;
                check(&session, concat!($snapshot, "_reading"));
            }

            #[tokio::test(flavor = "multi_thread")]
            async fn removed_entry_has_changed() {
                let url = $start;
                resolve_removed_entry(&url()).await;
            }

            #[tokio::test(flavor = "multi_thread")]
            async fn commands_of_document_resolve_keys() {
                let url = $start;
                resolve_in_three_commands(&url()).await;
            }

            #[tokio::test(flavor = "multi_thread")]
            async fn tool_finds_other_table_and_creates_none() {
                let url = $start;
                open_other_table(&url(), $setting).await;
            }
        }
    };
}

store_tests!(postgres, "all_states", Some("--table"), {
    let server = PostgresServer::start(&[]);
    move || server.url()
});

store_tests!(mariadb, "all_states", Some("--table"), {
    let server = MariaDbServer::start(&[]);
    move || server.url()
});

store_tests!(sqlite, "all_states", Some("--table"), {
    let scratch = Scratch::new();
    move || format!("sqlite:{}", scratch.file("keys.db").display())
});

store_tests!(redis, "unresolved_states", Some("--prefix"), {
    let server = RedisServer::start(&[]);
    move || server.url()
});

store_tests!(redis_cluster, "unresolved_states", Some("--prefix"), {
    let cluster = RedisCluster::start();
    move || cluster.url()
});

// The index has the code of a record, and not its size. A lease of the test expires within this skew of clocks.
store_tests!(dynamodb, "unresolved_states_without_sizes", None, {
    let server = shared(StandIn::Dynoxide);
    move || {
        let (table, address) = (server.new_table(), server.address());
        format!("dynamodb://{table}?endpoint=http://{address}&skew=100ms")
    }
});

/// Asserts that the tool creates no table, and that the option for the table or prefix selects the entries.
async fn open_other_table(url: &str, setting: Option<&str>) {
    if setting != Some("--prefix") {
        for args in [&["stats"][..], &["check"], &["stats"]] {
            let ran = run(url, args);
            assert_eq!(ran.code, 1, "{ran:?}");
            assert!(ran.err.contains("this program creates nothing"), "{ran:?}");
            assert_eq!(ran.err.lines().count(), 1, "{ran:?}");
        }
    }
    let other = "other_name";
    let options = OpenOptions::new().with_timeout(Duration::from_secs(120));
    let options = match setting {
        Some("--table") => options.with_table(other),
        Some(_) => options.with_prefix(other),
        None => options,
    };
    let store = options.open(url).await.expect("the server runs");
    Keys::create(&store).await;
    let named: Vec<_> = setting.iter().flat_map(|it| [*it, other]).collect();
    let listed = run(url, &[&["list", "orphaned"], &named[..]].concat());
    assert!(listed.out.contains("bbbbbbbb"), "{listed:?}");
    if setting.is_some() {
        let listed = run(url, &["list", "orphaned"]);
        assert!(!listed.out.contains("bbbbbbbb"), "{listed:?}");
        // Redis has no tables: another prefix is empty.
        let code = i32::from(setting == Some("--table"));
        assert_eq!(listed.code, code, "{listed:?}");
    }
    // Each store has one of the two settings at most.
    for wrong in ["--table", "--prefix"] {
        if setting != Some(wrong) {
            let refused = run(url, &["stats", wrong, other]);
            assert_eq!(refused.code, 2, "{refused:?}");
            let reason = format!("because a {} is set", &wrong[2..]);
            assert!(refused.err.contains(&reason), "{refused:?}");
        }
    }
}
