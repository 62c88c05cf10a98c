//! grpc-web: covered inside the layer that translates it.

use http::{Request, header::CONTENT_TYPE};
use payments_grpc::payments::payments_server::PaymentsServer;
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Server;
use tonic_web::GrpcWebLayer;

use crate::harness::{PAY, Scripted, frame, layer, send_raw};

// S-895
#[tokio::test]
async fn call_of_grpc_web_is_replayed() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let addr = listener.local_addr().expect("a bound socket");
    let service = Scripted::paying();
    let router = Server::builder()
        .accept_http1(true)
        .layer(GrpcWebLayer::new())
        .layer(layer())
        .add_service(PaymentsServer::new(service.clone()));
    tokio::spawn(router.serve_with_incoming(TcpListenerStream::new(listener)));
    let mut bodies = Vec::new();
    for _ in 0..2 {
        let head = Request::post(format!("http://test{PAY}"))
            .header(CONTENT_TYPE, "application/grpc-web+proto")
            .header("idempotency-key", "k")
            .body(())
            .expect("a valid request");
        let raw = send_raw(addr, head, &[&frame(0, b"\x10\x05")])
            .await
            .expect("a response");
        assert_eq!(raw.headers[CONTENT_TYPE], "application/grpc-web+proto");
        // The last frame has the trailers.
        let trailers = b"grpc-status:0\r\n";
        assert!(raw.body.ends_with(trailers), "{raw:?}");
        bodies.push(raw.body);
    }
    assert_eq!(bodies[0], bodies[1]);
    assert_eq!(service.effects.count(), 1);
}
