//! The cost of gRPC calls that are not protected: calls of tonic over a socket, with and without the layer.
//!
//! Each round runs every variant once, so that other load affects all alike. The result is the median over the rounds. A
//! protected method exists in the layer, and the calls are of another one.
//!
//! ```sh
//! cargo bench -p payments-grpc --bench passing
//! # Instructions, which other load does not change. The difference of two counts leaves out the start.
//! valgrind --tool=callgrind --callgrind-out-file=/dev/null BINARY repeat layer 1000
//! ```

use std::{
    net::SocketAddr,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use payments_grpc::{
    client::connect,
    messages::BalanceRequest,
    payments::{payments_client::PaymentsClient, payments_server::PaymentsServer},
    service::{Accounts, protection},
};
use tokio::{net::TcpListener, runtime::Runtime};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{
    Request,
    service::Routes,
    transport::{Channel, Server},
};
use tower::{
    Service,
    layer::{layer_fn, util::Identity},
};
use tower_idempotency::MemoryStore;

/// The fourth variant repeats the second one. Its ratio shows the error of the measurement. These two and the first one run the
/// same machine code. The last variant has its own copy of it, as the layer has, and does nothing.
const VARIANTS: [&str; 5] = [
    "no layer",
    "empty layer",
    "layer",
    "empty layer 2",
    "empty service",
];

#[derive(Clone)]
struct Empty<S>(S);

impl<S: Service<Req>, Req> Service<Req> for Empty<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, req: Req) -> S::Future {
        self.0.call(req)
    }
}

async fn serve(variant: &str) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("a bound socket");
    let incoming = TcpListenerStream::new(listener);
    let payments = PaymentsServer::new(Accounts::default());
    match variant {
        "no layer" => {
            let router = Server::builder().add_service(payments);
            tokio::spawn(router.serve_with_incoming(incoming));
        }
        "empty layer" | "empty layer 2" => {
            let router = Server::builder()
                .layer(Identity::new())
                .add_service(payments);
            tokio::spawn(router.serve_with_incoming(incoming));
        }
        "empty service" => {
            let router = Server::builder()
                .layer(layer_fn(Empty::<Routes>))
                .add_service(payments);
            tokio::spawn(router.serve_with_incoming(incoming));
        }
        "layer" => {
            let layer = protection(MemoryStore::new()).expect("a valid path");
            let router = Server::builder().layer(layer).add_service(payments);
            tokio::spawn(router.serve_with_incoming(incoming));
        }
        _ => panic!("expected a variant of {VARIANTS:?}, found {variant}"),
    }
    address
}

async fn calls(client: &mut PaymentsClient<Channel>, count: u32) {
    for _ in 0..count {
        let account = "alice".to_owned();
        let res = client.get_balance(Request::new(BalanceRequest { account }));
        assert_eq!(res.await.expect("a balance").get_ref().amount, 100);
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn compare(runtime: &Runtime, rounds: usize, count: u32) {
    let mut clients = VARIANTS.map(|variant| {
        let address = runtime.block_on(serve(variant));
        let _inside = runtime.enter();
        connect(address).expect("a valid address")
    });
    for client in &mut clients {
        runtime.block_on(calls(client, count));
    }
    let mut times = VARIANTS.map(|_| Vec::new());
    for round in 0..rounds {
        // Each round begins with another variant.
        for at in 0..VARIANTS.len() {
            let at = (at + round) % VARIANTS.len();
            let began = Instant::now();
            runtime.block_on(calls(&mut clients[at], count));
            times[at].push(began.elapsed());
        }
    }
    let seconds = |times: &[Duration]| times.iter().map(Duration::as_secs_f64).collect();
    for (variant, of_variant) in VARIANTS.iter().zip(&times) {
        let each = median(seconds(of_variant)) / f64::from(count) * 1e6;
        let ratios = of_variant.iter().zip(&times[1]);
        let ratios = ratios.map(|(time, empty)| time.as_secs_f64() / empty.as_secs_f64());
        let ratio = median(ratios.collect());
        println!("{variant:14} {each:8.2} us, {ratio:.4} of the empty layer");
    }
}

fn main() {
    // One thread, so that the scheduler of the machine moves no task.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let args: Vec<_> = std::env::args().skip(1).collect();
    let args: Vec<_> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["repeat", variant, count] => {
            let count = count.parse().expect("a number of calls");
            runtime.block_on(async {
                let mut client = connect(serve(variant).await).expect("a valid address");
                calls(&mut client, count).await;
            });
        }
        // `cargo test --all-targets` also runs benchmarks, to check that they work, but does not pass `--bench`.
        _ if args.contains(&"--bench") => compare(&runtime, 201, 500),
        _ => compare(&runtime, 1, 1),
    }
}
