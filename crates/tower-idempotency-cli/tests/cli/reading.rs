//! The commands that change nothing, in text and in JSON.

use std::fs;

use bytes::Bytes;
use http::Response;
use serde_json::Value;
use tower_idempotency::{IdempotencyLayer, MemoryStore, store::Ttl};

use crate::{
    scenario::{Keys, RECORD, acquire, claim, complete},
    session::Session,
};

/// Reads a store without entries, then entries in each state, and then pages of a listing. Returns what the operator typed
/// and read.
pub(crate) async fn read_in_each_form(url: &str) -> String {
    let store = crate::open(url).await.expect("the server runs");
    let mut session = Session::new(url);
    session.read(&[
        "list orphaned --fail-if-any",
        "find --key order-7 --principal alice",
        "stats",
        "watch --exit-when-empty attention",
        "watch --exit-when-empty completed",
    ]);
    session.run("export");

    let keys = Keys::create(&store).await;
    let layer = IdempotencyLayer::new(MemoryStore::new());
    let mut of_key = claim(0xee);
    of_key.id = layer.key_ids("order-7", &[b"alice"]).expect("a key")[0];
    let response = Response::new(Bytes::from("paid"));
    let response = layer.encode_response_record(&of_key.id, &response);
    let unreadable = claim(0xff);
    // SQL stores list completed entries in the order of their expiry.
    for (claim, record, retention) in [
        (&of_key, response, Ttl::from_secs(72_000)),
        (
            &unreadable,
            "a later format".into(),
            Ttl::from_secs(108_000),
        ),
    ] {
        acquire(&store, claim).await;
        complete(&store, claim, record, retention).await;
    }

    session.read(&[
        "list in-progress",
        "list orphaned --fail-if-any",
        "list needs-attention",
        "list completed",
        "list attention --older-than 1ms --operation POST --owner host-1:4711",
        "list attention --older-than 1h",
    ]);
    let [completed, unreadable] = [&keys.completed, &unreadable].map(|it| it.id.to_hex());
    session.read(&[
        "show aaaaaaaa",
        "show bbbbbbbb",
        "show cccccccc",
        "show dddddddd",
        &format!("show {completed}"),
        &format!("show {unreadable}"),
    ]);
    session.run("show 00000000");
    session.run(&format!("show {}", "0".repeat(64)));
    session.run("show bbbbbbbb --record record");
    session.run(&format!("show {completed} --record -"));
    session.run(&format!("show {completed} --record record"));
    let record = fs::read(session.file("record")).expect("a file");
    assert_eq!(record, RECORD);

    fs::write(session.file("key"), "order-7\n").expect("a file");
    fs::write(session.file("principal"), "alice\n").expect("a file");
    session.read(&[
        "find --key order-7 --principal alice",
        "find --key-file key --principal-file principal",
        "find --key order-7 --principal alice --namespace payments",
    ]);

    session.read(&["stats"]);
    session.interrupt("watch --interval 1h");
    session.interrupt("watch --interval 1h --json");
    session.run("export");
    session.run("export --state orphaned --state attention --with-records");
    session.run("export --state completed --with-records");

    // The order of these two entries is that of the store. Their lines are equal.
    acquire(&store, &claim(0xaa)).await;
    session.run("show aaaaaaaa");
    session.read(&["stats --limit 1"]);
    session.run("list in-progress --limit 1");
    let page = session.run("list in-progress --limit 1 --json");
    let last = page.out.lines().last().expect("a line");
    let last: Value = serde_json::from_str(last).expect("JSON");
    let next = last["next"].as_str().expect("another page");
    session.read(&[&format!("list in-progress --after {next}")]);

    // A check acquires a lease for a moment. A listing at the same time could show it.
    session.read(&["check"]);
    session.into_notes()
}
