//! A proxy that is killed between the effect at the upstream and the record in the store.

use std::{
    fs, thread,
    time::{Duration, Instant},
};

use tests::{
    HANG_GUARD, few_or,
    scratch::Scratch,
    servers::{postgres, redis},
};

use crate::harness::{Process, Upstream, config, post, post_until_resolved};

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
        let reply = post_until_resolved(proxy.address, "/pay", &key);
        assert!(
            reply.status() == 409 && reply.is_problem("outcome-unknown"),
            "{reply:?}"
        );
    }
    assert_eq!(upstream.effects(), 1);
    // Other keys are not affected.
    assert_eq!(
        post_until_resolved(proxy.address, "/pay", &format!("{key}-other")).status(),
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
    // The paths of each outcome.
    let (mut replayed, mut executed, mut unknown) = (Vec::new(), Vec::new(), Vec::new());
    // An estimate of the time until the response.
    let mut response_time = Duration::from_millis(4);
    let began = Instant::now();
    // From before the request to after the response.
    for (round, eighths) in (0..=12_u32).cycle().enumerate() {
        let paths = [&replayed, &executed, &unknown];
        let has_each_outcome = !paths.iter().any(|it| it.is_empty());
        if has_each_outcome && round >= few_or(15, 200) {
            break;
        }
        assert!(
            has_each_outcome || began.elapsed() < HANG_GUARD,
            "replayed {replayed:?}, executed {executed:?}, unknown {unknown:?}"
        );
        let proxy = Process::start(&file);
        let address = proxy.address;
        let (path, key) = (format!("/pay/{round}"), format!("round-{round}"));
        let client = thread::spawn({
            let (path, key) = (path.clone(), key.clone());
            move || {
                let sent = Instant::now();
                (post(address, &path, &key, "1"), sent.elapsed())
            }
        });
        thread::sleep(response_time * eighths / 8);
        proxy.kill();
        let (first, took) = client.join().unwrap();
        if first.status() == 201 {
            response_time = took;
        } else if eighths == 12 {
            response_time *= 2;
        }
        let proxy = Process::start(&file);
        let retry = post_until_resolved(proxy.address, &path, &key);
        let context = format!("{round}: {first:?} {retry:?}");
        // A client that got the response gets it again.
        assert!(first.status() != 201 || retry.is_replay(), "{context}");
        match retry.status() {
            201 if retry.is_replay() => replayed.push(path),
            // The first request did not reach the upstream.
            201 => executed.push(path),
            409 if retry.is_problem("outcome-unknown") => unknown.push(path),
            _ => panic!("{context}"),
        }
    }
    // The last request of a killed proxy may arrive late.
    upstream.wait_for_sent_requests();
    for path in replayed.iter().chain(&executed) {
        assert_eq!(upstream.effects_of(path), 1, "{path}");
    }
    for path in &unknown {
        assert!(upstream.effects_of(path) <= 1, "{path}");
    }
}
