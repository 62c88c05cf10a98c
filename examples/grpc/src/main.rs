//! Serves payments, and pays twice under one key: `cargo run -p payments-grpc`.

use payments_grpc::{
    client::{connect, pay, with_key},
    messages::{BalanceRequest, PayRequest},
    service::{Accounts, protection, serve},
};
use tonic::Request;
use tower_idempotency::MemoryStore;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    tracing_subscriber::fmt().init();
    let addr = serve(protection(MemoryStore::new())?, Accounts::default()).await?;
    let mut client = connect(addr)?;
    let account = "alice".to_owned();
    let payment = PayRequest {
        account: account.clone(),
        amount: 30,
    };

    let key = "8e03978e-40d5".parse()?;
    let first = pay(&mut client, &key, &payment).await?;
    println!("first:  payment {}", first.get_ref().id);
    let retry = client.pay(with_key(payment.clone(), &key)).await?;
    let is_replay = retry.metadata().contains_key("idempotent-replayed");
    println!(
        "retry:  payment {}, replay: {is_replay}",
        retry.get_ref().id
    );

    let without_key = client.pay(Request::new(payment)).await;
    let status = without_key.expect_err("payments need a key");
    println!("no key: {:?}: {}", status.code(), status.message());
    let balance = client.get_balance(Request::new(BalanceRequest { account }));
    println!("money:  {} cents", balance.await?.get_ref().amount);
    Ok(())
}
