//! The service: accounts in memory.

use std::{
    collections::HashMap,
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
};

use tokio::net::TcpListener;
use tokio_stream::{Stream, StreamExt, wrappers::TcpListenerStream};
use tonic::{Request, Response, Status, Streaming, transport::Server};
use tower_idempotency::{ConfigError, GrpcMethods, IdempotencyLayer, MissingKey, Store};

use crate::{
    messages::{Balance, BalanceRequest, PayRequest, Payment},
    payments::payments_server::{Payments, PaymentsServer},
};

/// The accounts. Each account begins with 100 cents.
#[derive(Clone, Debug, Default)]
pub struct Accounts(Arc<Mutex<Ledger>>);

#[derive(Debug, Default)]
struct Ledger {
    paid: HashMap<String, u64>,
    payments: Vec<(String, Payment)>,
}

const INITIAL: u64 = 100;

impl Accounts {
    fn with_ledger<T>(&self, change: impl FnOnce(&mut Ledger) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn pay(&self, req: &PayRequest) -> Result<Payment, Status> {
        self.with_ledger(|ledger| {
            let paid = ledger.paid.get(&req.account).copied().unwrap_or(0);
            // The client chooses the amount, so the sum may overflow.
            let total = paid.checked_add(req.amount);
            let Some(total) = total.filter(|total| *total <= INITIAL) else {
                // An outcome: a retry with the same key gets it again.
                return Err(Status::failed_precondition("not enough money"));
            };
            ledger.paid.insert(req.account.clone(), total);
            let id = ledger.payments.len() as u64 + 1;
            let amount = req.amount;
            let payment = Payment { id, amount };
            ledger.payments.push((req.account.clone(), payment));
            Ok(payment)
        })
    }

    fn payments_of(&self, account: &str) -> Vec<Payment> {
        self.with_ledger(|ledger| {
            let of_account = ledger.payments.iter().filter(|(name, _)| name == account);
            of_account.map(|(_, payment)| *payment).collect()
        })
    }
}

type PaymentStream = Pin<Box<dyn Stream<Item = Result<Payment, Status>> + Send>>;

#[tonic::async_trait]
impl Payments for Accounts {
    async fn pay(&self, req: Request<PayRequest>) -> Result<Response<Payment>, Status> {
        Accounts::pay(self, req.get_ref()).map(Response::new)
    }

    async fn get_balance(&self, req: Request<BalanceRequest>) -> Result<Response<Balance>, Status> {
        let payments = self.payments_of(&req.get_ref().account);
        let paid: u64 = payments.iter().map(|payment| payment.amount).sum();
        let amount = INITIAL - paid;
        Ok(Response::new(Balance { amount }))
    }

    type WatchStream = PaymentStream;

    async fn watch(&self, req: Request<BalanceRequest>) -> Result<Response<PaymentStream>, Status> {
        let payments = self.payments_of(&req.get_ref().account);
        let payments = tokio_stream::iter(payments.into_iter().map(Ok));
        Ok(Response::new(Box::pin(payments)))
    }

    type PayAllStream = PaymentStream;

    async fn pay_all(
        &self,
        req: Request<Streaming<PayRequest>>,
    ) -> Result<Response<PaymentStream>, Status> {
        let accounts = self.clone();
        let payments = req.into_inner().map(move |req| accounts.pay(&req?));
        Ok(Response::new(Box::pin(payments)))
    }
}

/// Returns the layer of the service: payments need a key, and every other method passes through.
///
/// # Errors
///
/// None: the path of the method is valid.
pub fn protection(store: impl Store) -> Result<IdempotencyLayer, ConfigError> {
    let methods = GrpcMethods::only(["/payments.v1.Payments/Pay"])?;
    let layer = IdempotencyLayer::new(store).with_missing_key(MissingKey::Reject);
    Ok(layer.with_grpc(methods))
}

/// Serves `service` behind `layer` on a free port of this machine, in a task.
///
/// # Errors
///
/// Returns an error if there is no free port.
pub async fn serve(
    layer: IdempotencyLayer,
    service: impl Payments,
) -> Result<SocketAddr, Box<dyn std::error::Error>> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let addr = listener.local_addr()?;
    // A deadline of the client (`grpc-timeout`) is applied outside of the layer: the handler continues, and a retry gets its
    // response.
    let router = Server::builder()
        .layer(layer)
        .add_service(PaymentsServer::new(service));
    tokio::spawn(router.serve_with_incoming(TcpListenerStream::new(listener)));
    Ok(addr)
}
