//! Observed routes, shares of callers, and the switch by a reload.

use tower_idempotency_proxy::Config;

use crate::harness::{Reply, Script, Served, Upstream, config, exchange, post, post_with};

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
    const REPLIES: [&str; 4] = [
        "HTTP/1.1 201 Created\r\nlocation: /1\r\ncontent-length: 7\r\n\r\ncreated",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n2\r\nbc\r\n0\r\n\r\n",
        "HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n",
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
    for lines in ["mode = \"off\"", OBSERVE] {
        let upstream = Upstream::start(script).await;
        let proxy = Served::start(&config(upstream.address, "", lines)).await;
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
    let [off, observed] = &seen[..] else {
        panic!("two runs");
    };
    assert_eq!(off.0, observed.0, "to clients");
    assert_eq!(off.1, observed.1, "to upstreams");
    assert_eq!(off.1.len(), requests().len());
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
