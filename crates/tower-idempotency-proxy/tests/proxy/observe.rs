//! Observed routes, shares of callers, the switch by a reload, and the names of routes in metrics.

use std::collections::BTreeMap;

use tests::barrier::eventually;
use tower_idempotency_proxy::Config;

use crate::harness::{
    CREATED, ConnectionEnd, Counters, Reply, Script, Served, Upstream, config, exchange, post,
    post_with,
};

const OBSERVE: &str = "mode = \"observe\"\nmissing_key = \"reject\"\nrequest_limit = \"4B\"";

/// The requests whose wire is compared. None is a retry, because the upstream counts.
fn requests() -> Vec<String> {
    let mut requests = vec![
        post("/a", "one", "abc"),
        post("/b", "\"", "abc"),
        post("/c", "too-large", "abcdefgh"),
        post_with("/d", "encoded", "accept-encoding: gzip\r\n", "abc"),
        post_with("/e", "expected", "x-idempo-policy: no-store\r\n", ""),
        "POST /f HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-length: 2\r\n\r\nno".into(),
    ];
    requests.push(
        "POST /g HTTP/1.1\r\nhost: test\r\nidempotency-key: k\r\nconnection: close\r\n\
         transfer-encoding: chunked\r\n\r\n1\r\na\r\n2\r\nbc\r\n0\r\n\r\n"
            .into(),
    );
    requests
}

/// Responses of each form, in turn.
fn script(number: usize) -> Script {
    const REPLIES: [&str; 5] = [
        "HTTP/1.1 201 Created\r\nlocation: /1\r\ncontent-length: 7\r\n\r\ncreated",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n2\r\nbc\r\n0\r\n\r\n",
        "HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n",
        "HTTP/1.1 409 Conflict\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n",
        "HTTP/1.1 204 No Content\r\n\r\n",
    ];
    Script::reply(REPLIES[number % REPLIES.len()])
}

fn without_date(Reply(reply): Reply) -> String {
    let lines = reply.split_inclusive("\r\n");
    lines.filter(|line| !line.starts_with("date: ")).collect()
}

#[tokio::test]
async fn observed_route_changes_no_byte() {
    let mut seen = Vec::new();
    let with_unknown = |unknown: &str| format!("{OBSERVE}\nunknown = \"{unknown}\"");
    for lines in [
        "mode = \"off\"".to_owned(),
        with_unknown("attention"),
        with_unknown("orphan"),
        with_unknown("free"),
    ] {
        let upstream = Upstream::start(script).await;
        let proxy = Served::start(&config(upstream.address, "", &lines)).await;
        let mut replies = Vec::new();
        for request in requests() {
            replies.push(without_date(exchange(proxy.address, request).await));
        }
        let sent: Vec<_> = upstream
            .requests()
            .iter()
            .map(|request| request.replace(&format!("{}", proxy.address.port()), "PORT"))
            .collect();
        seen.push((replies, sent));
        assert!(proxy.stop().await.unwrap());
    }
    let [off, observed @ ..] = &seen[..] else {
        panic!("no run");
    };
    assert_eq!(observed.len(), 3);
    for observed in observed {
        assert_eq!(off.0, observed.0, "to clients");
        assert_eq!(off.1, observed.1, "to upstreams");
    }
    assert_eq!(off.1.len(), requests().len());
}

/// Sends a request and its retry to an observed route. `first` is the reaction to the first one. Returns the outcomes that were
/// counted.
async fn observe(first: Script, upstream_lines: &str, route: &str) -> BTreeMap<String, u64> {
    const OBSERVED: &str = "idempotency_observed_total";
    let counters = Counters::default();
    let _guard = counters.install();
    let upstream = Upstream::start(move |number| match number {
        0 => first.clone(),
        _ => Script::create(),
    });
    let upstream = upstream.await;
    let lines = format!("mode = \"observe\"\n{route}");
    let proxy = Served::start(&config(upstream.address, upstream_lines, &lines)).await;
    for judged in 1..=2 {
        exchange(proxy.address, post("/pay", "k", "1")).await;
        eventually("the request is judged", || {
            counters.of(OBSERVED).values().sum::<u64>() == judged
        })
        .await;
    }
    assert_eq!(upstream.effects(), 2);
    let unknown = counters.of("idempotency_proxy_unknown_outcomes_total");
    assert!(unknown.is_empty(), "no execution is enforced: {unknown:?}");
    counters.of(OBSERVED)
}

