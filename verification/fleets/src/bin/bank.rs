//! A bank in a separate process, which can be killed. A POST to `/charge/{ms}` inserts a row into a database, and its
//! response comes that many milliseconds later. Row and record are in one transaction, of sqlx or of tokio-postgres, or in
//! two.

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
use deadpool_postgres::{Manager, Object, tokio_postgres::NoTls};
use http::StatusCode;
use tests::{
    created,
    database::{TestDatabase, TestDialect, pool_options, sqlite_pool, with_timeouts},
};
use tokio::{
    net::TcpListener,
    time::{sleep, timeout},
};
use tower_idempotency::{IdempotencyKey, IdempotencyLayer, Lease, Ttl};
use tower_idempotency_sqlx::{
    MySqlStore, PostgresStore, SqliteStore, TransactionError, sqlx::Pool,
};
use tower_idempotency_tokio_postgres::begin;

/// `--listen ADDR --store URL --table NAME --lease MILLISECONDS --commit together|apart|tokio-postgres`
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
    let store = args.get("--store").to_owned();
    if args.get("--commit") == "tokio-postgres" {
        serve_with_tokio_postgres(&args, &store).await;
    } else if store.starts_with("postgres:") {
        let pool = with_timeouts(
            pool_options::<tower_idempotency_sqlx::sqlx::Postgres>(),
            PATIENCE,
        )
        .max_connections(CONNECTIONS);
        serve::<PostgresStore>(&args, pool.connect_lazy(&store).expect("an URL")).await;
    } else if store.starts_with("mysql:") {
        let pool = with_timeouts(
            pool_options::<tower_idempotency_sqlx::sqlx::MySql>(),
            PATIENCE,
        )
        .max_connections(CONNECTIONS);
        serve::<MySqlStore>(&args, pool.connect_lazy(&store).expect("an URL")).await;
    } else {
        serve::<SqliteStore>(&args, sqlite_pool(&store)).await;
    }
}

#[derive(Clone)]
struct Bank<S: TestDialect> {
    database: TestDatabase<S>,
    executions: Arc<AtomicU64>,
    together: bool,
}

async fn serve<S: TestDialect>(args: &Args, pool: Pool<S::Database>) {
    let table = args.get("--table").to_owned();
    let store = S::open(args.get("--store"), &table);
    let bank = Bank {
        database: TestDatabase {
            store: store.clone(),
            pool,
            table,
        },
        executions: Arc::default(),
        together: args.get("--commit") == "together",
    };
    let app = Router::new()
        .route("/charge/{ms}", post(charge::<S>))
        .layer(layer(args, store))
        .with_state(Arc::new(bank));
    listen(args, app).await;
}

fn layer<S: TestDialect>(args: &Args, store: S) -> IdempotencyLayer {
    let lease = args.get("--lease").parse().expect("milliseconds");
    IdempotencyLayer::new(store).with_lease_ttl(Ttl::from_millis(lease))
}

async fn listen(args: &Args, app: Router) {
    let listener = TcpListener::bind(args.get("--listen")).await;
    let listener = listener.expect("a free port");
    let address = listener.local_addr().expect("a bound socket");
    println!("listening on http://{address}");
    axum::serve(listener, app).await.expect("it serves");
}

async fn charge<S: TestDialect>(
    State(bank): State<Arc<Bank<S>>>,
    Path(ms): Path<u64>,
    key: IdempotencyKey,
    lease: Lease,
) -> Response {
    let pid = process::id();
    // The number is unique among all processes.
    let n = u64::from(pid) << 24 | bank.executions.fetch_add(1, SeqCst);
    let effect = bank.database.effect(key.as_str(), pid, n);
    let pause = Duration::from_millis(ms);
    let res = ([("x-execution", n.to_string())], created(n)).into_response();
    if bank.together {
        let charged = together(&bank.database, &lease, effect, pause, res);
        match timeout(pause + PATIENCE, charged).await {
            Ok(Ok(res)) => res,
            Ok(Err(error)) => failed(&error),
            Err(elapsed) => failed(&elapsed),
        }
    } else {
        match S::run_alone(&bank.database.pool, effect).await {
            Ok(_) => {
                sleep(pause).await;
                res
            }
            Err(error) => failed(&error),
        }
    }
}

async fn together<S: TestDialect>(
    database: &TestDatabase<S>,
    lease: &Lease,
    effect: String,
    pause: Duration,
    res: Response,
) -> Result<Response, TransactionError> {
    let mut tx = database.begin(lease).await?;
    S::run(&mut tx, effect).await.expect("the effect");
    sleep(pause).await;
    match tx.commit(res).await {
        Ok(res) => Ok(res.into_response()),
        Err(error) => Ok(error.into_output()?.into_response()),
    }
}

/// The store and its tables, the handlers' connections, and the number of executions.
type BankState = (
    TestDatabase<PostgresStore>,
    deadpool_postgres::Pool,
    AtomicU64,
);

/// Like `serve`, with handlers whose transactions are those of tokio-postgres. The store keeps its connections of sqlx.
async fn serve_with_tokio_postgres(args: &Args, url: &str) {
    let table = args.get("--table").to_owned();
    let store = PostgresStore::open(url, &table);
    let lazy = pool_options::<tower_idempotency_sqlx::sqlx::Postgres>()
        .connect_lazy(url)
        .expect("an URL");
    let database = TestDatabase {
        store: store.clone(),
        pool: lazy,
        table,
    };
    let manager = Manager::new(url.parse().expect("an URL"), NoTls);
    let clients = deadpool_postgres::Pool::builder(manager).max_size(CONNECTIONS as usize);
    let clients = clients.build().expect("a pool");
    let executions = AtomicU64::new(0);
    let state = Arc::new((database, clients, executions));
    let charge = async |State(state): State<Arc<BankState>>,
                        Path(ms): Path<u64>,
                        key: IdempotencyKey,
                        lease: Lease| {
        let (database, clients, executions) = &*state;
        let pid = process::id();
        let n = u64::from(pid) << 24 | executions.fetch_add(1, SeqCst);
        let effect = database.effect(key.as_str(), pid, n);
        let pause = Duration::from_millis(ms);
        let res = ([("x-execution", n.to_string())], created(n)).into_response();
        let charged = async {
            let mut client: Object = clients.get().await.map_err(|error| failed(&error))?;
            let tx = begin(&database.store, &lease, &mut client).await;
            let tx = tx.map_err(|error| failed(&error))?;
            let effect = tx.batch_execute(&effect).await;
            effect.map_err(|error| failed(&error))?;
            sleep(pause).await;
            match tx.commit(res).await {
                Ok(res) => Ok(res.into_response()),
                Err(error) => match error.into_output() {
                    Ok(res) => Ok(res.into_response()),
                    Err(error) => Err(failed(&error)),
                },
            }
        };
        match timeout(pause + PATIENCE, charged).await {
            Ok(Ok(res) | Err(res)) => res,
            Err(elapsed) => failed(&elapsed),
        }
    };
    let app = Router::new()
        .route("/charge/{ms}", post(charge))
        .layer(layer(args, store))
        .with_state(state);
    listen(args, app).await;
}

/// The layer does not record this response: the key is free, or an orphan.
fn failed(error: &dyn std::error::Error) -> Response {
    eprintln!("{error}: {:?}", error.source());
    StatusCode::SERVICE_UNAVAILABLE.into_response()
}

const CONNECTIONS: u32 = 8;
/// The longest time that a handler waits for its database, in addition to the delay in its path.
const PATIENCE: Duration = Duration::from_secs(1);
