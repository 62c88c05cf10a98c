//! A bank in a separate process, which can be killed. A POST to `/charge/{ms}` inserts a row into PostgreSQL in a
//! transaction of one of the drivers, and its response comes that many milliseconds later.

use std::{
    collections::HashMap,
    env, process,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::{
    Router,
    extract::{Path, State},
    response::{IntoResponse, Response},
    routing::post,
};
use http::StatusCode;
use other_drivers::{Diesel, Handlers, SeaOrm, Sqlx08};
use tests::created;
use tokio::{
    net::TcpListener,
    time::{sleep, timeout},
};
use tower_idempotency::{IdempotencyKey, IdempotencyLayer, Lease, Ttl};
use tower_idempotency_sql::TransactionError;
use tower_idempotency_sqlx::PostgresStore;

/// `--listen ADDR --store URL --table NAME --lease MILLISECONDS --commit sqlx08|seaorm|diesel`
struct Args(HashMap<String, String>);

impl Args {
    fn get(&self, name: &str) -> &str {
        let value = self.0.get(name);
        value.unwrap_or_else(|| panic!("{name} is needed"))
    }
}

#[tokio::main]
async fn main() {
    let words: Vec<_> = env::args().skip(1).collect();
    let pairs = words.chunks_exact(2);
    let args = Args(pairs.map(|it| (it[0].clone(), it[1].clone())).collect());
    match args.get("--commit") {
        Sqlx08::NAME => serve::<Sqlx08>(&args).await,
        SeaOrm::NAME => serve::<SeaOrm>(&args).await,
        Diesel::NAME => serve::<Diesel>(&args).await,
        other => panic!("expected a driver, found {other}"),
    }
}

struct Bank<D> {
    store: PostgresStore,
    table: String,
    pool: D,
    executions: AtomicU64,
}

async fn serve<D: Handlers>(args: &Args) {
    let (url, table) = (args.get("--store"), args.get("--table"));
    let store = PostgresStore::from_url(url).expect("an URL");
    let store = store.with_table(table).expect("an identifier");
    let lease = args.get("--lease").parse().expect("milliseconds");
    let layer = IdempotencyLayer::new(store.clone()).with_lease_ttl(Ttl::from_millis(lease));
    let bank = Bank {
        store,
        table: table.to_owned(),
        pool: D::pool(url, 8),
        executions: AtomicU64::new(0),
    };
    let app = Router::new()
        .route("/charge/{ms}", post(charge::<D>))
        .layer(layer)
        .with_state(Arc::new(bank));
    let listener = TcpListener::bind(args.get("--listen")).await;
    let listener = listener.expect("a free port");
    let address = listener.local_addr().expect("a bound socket");
    println!("listening on http://{address}");
    axum::serve(listener, app).await.expect("it serves");
}

async fn charge<D: Handlers>(
    State(bank): State<Arc<Bank<D>>>,
    Path(ms): Path<u64>,
    key: IdempotencyKey,
    lease: Lease,
) -> Response {
    let pid = process::id();
    // The number is unique among all processes.
    let n = u64::from(pid) << 24 | bank.executions.fetch_add(1, SeqCst);
    let effect = format!(
        "insert into {}_effects (effect, pid, n) values ('{}', {pid}, {n})",
        bank.table,
        key.as_str()
    );
    let pause = Duration::from_millis(ms);
    let res = ([("x-execution", n.to_string())], created(n)).into_response();
    let charged = async {
        let mut tx = bank.pool.begin(&bank.store, &lease).await?;
        if !D::run(&mut *tx, &effect).await {
            return Ok::<_, TransactionError>(StatusCode::SERVICE_UNAVAILABLE.into_response());
        }
        sleep(pause).await;
        match tx.commit(res).await {
            Ok(res) => Ok(res.into_response()),
            Err(error) => Ok(error.into_output()?.into_response()),
        }
    };
    match timeout(pause + PATIENCE, charged).await {
        Ok(Ok(res)) => res,
        Ok(Err(error)) => failed(&error),
        Err(elapsed) => failed(&elapsed),
    }
}

/// Not recorded: the key is free, or an orphan.
fn failed(error: &dyn std::error::Error) -> Response {
    eprintln!("{error}: {:?}", error.source());
    StatusCode::SERVICE_UNAVAILABLE.into_response()
}

/// The longest time that a handler waits for its database, in addition to the delay in its path.
const PATIENCE: Duration = Duration::from_secs(1);