#[tokio::test]
async fn observed_unknown_outcome_refuses_retry() {
    let refused = BTreeMap::from([
        ("fresh".to_owned(), 1),
        ("would_refuse_retry".to_owned(), 1),
    ]);
    let released = BTreeMap::from([("fresh".to_owned(), 2)]);
    let status =
        |status: &str| Script::reply(format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n"));
    let close = || Script::reply("").then(ConnectionEnd::Close);
    let hang = || Script::reply("").then(ConnectionEnd::Hang);
    let short = "timeout = \"200ms\"";
    for (first, upstream, route, expected) in [
        (status("502 Bad Gateway"), "", "", &refused),
        (status("504 Gateway Timeout"), "", "", &refused),
        (status("524 Timeout"), "", "", &refused),
        (close(), "", "", &refused),
        (hang(), short, "", &refused),
        (
            status("502 Bad Gateway"),
            "",
            "unknown = \"orphan\"",
            &refused,
        ),
        (close(), "", "unknown = \"orphan\"", &refused),
        (
            status("502 Bad Gateway"),
            "",
            "unknown = \"free\"",
            &released,
        ),
        (close(), "", "unknown = \"free\"", &released),
        (status("409 Conflict\r\nretry-after: 1"), "", "", &released),
        (
            status("503 Busy\r\nretry-after: 1"),
            "",
            "preset = \"stripe\"",
            &released,
        ),
    ] {
        let reply = String::from_utf8_lossy(&first.reply).into_owned();
        let outcomes = observe(first, upstream, route).await;
        assert_eq!(outcomes, *expected, "{reply:?} {route}");
    }
    // A response that is an outcome is compared.
    let outcomes = observe(Script::reply(CREATED), "", "").await;
    let replayed = [("fresh".to_owned(), 1), ("would_replay".to_owned(), 1)];
    assert_eq!(outcomes, BTreeMap::from(replayed));
}

/// Returns the number of effects of a request and its retry.
async fn effects(proxy: &Served, upstream: &Upstream, key: &str, caller: &str) -> usize {
    let before = upstream.effects();
    let line = format!("authorization: Bearer {caller}\r\n");
    for _ in 0..2 {
        let reply = exchange(proxy.address, post_with("/pay", key, &line, "abc")).await;
        assert_eq!(reply.status(), 201);
    }
    upstream.effects() - before
}

#[tokio::test]
async fn reload_switches_and_returns_to_records() {
    let upstream = Upstream::start(|_| Script::create()).await;
    let text = |mode: &str| config(upstream.address, "", &format!("mode = \"{mode}\""));
    let proxy = Served::start(&text("enforce")).await;
    let reload = |mode| proxy.handle.reload(Config::from_toml(&text(mode)));
    assert_eq!(effects(&proxy, &upstream, "first", "a").await, 1);

    reload("observe").unwrap();
    assert_eq!(
        effects(&proxy, &upstream, "first", "a").await,
        2,
        "not protected"
    );
    assert_eq!(effects(&proxy, &upstream, "second", "a").await, 2);

    reload("enforce").unwrap();
    assert_eq!(
        effects(&proxy, &upstream, "first", "a").await,
        0,
        "recorded"
    );
    assert_eq!(effects(&proxy, &upstream, "second", "a").await, 1);

    let error = reload("off").unwrap_err().to_string();
    assert!(error.contains("no longer protect"), "{error}");
    assert_eq!(effects(&proxy, &upstream, "third", "a").await, 1);
    reload("observe").unwrap();
    reload("off").unwrap();
    assert_eq!(effects(&proxy, &upstream, "fourth", "a").await, 2);
    assert!(proxy.stop().await.unwrap());
}

/// A change while the route observes would lose the records that it replays when it enforces again.
#[tokio::test]
async fn observed_route_keeps_identity_of_records() {
    let upstream = Upstream::start(|_| Script::create()).await;
    let text = |lines: &str| config(upstream.address, "", lines);
    for (index, change) in [
        "preset = \"stripe\"",
        "principal = \"authorization\"",
        "key_header = \"x-key\"",
    ]
    .into_iter()
    .enumerate()
    {
        // The first configuration enforces the route, or a reload does.
        let first = if index == 0 { "" } else { "mode = \"observe\"" };
        let proxy = Served::start(&text(first)).await;
        let reload = |lines: &str| proxy.handle.reload(Config::from_toml(&text(lines)));
        reload("").unwrap();
        assert_eq!(effects(&proxy, &upstream, "k", "a").await, 1);

        reload("mode = \"observe\"").unwrap();
        let rejected = |lines: &str| {
            let error = reload(lines).unwrap_err().to_string();
            assert!(error.contains("needs a restart"), "{lines}: {error}");
        };
        rejected(&format!("mode = \"observe\"\n{change}"));
        rejected(change);
        // A route that is off has no entries.
        reload(&format!("mode = \"off\"\n{change}")).unwrap();
        rejected(change);

        reload("").unwrap();
        let again = effects(&proxy, &upstream, "k", "a").await;
        assert_eq!(again, 0, "{change}: recorded");
        assert!(proxy.stop().await.unwrap());
    }
}

#[tokio::test]
async fn removed_route_keeps_identity_of_records() {
    let upstream = Upstream::start(|_| Script::create()).await;
    // No other route is protected.
    let text = |route: &str| {
        let text = config(upstream.address, "", "mode = \"off\"");
        text.replacen("[[route]]", &format!("{route}\n[[route]]"), 1)
    };
    let route = |path: &str, lines: &str| {
        text(&format!(
            "[[route]]\npath = \"{path}\"\nupstream = \"app\"\n{lines}"
        ))
    };
    let proxy = Served::start(&route("/pay", "")).await;
    let reload = |text: &str| proxy.handle.reload(Config::from_toml(text));
    assert_eq!(effects(&proxy, &upstream, "k", "a").await, 1);
    assert!(reload(&text("")).is_err(), "the route is protected");
    reload(&route("/pay", "mode = \"observe\"")).unwrap();
    reload(&text("")).unwrap();

    let other = "principal = \"authorization\"";
    for path in ["/pay", "/{any}", "/pay/**"] {
        let error = reload(&route(path, other)).unwrap_err().to_string();
        assert!(error.contains("needs a restart"), "{path}: {error}");
    }
    // It gets none of the requests.
    reload(&route("/refund", other)).unwrap();
    reload(&route("/refund", &format!("mode = \"observe\"\n{other}"))).unwrap();
    reload(&route("/pay/**", "")).unwrap();
    let again = effects(&proxy, &upstream, "k", "a").await;
    assert_eq!(again, 0, "recorded");
    assert!(proxy.stop().await.unwrap());
}

#[tokio::test]
async fn route_that_only_observed_may_change() {
    let upstream = Upstream::start(|_| Script::create()).await;
    let text = |lines: &str| config(upstream.address, "", lines);
    let proxy = Served::start(&text("mode = \"observe\"")).await;
    let reload = |lines: &str| proxy.handle.reload(Config::from_toml(&text(lines)));
    let other = "principal = \"authorization\"";
    assert_eq!(effects(&proxy, &upstream, "k", "a").await, 2);
    reload(&format!("mode = \"observe\"\n{other}")).unwrap();
    reload(other).unwrap();
    assert_eq!(effects(&proxy, &upstream, "k", "a").await, 1);
    assert!(proxy.stop().await.unwrap());
}

#[tokio::test]
async fn share_of_callers_is_enforced() {
    let upstream = Upstream::start(|_| Script::create()).await;
    let text = |share: &str| {
        let rollout = format!("[rollout]\nshare = \"{share}\"\n[[route]]\npath = \"/open/**\"");
        let text = config(upstream.address, "", "");
        text.replacen("[[route]]\n        path = \"/open/**\"", &rollout, 1)
    };
    let proxy = Served::start(&text("0%")).await;
    let mut before = [false; 20];
    for share in ["0%", "40%", "100%"] {
        proxy
            .handle
            .reload(Config::from_toml(&text(share)))
            .unwrap();
        let mut now = [false; 20];
        for (caller, is_in) in now.iter_mut().enumerate() {
            let key = format!("{share}-{caller}").replace('%', "");
            let effects = effects(&proxy, &upstream, &key, &format!("{caller}")).await;
            *is_in = effects == 1;
        }
        assert!(before.iter().zip(&now).all(|(before, now)| before <= now));
        let count = now.iter().filter(|is_in| **is_in).count();
        match share {
            "0%" => assert_eq!(count, 0),
            "100%" => assert_eq!(count, 20),
            // The digests of these callers do not change.
            _ => assert!((1..20).contains(&count), "{count}"),
        }
        before = now;
    }
    assert!(proxy.stop().await.unwrap());
}

#[tokio::test]
async fn route_in_front_cannot_observe_protected_one() {
    let upstream = Upstream::start(|_| Script::create()).await;
    let text = config(upstream.address, "", "");
    let proxy = Served::start(&text).await;
    let route = "[[route]]\npath = \"/pay\"\nupstream = \"app\"\nmode = \"observe\"\n[[route]]";
    let in_front = text.replacen("[[route]]", route, 1);
    let error = proxy
        .handle
        .reload(Config::from_toml(&in_front))
        .unwrap_err();
    assert!(error.to_string().contains("no longer protect"), "{error}");
    assert_eq!(effects(&proxy, &upstream, "k", "a").await, 1);
    assert!(proxy.stop().await.unwrap());
}

#[tokio::test]
async fn name_of_route_is_label_of_metrics() {
    let counters = Counters::default();
    let _guard = counters.install();
    let upstream = Upstream::start(|_| Script::create()).await;
    let text = |name: &str| config(upstream.address, "", &format!("name = \"{name}\""));
    let proxy = Served::start(&text("cards")).await;
    let counted = |names: &[&str]| {
        let counted = names.iter().map(|name| ((*name).to_owned(), 1));
        counted.collect::<BTreeMap<_, u64>>()
    };
    assert_eq!(effects(&proxy, &upstream, "first", "a").await, 1);
    for metric in ["idempotency_granted_total", "idempotency_replayed_total"] {
        assert_eq!(counters.of(metric), counted(&["cards"]), "{metric}");
    }

    let reloaded = proxy.handle.reload(Config::from_toml(&text("payments")));
    reloaded.unwrap();
    assert_eq!(effects(&proxy, &upstream, "second", "a").await, 1);
    let granted = counters.of("idempotency_granted_total");
    assert_eq!(granted, counted(&["cards", "payments"]));
    assert!(proxy.stop().await.unwrap());
}
