//! Calls through a proxy that cuts connections.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use payments_grpc::client::{connect, pay};
use tests::{
    few_or,
    proxy::{Mode, Proxy, Then},
};
use tokio::time::sleep;
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
    let clients: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let (next, address) = (Arc::clone(&next), proxy.address());
            tokio::spawn(async move {
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
            })
        })
        .collect();
    let mut cuts = 0;
    while clients.iter().any(|client| !client.is_finished()) {
        sleep(Duration::from_millis(15)).await;
        let mode = match cuts % 3 {
            0 => Mode::LoseReplies(Then::Cut),
            _ => Mode::Cut,
        };
        proxy.set(mode);
        sleep(Duration::from_millis(3)).await;
        proxy.set(Mode::Pass);
        cuts += 1;
    }
    let mut ids = Vec::new();
    for client in clients {
        ids.extend(client.await.expect("no panic"));
    }
    assert!(layer.drain(Duration::from_secs(30)).await);
    ids.sort_unstable();
    let expected: Vec<_> = (1..=calls as u64).collect();
    assert_eq!(ids, expected, "each call has a payment of its own");
    assert_eq!(paid.count(), calls as u64);
    let connections = proxy.counts().connections;
    assert!(
        connections > CLIENTS as u64 && proxy.lost() > 0,
        "{connections} {cuts}"
    );
    println!(
        "{calls} calls, {} executions, {} refused, {cuts} cuts, {connections} connections, {} replies lost",
        service.effects.count(),
        refused.load(Ordering::Relaxed),
        proxy.lost(),
    );
}
