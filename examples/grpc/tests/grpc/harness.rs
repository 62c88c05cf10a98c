//! A server whose handler follows a script, and raw calls of it.

use std::{future::Future, net::SocketAddr, pin::Pin, sync::Arc, time::Duration};

use bytes::{Bytes, BytesMut};
use h2::client;
use http::{HeaderMap, Request as HttpRequest, StatusCode};
use payments_grpc::{
    client::connect,
    messages::{Balance, BalanceRequest, PayRequest, Payment},
    payments::{payments_client::PaymentsClient, payments_server::Payments},
    service::{protection, serve},
};
use tests::Effects;
use tokio::{net::TcpStream, time::timeout};
use tokio_stream::{Stream, StreamExt};
use tonic::{
    Request, Response, Status, Streaming,
    metadata::{Ascii, MetadataValue},
    transport::Channel,
};
use tower_idempotency::{IdempotencyLayer, MemoryStore};

pub(crate) const PAY: &str = "/payments.v1.Payments/Pay";

pub(crate) type Paid = Result<Response<Payment>, Status>;
type Pay =
    dyn Fn(u64, Request<PayRequest>) -> Pin<Box<dyn Future<Output = Paid> + Send>> + Send + Sync;
type PaymentStream = Pin<Box<dyn Stream<Item = Result<Payment, Status>> + Send>>;

/// A service whose unary method follows a script. The script gets the number of the effect.
#[derive(Clone)]
pub(crate) struct Scripted {
    pub(crate) effects: Effects,
    pay: Arc<Pay>,
}

impl Scripted {
    pub(crate) fn new<F>(
        pay: impl Fn(u64, Request<PayRequest>) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Paid> + Send + 'static,
    {
        Self {
            effects: Effects::default(),
            pay: Arc::new(move |n, req| Box::pin(pay(n, req))),
        }
    }

    /// Creates a service that pays, with metadata of its own.
    pub(crate) fn paying() -> Self {
        Self::new(async |id, req| {
            let amount = req.get_ref().amount;
            let mut res = Response::new(Payment { id, amount });
            let metadata = res.metadata_mut();
            metadata.insert("x-receipt", format!("receipt {id}").parse().expect("text"));
            metadata.append("x-receipt", "second".parse().expect("text"));
            Ok(res)
        })
    }
}

#[tonic::async_trait]
impl Payments for Scripted {
    async fn pay(&self, req: Request<PayRequest>) -> Paid {
        (self.pay)(self.effects.happen(), req).await
    }

    async fn get_balance(&self, _: Request<BalanceRequest>) -> Result<Response<Balance>, Status> {
        let amount = self.effects.happen();
        Ok(Response::new(Balance { amount }))
    }

    type WatchStream = PaymentStream;

    async fn watch(&self, _: Request<BalanceRequest>) -> Result<Response<PaymentStream>, Status> {
        let amount = self.effects.happen();
        let payments = (1..=3).map(move |id| Ok(Payment { id, amount }));
        Ok(Response::new(Box::pin(tokio_stream::iter(payments))))
    }

    type PayAllStream = PaymentStream;

    async fn pay_all(
        &self,
        req: Request<Streaming<PayRequest>>,
    ) -> Result<Response<PaymentStream>, Status> {
        let effects = self.effects.clone();
        let payments = req.into_inner().map(move |req| {
            let (id, amount) = (effects.happen(), req?.amount);
            Ok(Payment { id, amount })
        });
        Ok(Response::new(Box::pin(payments)))
    }
}

/// Returns the layer of the example.
pub(crate) fn layer() -> IdempotencyLayer {
    protection(MemoryStore::new()).expect("valid paths")
}

/// Serves and connects.
pub(crate) async fn start(
    layer: IdempotencyLayer,
    service: &Scripted,
) -> (SocketAddr, PaymentsClient<Channel>) {
    let addr = serve(layer, service.clone()).await.expect("a free port");
    (addr, connect(addr).expect("a valid address"))
}

pub(crate) fn key(key: &str) -> MetadataValue<Ascii> {
    key.parse().expect("a key of ASCII")
}

pub(crate) fn payment(account: &str) -> PayRequest {
    PayRequest {
        account: account.to_owned(),
        amount: 5,
    }
}

/// Encodes one message with its prefix.
pub(crate) fn frame(flag: u8, content: &[u8]) -> Vec<u8> {
    let length = u32::try_from(content.len()).expect("a short message");
    [&[flag], &length.to_be_bytes()[..], content].concat()
}

/// A response on the wire.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Raw {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) trailers: Option<HeaderMap>,
}

impl Raw {
    /// Returns the code, in the trailers or else in the headers.
    pub(crate) fn code(&self) -> Option<i32> {
        let trailers = self.trailers.as_ref();
        let in_trailers = trailers.and_then(|trailers| trailers.get("grpc-status"));
        let code = in_trailers.or_else(|| self.headers.get("grpc-status"))?;
        Some(code.to_str().expect("a number").parse().expect("a number"))
    }

    /// Removes the marker of replays. Returns `true` if there is one.
    pub(crate) fn take_marker(&mut self) -> bool {
        self.headers.remove("idempotent-replayed").is_some()
    }
}

/// Creates the head of a call with a key.
pub(crate) fn call(path: &str, key: &str) -> HttpRequest<()> {
    HttpRequest::post(format!("http://test{path}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .header("idempotency-key", key)
        .body(())
        .expect("a valid request")
}

/// Sends a request whose body consists of these chunks. Returns `None` if the server resets the stream.
pub(crate) async fn send_raw(
    addr: SocketAddr,
    head: HttpRequest<()>,
    chunks: &[&[u8]],
) -> Option<Raw> {
    let sent = async {
        let stream = TcpStream::connect(addr).await.expect("a server");
        let (client, connection) = client::handshake(stream).await.expect("HTTP/2");
        let connection = tokio::spawn(connection);
        let mut client = client.ready().await.expect("a connection");
        let (res, mut body) = client.send_request(head, false).expect("a stream");
        for (at, chunk) in chunks.iter().enumerate() {
            let is_last = at + 1 == chunks.len();
            // The server may have responded already.
            if body
                .send_data(Bytes::copy_from_slice(chunk), is_last)
                .is_err()
            {
                break;
            }
            tokio::task::yield_now().await;
        }
        let (head, mut body) = res.await.ok()?.into_parts();
        let mut data = BytesMut::new();
        while let Some(chunk) = body.data().await {
            let chunk = chunk.ok()?;
            let _ = body.flow_control().release_capacity(chunk.len());
            data.extend_from_slice(&chunk);
        }
        let trailers = body.trailers().await.ok()?;
        connection.abort();
        Some(Raw {
            status: head.status,
            headers: head.headers,
            body: data.freeze(),
            trailers,
        })
    };
    timeout(Duration::from_secs(30), sent)
        .await
        .expect("a response")
}
