//! A proxy that is killed between the effect at the upstream and the record in the store.

use std::{fs, thread, time::Duration};

use tests::{
    few_or,
    scratch::Scratch,
    servers::{postgres, redis},
};

use crate::harness::{Process, Upstream, config, post, post_settled};

const ROUTE: &str = "lease = \"1s\"";

fn kill_during_execution(store: &str) {
    let scratch = Scratch::new();
    let file = scratch.file("proxy.toml");
    let store = store.replace("SCRATCH", scratch.path().to_str().unwrap());
    // The upstream never responds to the first request.
    let upstream = Upstream::start(|effect| {
        if effect == 1 {
            thread::sleep(Duration::from_secs(3600));
        }
        true
    });
    fs::write(&file, config(&store, upstream.address, ROUTE)).unwrap();
    let proxy = Process::start(&file);
    let address = proxy.address;
    let key = format!("crash-{}", proxy.pid());
    let client = thread::spawn({
        let key = key.clone();
        move || post(address, "/pay", &key, "1")
    });
    upstream.wait_for(1);
    proxy.kill();
    assert_eq!(client.join().unwrap().status(), 0);
    let proxy = Process::start(&file);
    for _ in 0..3 {
        let reply = post_settled(proxy.address, &key);
        assert!(
            reply.status() == 409 && reply.is_problem("outcome-unknown"),
            "{reply:?}"
        );
    }
    assert_eq!(upstream.effects(), 1);
    // Other keys are not affected.
    assert_eq!(
        post_settled(proxy.address, &format!("{key}-other")).status(),
        201
    );
}

#[test]
fn killed_proxy_leaves_outcome_unknown_on_sqlite() {
    kill_during_execution("sqlite:SCRATCH/keys.db");
}

#[test]
fn killed_proxy_leaves_outcome_unknown_on_redis() {
    kill_during_execution(&redis::shared().url());
}

#[test]
fn killed_proxy_leaves_outcome_unknown_on_postgres() {
    kill_during_execution(&postgres::shared().url());
}

#[test]
fn proxy_killed_at_any_time_executes_once() {
    let scratch = Scratch::new();
    let file = scratch.file("proxy.toml");
    let upstream = Upstream::start(|_| true);
    let store = format!("sqlite:{}/keys.db", scratch.path().display());
    fs::write(&file, config(&store, upstream.address, ROUTE)).unwrap();
    let (mut replayed, mut unknown, mut executed) = (0, 0, 0);
    for round in 0..few_or(15, 200) {
        let proxy = Process::start(&file);
        let address = proxy.address;
        let key = format!("round-{round}");
        let before = upstream.effects();
        let client = thread::spawn({
            let key = key.clone();
            move || post(address, "/pay", &key, "1")
        });
        // From before the request to after the response.
        thread::sleep(Duration::from_micros(500 * round as u64));
        proxy.kill();
        let first = client.join().unwrap();
        let proxy = Process::start(&file);
        let retry = post_settled(proxy.address, &key);
        let context = format!("{round}: {first:?} {retry:?}");
        match retry.status() {
            201 if retry.is_replay() => replayed += 1,
            // The first request did not reach the upstream.
            201 => executed += 1,
            409 if retry.is_problem("outcome-unknown") => unknown += 1,
            _ => panic!("{context}"),
        }
        assert!(upstream.effects() <= before + 1, "{context}");
        // A client that got the response gets it again.
        assert!(first.status() != 201 || retry.is_replay(), "{context}");
    }
    println!("replayed {replayed}, executed {executed}, unknown {unknown}");
}
