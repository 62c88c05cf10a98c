//! Calls through a proxy that cuts connections.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use payments_grpc::client::{connect, pay};
use tests::{HANG_GUARD, few_or, proxy::Proxy};
use tokio::{net::TcpListener, task::JoinSet, time::timeout};
use tonic::{Response, Status};

use crate::harness::{Scripted, key, layer, payment, start};

const CLIENTS: usize = 8;

/// Each client has a connection of its own, and retries as the example says. One execution in ten fails with a code that
/// frees the key before its effect.
// F-887
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_call_has_one_effect_through_cut_connections() {
    let calls = few_or(1_000, 10_000);
    let refused = Arc::new(AtomicUsize::new(0));
    let refusals = Arc::clone(&refused);
    let paid = tests::Effects::default();
    let effects = paid.clone();
    let service = Scripted::new(move |n, _| {
        let (refusals, effects) = (Arc::clone(&refusals), effects.clone());
        async move {
            if n % 10 == 0 {
                refusals.fetch_add(1, Ordering::Relaxed);
                return Err(Status::aborted("try again"));
            }
            tokio::task::yield_now().await;
            let (id, amount) = (effects.happen(), 5);
            Ok(Response::new(payments_grpc::messages::Payment {
                id,
                amount,
            }))
        }
    });
    let layer = layer().with_retry_after(Duration::from_millis(5));
    let (addr, _) = start(layer.clone(), &service).await;
    let proxy = Proxy::start(addr);
    let next = Arc::new(AtomicUsize::new(0));
    let mut clients = JoinSet::new();
    for _ in 0..CLIENTS {
        let (next, address) = (Arc::clone(&next), proxy.address());
        clients.spawn(async move {
            let mut client = connect(address).expect("a valid address");
            let mut ids = Vec::new();
            loop {
                let call = next.fetch_add(1, Ordering::Relaxed);
                if call >= calls {
                    return ids;
                }
                let (key, payment) = (key(&format!("call-{call}")), payment(&call.to_string()));
                let paid = pay(&mut client, &key, &payment).await.expect("paid");
                ids.push(paid.get_ref().id);
            }
        });
    }
    let paying = timeout(HANG_GUARD, clients.join_all());
    let ids = tokio::select! {
        ids = paying => ids,
        never = proxy.cut_at_progress(|| service.effects.count()) => match never {},
    };
    let Ok(ids) = ids else {
        let (paid, in_flight) = (paid.count(), layer.in_flight());
        panic!("a call hangs: {paid} of {calls} paid, {in_flight} in flight");
    };
    let mut ids = ids.concat();
    assert!(layer.drain(Duration::from_secs(30)).await);
    ids.sort_unstable();
    let expected: Vec<_> = (1..=calls as u64).collect();
    assert_eq!(ids, expected, "each call has a payment of its own");
    assert_eq!(paid.count(), calls as u64);
    let connections = proxy.counts().connections;
    assert!(
        connections > CLIENTS as u64 && proxy.lost() > 0,
        "{connections}"
    );
    println!(
        "{calls} calls, {} executions, {} refused, {connections} connections, {} replies lost",
        service.effects.count(),
        refused.load(Ordering::Relaxed),
        proxy.lost(),
    );
}

/// The system accepts the connections, and no byte is read or sent.
#[tokio::test(start_paused = true)]
async fn call_to_unresponsive_server_ends() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("an address");
    let mut client = connect(address).expect("a valid address");
    let (key, payment) = (key("call"), payment("1"));
    let paying = timeout(Duration::from_secs(3_600), pay(&mut client, &key, &payment));
    let paid = paying.await.expect("all attempts end");
    assert!(paid.is_err(), "{paid:?}");
}
