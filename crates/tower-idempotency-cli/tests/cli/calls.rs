//! The calls that each command makes: only `check --repair` walks through the keys of a store.

use std::{collections::BTreeSet, path::Path, thread};

use tests::{
    dynamodb::Endpoint,
    scratch::Scratch,
    servers::{
        dynamodb::{StandIn, shared},
        redis::{Monitor, RedisCluster, RedisServer},
    },
};

use crate::{run_in, scenario::Keys, serve::Served, session::COMMANDS_AT_ONCE};

/// The options that change what a listing reads.
const FILTERS: [&[&str]; 6] = [
    &[],
    &["--json"],
    &["--limit", "1"],
    &["--older-than", "1h"],
    &["--operation", "POST /nowhere"],
    &["--owner", "unknown"],
];

/// Visits the pages of the console, allows a retry of the orphan, and waits until the live view is refreshed.
fn visit_console(directory: &Path, url: &str, keys: &Keys) {
    let served = Served::start(directory, url, &["--audit", "log"]);
    let get = |path: &str| {
        let response = served.get(path, "");
        assert!(response.starts_with("HTTP/1.1 200 "), "{path}: {response}");
        response
    };
    for path in ["/", "/find", "/find?id=bbbbbbbb", "/audit", "/metrics"] {
        get(path);
    }
    // The page of a state that the store does not list shows that.
    for state in ["in-progress", "orphaned", "needs-attention", "completed"] {
        get(&format!("/entries?state={state}"));
    }
    for filter in ["older=1h", "owner=unknown", "operation=nowhere", "limit=1"] {
        get(&format!("/entries?state=orphaned&{filter}"));
    }
    for claim in [
        &keys.in_progress,
        &keys.orphaned,
        &keys.attention,
        &keys.completed,
    ] {
        let id = claim.id.to_hex();
        get(&format!("/entries/{id}"));
        get(&format!("/find?id={id}"));
    }
    let id = keys.orphaned.id.to_hex();
    get(&format!("/entries/{id}/resolve?how=retry"));
    let entry = get(&format!("/api/v1/entries/{id}"));
    let (_, seen) = entry.split_once("\"seen\":\"").expect("a member");
    let (seen, _) = seen.split_once('"').expect("an end");
    let body = format!("{{\"seen\":\"{seen}\",\"how\":\"retry\",\"reason\":\"x\"}}");
    let path = format!("/api/v1/entries/{id}/resolve");
    let json = "content-type: application/json\r\n";
    let done = served.send("POST", &path, json, &body);
    assert!(done.starts_with("HTTP/1.1 200 "), "{done}");
    served.wait_for_counts();
}

/// Runs each command that takes a store, but not `check --repair`, and listings with each of these options.
///
/// Several reading commands run at the same time, because a command on a cluster takes a second.
async fn run_every_command(url: &str, filters: &[&[&str]]) {
    let store = crate::open(url).await.expect("the server runs");
    let keys = Keys::create(&store).await;
    let scratch = Scratch::new();
    let directory = scratch.file("");
    let run = |args: &[&str], code: i32| {
        let ran = run_in(&directory, url, args);
        assert_eq!(ran.code, code, "{args:?}: {ran:?}");
    };
    let completed = keys.completed.id.to_hex();
    let mut reads = vec![
        (vec!["list", "completed"], 6),
        (vec!["show", completed.as_str()], 0),
        (vec!["show", "aaaaaaaa"], 0),
        (vec!["show", "bbbbbbbb"], 0),
        (vec!["show", "cccccccc"], 0),
        (vec!["show", "eeeeeeee"], 3),
        (vec!["find", "--key", "8e03978e", "--principal", "alice"], 3),
        (vec!["stats"], 0),
        (vec!["check"], 0),
        (vec!["export", "--with-records"], 0),
    ];
    for state in ["in-progress", "orphaned", "attention"] {
        for filter in filters {
            reads.push(([&["list", state], *filter].concat(), 0));
        }
    }
    for concurrent in reads.chunks(COMMANDS_AT_ONCE) {
        thread::scope(|scope| {
            for (args, code) in concurrent {
                let run = &run;
                scope.spawn(move || run(args, *code));
            }
        });
    }
    visit_console(&directory, url, &keys);
    let change = ["--reason", "x", "--audit", "log", "--yes"];
    for (id, decision) in [
        ("aaaaaaaa", &["break-lease", "--force"][..]),
        ("aaaaaaaa", &["retry"]),
        ("bbbbbbbb", &["needs-attention"]),
        ("bbbbbbbb", &["complete", "--status", "201"]),
        ("cccccccc", &["free"]),
        (&completed, &["delete-record", "--force"]),
    ] {
        run(&[&["resolve", id], decision, &change].concat(), 0);
    }
    run(&[&["purge"][..], &change].concat(), 6);
    run(&["watch", "--exit-when-empty", "attention"], 0);
}

/// The commands that Redis may execute for an operator, and those with which a connection begins.
const ALLOWED: [&str; 14] = [
    "auth", "client", "cluster", "config", "echo", "eval", "evalsha", "exists", "hello", "info",
    "ping", "readonly", "script", "select",
];

/// Returns the names of the commands of clients. Those of the nodes among themselves are left out.
fn names(monitor: Monitor<'_>) -> BTreeSet<String> {
    let commands = monitor.into_commands().into_iter();
    commands.map(|command| command.name).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn only_repair_scans_redis() {
    let server = RedisServer::start(&[]);
    let monitor = server.monitor();
    run_every_command(&server.url(), &FILTERS).await;
    let seen = names(monitor);
    let others: Vec<_> = seen
        .iter()
        .filter(|it| !ALLOWED.contains(&&***it))
        .collect();
    assert!(others.is_empty() && seen.contains("evalsha"), "{seen:?}");

    let monitor = server.monitor();
    let scratch = Scratch::new();
    let args = [
        "check", "--repair", "--reason", "x", "--audit", "log", "--yes",
    ];
    let ran = run_in(&scratch.file(""), &server.url(), &args);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(names(monitor).contains("scan"));
}

#[tokio::test(flavor = "multi_thread")]
async fn no_command_scans_cluster() {
    let cluster = RedisCluster::start();
    let monitors = [0, 1, 2].map(|n| cluster.node(n).monitor());
    // A process on a cluster takes a second.
    run_every_command(&cluster.url(), &FILTERS[..1]).await;
    for monitor in monitors {
        let seen = names(monitor);
        let others: Vec<_> = seen
            .iter()
            .filter(|it| !ALLOWED.contains(&&***it))
            .collect();
        // A listing runs a script on each node, which finds its indexes.
        assert!(others.is_empty() && seen.contains("evalsha"), "{seen:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_command_scans_dynamodb() {
    let server = shared(StandIn::Dynoxide);
    let endpoint = Endpoint::start(server.address());
    let (table, address) = (server.new_table(), endpoint.address());
    // A lease of the test expires within this skew of clocks.
    let url = format!("dynamodb://{table}?endpoint=http://{address}&skew=100ms");
    run_every_command(&url, &FILTERS).await;
    let seen: BTreeSet<_> = endpoint.operations().into_iter().collect();
    for operation in &seen {
        assert!(
            [
                "CreateTable",
                "DeleteItem",
                "DescribeTable",
                "DescribeTimeToLive",
                "GetItem",
                "PutItem",
                "Query",
                "UpdateItem",
                "UpdateTimeToLive",
            ]
            .contains(&operation.as_str()),
            "{seen:?}"
        );
    }
    assert!(seen.contains("Query"), "{seen:?}");
}
