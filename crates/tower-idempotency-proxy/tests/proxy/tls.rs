//! TLS to clients and to upstreams.

use std::{io, net::SocketAddr, path::Path, sync::Arc};

use rustls::{ClientConfig, RootCertStore, crypto::ring, pki_types::ServerName};
use rustls_pki_types::{CertificateDer, pem::PemObject};
use tests::{scratch::Scratch, servers::certificates::Certificates};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tower_idempotency_proxy::Config;

use crate::harness::{Reply, Script, Served, Upstream, config, exchange, post};

pub(crate) fn with_tls(config: &str, certificates: &Certificates) -> String {
    let lines = format!(
        "[listen]\ntls = {{ certificate = \"{}\", key = \"{}\" }}",
        certificates.certificate().display(),
        certificates.key().display()
    );
    config.replacen("[listen]", &lines, 1)
}

pub(crate) async fn connect(
    address: SocketAddr,
    ca: &Path,
    protocol: &[u8],
) -> io::Result<TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(ca).unwrap() {
        roots.add(certificate.unwrap()).unwrap();
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().unwrap();
    let mut config = builder.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![protocol.to_vec()];
    let stream = TcpStream::connect(address).await?;
    let name = ServerName::try_from("localhost").unwrap();
    TlsConnector::from(Arc::new(config))
        .connect(name, stream)
        .await
}

async fn exchange_tls(address: SocketAddr, ca: &Path, request: &str) -> io::Result<Reply> {
    let mut stream = connect(address, ca, b"http/1.1").await?;
    stream.write_all(request.as_bytes()).await?;
    let mut reply = Vec::new();
    let _ = stream.read_to_end(&mut reply).await;
    Ok(Reply(String::from_utf8_lossy(&reply).into_owned()))
}

#[tokio::test]
async fn tls_offers_both_protocols() {
    let scratch = Scratch::new();
    let certificates = Certificates::make(scratch.path());
    let upstream = Upstream::start(|_| Script::create()).await;
    let proxy = Served::start(&with_tls(&config(upstream.address, "", ""), &certificates)).await;
    let reply = exchange_tls(proxy.address, certificates.ca(), &post("/pay", "k", "")).await;
    assert_eq!(reply.unwrap().status(), 201);
    assert!(upstream.requests()[0].contains("x-forwarded-proto: https\r\n"));

    let stream = connect(proxy.address, certificates.ca(), b"h2")
        .await
        .unwrap();
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let (client, connection) = h2::client::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    let mut client = client.ready().await.unwrap();
    let request = http::Request::post("https://test/pay")
        .header("idempotency-key", "k")
        .body(());
    let (response, _) = client.send_request(request.unwrap(), true).unwrap();
    let response = response.await.unwrap();
    assert_eq!(response.status(), 201);
    assert_eq!(response.headers()["idempotent-replayed"], "true");
    assert_eq!(upstream.effects(), 1);
}

/// A peer that sends nothing is no request that could be lost.
#[tokio::test]
async fn handshake_does_not_delay_drain() {
    let scratch = Scratch::new();
    let certificates = Certificates::make(scratch.path());
    let upstream = Upstream::start(|_| Script::create()).await;
    let text = with_tls(&config(upstream.address, "", ""), &certificates);
    let proxy = Served::start(&(text + "\n[drain]\ntimeout = \"20s\"\n")).await;
    let silent = TcpStream::connect(proxy.address).await.unwrap();
    // The connection is accepted before this one.
    let reply = exchange_tls(proxy.address, certificates.ca(), &post("/pay", "k", "")).await;
    assert_eq!(reply.unwrap().status(), 201);
    assert!(proxy.stop().await.unwrap());
    drop(silent);
}

#[tokio::test]
async fn renewed_certificate_is_used_after_reload() {
    let (old_files, new_files) = (Scratch::new(), Scratch::new());
    let old = Certificates::make(old_files.path());
    let new = Certificates::make(new_files.path());
    let upstream = Upstream::start(|_| Script::create()).await;
    let text = config(upstream.address, "", "");
    let scratch = Scratch::new();
    let files = Certificates::make(scratch.path());
    let copy = |from: &Certificates| {
        std::fs::copy(from.certificate(), files.certificate()).unwrap();
        std::fs::copy(from.key(), files.key()).unwrap();
    };
    copy(&old);
    let text = with_tls(&text, &files);
    let proxy = Served::start(&text).await;
    let request = post("/pay", "k", "");
    assert!(
        exchange_tls(proxy.address, old.ca(), &request)
            .await
            .is_ok()
    );
    assert!(
        exchange_tls(proxy.address, new.ca(), &request)
            .await
            .is_err()
    );

    // A key that does not belong to the certificate changes nothing.
    std::fs::copy(new.key(), files.key()).unwrap();
    assert!(proxy.handle.reload(Config::from_toml(&text)).is_err());
    assert!(
        exchange_tls(proxy.address, old.ca(), &request)
            .await
            .is_ok()
    );

    copy(&new);
    proxy.handle.reload(Config::from_toml(&text)).unwrap();
    assert!(
        exchange_tls(proxy.address, old.ca(), &request)
            .await
            .is_err()
    );
    assert!(
        exchange_tls(proxy.address, new.ca(), &request)
            .await
            .unwrap()
            .is_replay()
    );
}

#[tokio::test]
async fn upstream_certificate_is_verified() {
    let (scratch, other) = (Scratch::new(), Scratch::new());
    let certificates = Certificates::make(scratch.path());
    let other = Certificates::make(other.path());
    let upstream = Upstream::start(|_| Script::create()).await;
    let inner = Served::start(&with_tls(&config(upstream.address, "", ""), &certificates)).await;
    for (number, http2) in ["", "http2 = true\n"].into_iter().enumerate() {
        let request = post("/pay", &format!("k{number}"), "");
        for (ca, status) in [(other.ca(), 502), (certificates.ca(), 201)] {
            let lines = format!("{http2}ca_file = \"{}\"", ca.display());
            let text = config(inner.address, &lines, "").replace("http://", "https://");
            let outer = Served::start(&text).await;
            let reply = exchange(outer.address, &request).await;
            assert_eq!(reply.status(), status, "{reply:?}");
            assert_eq!(
                reply.is_problem("upstream-unreachable"),
                status == 502,
                "{reply:?}"
            );
        }
        assert_eq!(upstream.effects(), number + 1);
    }
}
