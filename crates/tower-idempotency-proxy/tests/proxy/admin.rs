//! A console on the admin port, and sockets that are bound already.

use std::{
    net::{SocketAddr, TcpListener},
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{
    Router,
    routing::{get, post},
};
use tests::barrier::bounded;
use tokio::{net::TcpStream, sync::oneshot, time::timeout};
use tower_idempotency::inspect::{Inspect as _, State};
use tower_idempotency_proxy::{BindError, Config, Proxy, Sockets};

use crate::harness::{Reply, Script, Served, Upstream, config, exchange};

async fn send(address: SocketAddr, method: &str, path: &str, body: &str) -> Reply {
    let length = body.len();
    exchange(
        address,
        format!(
            "{method} {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
        ),
    )
    .await
}

async fn bind(text: &str) -> Proxy {
    let bound = Proxy::bind(Config::from_toml(text).unwrap()).await;
    bound.unwrap()
}

#[tokio::test]
async fn console_gets_only_its_paths() {
    async fn echo(body: String) -> String {
        format!("decided: {body}")
    }
    let pages = Router::new()
        .route("/", get(async || "overview"))
        .route("/resolve", post(echo));
    let console = Router::new().nest_service("/console", pages);
    let upstream = Upstream::start(|_| Script::create()).await;
    let text = config(upstream.address, "", "");
    let proxy = Served::serve(bind(&text).await.with_console(console));
    let admin = proxy.admin.unwrap();
    for path in ["/console", "/console/"] {
        let reply = send(admin, "GET", path, "").await;
        assert!(
            reply.status() == 200 && reply.0.ends_with("overview"),
            "{reply:?}"
        );
    }
    let reply = send(admin, "POST", "/console/resolve", "free").await;
    assert!(reply.0.ends_with("decided: free"), "{reply:?}");
    for (method, path, expected) in [
        ("GET", "/consoles", 404),
        ("GET", "/x/console/", 404),
        ("GET", "/healthz", 200),
        ("POST", "/healthz", 405),
    ] {
        let reply = send(admin, method, path, "").await;
        assert_eq!(reply.status(), expected, "{path}: {reply:?}");
        // A page of the proxy lists its pages.
        let is_page = reply.0.contains("/healthz /readyz");
        assert_eq!(is_page, expected == 404, "{path}: {reply:?}");
    }
    let pages = send(admin, "GET", "/other", "").await;
    assert!(pages.0.contains("/policy /console/"), "{pages:?}");
    // Clients do not reach it.
    let reply = send(proxy.address, "GET", "/console/", "").await;
    assert_eq!((reply.status(), upstream.effects()), (201, 1));

    let proxy = Served::start(&text).await;
    let reply = send(proxy.admin.unwrap(), "GET", "/console/", "").await;
    assert!(
        reply.status() == 404 && !reply.0.contains("/console/"),
        "{reply:?}"
    );
}

/// After the drain, the proxy waits for an open response of the console, and accepts no connection.
#[tokio::test]
async fn console_response_ends_after_drain() {
    let (begin, began) = oneshot::channel::<()>();
    let (end, ended) = oneshot::channel::<()>();
    let barrier = Arc::new(Mutex::new(Some((begin, ended))));
    let overview = get(move || async move {
        let (begin, ended) = barrier.lock().unwrap().take().unwrap();
        begin.send(()).unwrap();
        ended.await.unwrap();
        "overview"
    });
    let console = Router::new().route("/console", overview);
    let upstream = Upstream::start(|_| Script::create()).await;
    let proxy = bind(&config(upstream.address, "", "")).await;
    let drained = proxy.drained();
    let proxy = Served::serve(proxy.with_console(console));
    let admin = proxy.admin.unwrap();
    let reply = tokio::spawn(async move { send(admin, "GET", "/console", "").await });
    bounded(began).await.unwrap();
    let mut stopped = proxy.stop();
    bounded(drained).await;
    // A proxy that does not wait ends at once.
    let early = timeout(Duration::from_millis(200), &mut stopped).await;
    assert!(early.is_err(), "{early:?}");
    end.send(()).unwrap();
    assert!(bounded(stopped).await.unwrap());
    let reply = bounded(reply).await.unwrap();
    assert!(reply.0.ends_with("overview"), "{reply:?}");
    assert!(TcpStream::connect(admin).await.is_err());
}

#[tokio::test]
async fn common_layer_finds_entry_of_key() {
    let upstream = Upstream::start(|_| Script::create()).await;
    let text = config(upstream.address, "", "");
    let proxy = bind(&text).await;
    let (layer, store) = (proxy.current_layer()().unwrap(), proxy.store());
    let proxy = Served::serve(proxy);
    let reply = exchange(proxy.address, crate::harness::post("/pay", "k", "1")).await;
    assert_eq!(reply.status(), 201);
    let mut found = Vec::new();
    for id in layer.key_ids("k", &[]).unwrap() {
        found.extend(store.get(&id).await.unwrap());
    }
    let states: Vec<_> = found.iter().map(|it| it.entry.state()).collect();
    assert_eq!(states, [State::Completed]);
    // Another route identifies callers in another way.
    let other = "[[route]]\npath = \"/x\"\nupstream = \"app\"\nprincipal = \"authorization\"";
    let other_principal = config(upstream.address, "", other);
    // The host of the request is not known.
    let with_host = text.replace("path = \"/**\"", "path = \"/**\"\nhost_in_scope = true");
    assert_ne!(with_host, text);
    for text in [other_principal, with_host] {
        let proxy = bind(&text).await;
        assert!(proxy.current_layer()().is_none());
    }
}

/// The value of a parameter may be a secret, such as the token that resets a password.
#[cfg(feature = "sqlite")]
#[tokio::test]
async fn entry_has_no_values_of_path_parameters() {
    use tests::scratch::Scratch;
    use tower_idempotency::inspect::Query;

    let scratch = Scratch::new();
    let url = format!("\"sqlite:{}\"", scratch.file("keys.db").display());
    let upstream = Upstream::start(|_| Script::create()).await;
    let open = "path = \"/open/**\"";
    let reset = "path = \"/reset/{token}/confirm\"\nupstream = \"app\"\n[[route]]";
    let text = config(upstream.address, "", "")
        .replacen("\"memory\"", &url, 1)
        .replacen(open, &format!("{reset}\n{open}"), 1);
    let proxy = bind(&text).await;
    let store = proxy.store();
    let proxy = Served::serve(proxy);
    for (path, key) in [("/reset/secret/confirm", "1"), ("/pay", "2")] {
        let post = crate::harness::post(path, key, "1");
        assert_eq!(exchange(proxy.address, post).await.status(), 201);
    }
    let page = store.list(&Query::new(State::Completed)).await.unwrap();
    let mut operations: Vec<_> = page.entries.iter().map(|it| &*it.operation).collect();
    operations.sort_unstable();
    assert_eq!(operations, ["POST /pay", "POST /reset/{token}/confirm"]);
}

#[tokio::test]
async fn bound_sockets_replace_addresses() {
    let socket = || TcpListener::bind("127.0.0.1:0").unwrap();
    let (listen, admin) = (socket(), socket());
    let addresses = (listen.local_addr().unwrap(), admin.local_addr().unwrap());
    let upstream = Upstream::start(|_| Script::create()).await;
    // No socket can be bound to these addresses.
    let text = config(upstream.address, "", "")
        .replacen("\"127.0.0.1:0\"", "\"192.0.2.1:1\"", 1)
        .replacen("\"127.0.0.1:0\"", "\"192.0.2.1:2\"", 1);
    let read = || Config::from_toml(&text).unwrap();
    assert!(matches!(
        Proxy::bind(read()).await,
        Err(BindError::Address(..))
    ));
    let sockets = Sockets::new().with_listen(listen).with_admin(admin);
    let proxy = Served::serve(Proxy::bind_with(read(), sockets).await.unwrap());
    assert_eq!((proxy.address, proxy.admin.unwrap()), addresses);
    assert_eq!(send(addresses.0, "GET", "/", "").await.status(), 201);
    assert_eq!(send(addresses.1, "GET", "/healthz", "").await.status(), 200);
}

#[tokio::test]
async fn socket_without_admin_section_is_rejected() {
    let text = "listen = { address = \"127.0.0.1:0\" }\nstore = { url = \"memory\" }\n\
                upstream.app = { url = \"http://127.0.0.1:1\" }\n\
                [[route]]\npath = \"/**\"\nupstream = \"app\"\n";
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let sockets = Sockets::new().with_admin(socket);
    let bound = Proxy::bind_with(Config::from_toml(text).unwrap(), sockets).await;
    let error = bound.err().map(|error| error.to_string());
    let expected = "expected the section [admin], because there is a socket for it";
    assert_eq!(error.as_deref(), Some(expected));
}
