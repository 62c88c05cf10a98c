//! Three applications to which the layer was added by a diff, over sockets.

use std::{collections::BTreeSet, error::Error, net::SocketAddr, sync::Arc};

use http::StatusCode;
use other_drivers::{Diesel, Handlers, SeaOrm, Sqlx08, adopted};
use tests::{
    TestResponse,
    database::TestDialect,
    proxy::{ConnectionEnd, Fault, Proxy},
    servers::postgres,
    wire::H1,
};
use tokio::net::TcpListener;
use tower_idempotency_sqlx::{PostgresStore, sqlx::PgPool};

/// An application, in each of its steps.
trait App {
    /// The driver, which knows how a commit looks on the wire.
    type Driver: Handlers;

    /// The path of the route that creates.
    const PATH: &str;
    /// The table of the effects, which has a column `name`.
    const TABLE: &str;
    /// The other table, into which the transaction inserts too.
    const OTHER: &str;
    /// The diffs of the steps.
    const DIFFS: [&str; 2];

    /// Serves a step of the application.
    fn serve(
        step: Step,
        listener: TcpListener,
        url: &str,
    ) -> impl Future<Output = Result<(), Box<dyn Error>>>;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Plain,
    Layer,
    ExactlyOnce,
}

macro_rules! app {
    ($app:ident, $driver:ty, $path:literal, $table:literal, $other:literal, $file:literal, $plain:ident, $layer:ident, $exactly_once:ident) => {
        struct $app;

        impl App for $app {
            type Driver = $driver;
            const PATH: &str = $path;
            const TABLE: &str = $table;
            const OTHER: &str = $other;
            const DIFFS: [&str; 2] = [
                include_str!(concat!("../../adopted/", $file, ".layer.diff")),
                include_str!(concat!("../../adopted/", $file, ".exactly-once.diff")),
            ];

            async fn serve(
                step: Step,
                listener: TcpListener,
                url: &str,
            ) -> Result<(), Box<dyn Error>> {
                match step {
                    Step::Plain => adopted::$plain::run(listener, url).await,
                    Step::Layer => adopted::$layer::run(listener, url).await,
                    Step::ExactlyOnce => adopted::$exactly_once::run(listener, url).await,
                }
            }
        }
    };
}

app!(
    Newsletter,
    Sqlx08,
    "/subscriptions",
    "subscribers",
    "tokens",
    "newsletter",
    newsletter,
    newsletter_layer,
    newsletter_exactly_once
);
app!(
    Users,
    Diesel,
    "/user/create",
    "users",
    "welcomes",
    "users",
    users,
    users_layer,
    users_exactly_once
);
app!(
    Posts,
    SeaOrm,
    "/posts",
    "posts",
    "links",
    "posts",
    posts,
    posts_layer,
    posts_exactly_once
);

/// Creates the tables of all applications. Both rows of a request are in one transaction.
const TABLES: &str = "
    create table subscribers (id serial primary key, name text not null);
    create table tokens (token uuid primary key default gen_random_uuid(), subscriber integer not null);
    create table users (id serial primary key, name text not null);
    create table welcomes (id serial primary key, user_id integer not null);
    create table posts (id serial primary key, name text not null);
    create table links (id serial primary key, post_id integer not null);";

/// An application that runs on a database of its own, behind a proxy.
struct Running {
    addr: SocketAddr,
    path: &'static str,
    pool: PgPool,
    proxy: Arc<Proxy>,
    tables: [&'static str; 2],
}

impl Running {
    async fn start<A: App>(step: Step, test: &str) -> Self {
        let database = format!("{}_{test}_{step:?}", A::TABLE).to_lowercase();
        let server = postgres::shared();
        let admin = PgPool::connect_lazy(&server.url()).expect("an URL");
        run(&admin, &format!("create database {database}")).await;
        let url = |addr| format!("postgres://app@{addr}/{database}");
        let pool = PgPool::connect_lazy(&url(server.address())).expect("an URL");
        run(&pool, TABLES).await;
        let proxy = Arc::new(Proxy::start(server.address()));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("a bound socket");
        let url = url(proxy.address());
        // The error of an application is not `Send`, so the application has a thread of its own.
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Runtime::new().expect("a runtime");
            let served = runtime.block_on(A::serve(step, listener, &url));
            served.expect("the application starts");
        });
        Self {
            addr,
            path: A::PATH,
            pool,
            proxy,
            tables: [A::TABLE, A::OTHER],
        }
    }

    /// Sends a request under a key, or without one.
    async fn create(&self, key: Option<&str>) -> TestResponse {
        let body = r#"{"name":"Ada"}"#;
        let key = key.map_or(String::new(), |key| format!("idempotency-key: {key}\r\n"));
        let mut client = H1::connect(self.addr).await;
        let head = format!(
            "POST {} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n{key}content-length: {}\r\n\r\n",
            self.path,
            body.len()
        );
        client.send(head + body).await;
        client.response().await.expect("a response")
    }

    /// Returns the numbers of rows in both tables.
    async fn rows(&self) -> [usize; 2] {
        let [one, other] = self.tables;
        [self.count(one).await, self.count(other).await]
    }

    async fn count(&self, table: &str) -> usize {
        let rows = format!("select 'row', 0::bigint, 0::bigint from {table}");
        <PostgresStore as TestDialect>::rows(&self.pool, rows)
            .await
            .len()
    }

    /// Makes the database refuse, at the commit, a second row of the same name.
    async fn defer_constraint(&self) {
        let table = self.tables[0];
        let sql = format!(
            "alter table {table} add constraint one_name unique (name) deferrable initially deferred;
             insert into {table} (name) values ('Ada')"
        );
        run(&self.pool, &sql).await;
    }

    /// Removes the mark of each transaction in its second statement, as an end of the transaction does.
    async fn end_transactions(&self) {
        let sql = format!(
            "create function unmark() returns trigger language plpgsql as $$ begin
                 perform set_config('tower_idempotency.transaction', '', true);
                 return new;
             end $$;
             create trigger unmark before insert on {} for each row execute function unmark()",
            self.tables[1]
        );
        run(&self.pool, &sql).await;
    }

    async fn assert_replayed(&self, first: &TestResponse) {
        assert_eq!(first.status, StatusCode::CREATED, "{first:?}");
        for _ in 0..2 {
            let retry = self.create(Some("k")).await;
            assert!(retry.is_replay(), "{retry:?}");
            assert_eq!((retry.status, &retry.body), (first.status, &first.body));
        }
        assert_eq!(self.rows().await, [1, 1]);
    }
}

async fn run(pool: &PgPool, sql: &str) {
    let ran = <PostgresStore as TestDialect>::run_alone(pool, sql.to_owned()).await;
    ran.expect("it works");
}

/// Without the layer, a retry is another row.
async fn plain_retry_has_another_effect<A: App>() {
    let running = Running::start::<A>(Step::Plain, "retry").await;
    for rows in 1..=2 {
        let response = running.create(Some("k")).await;
        assert_eq!(response.status, StatusCode::CREATED, "{response:?}");
        assert_eq!(running.rows().await, [rows, rows]);
    }
}

async fn retries_have_one_effect<A: App>() {
    for step in [Step::Layer, Step::ExactlyOnce] {
        let running = Running::start::<A>(step, "retries").await;
        let first = running.create(Some("k")).await;
        assert!(!first.is_replay());
        running.assert_replayed(&first).await;
    }
}

async fn keyless_request_needs_no_key_until_required<A: App>() {
    let running = Running::start::<A>(Step::Layer, "keyless").await;
    assert_eq!(running.create(None).await.status, StatusCode::CREATED);
    let running = Running::start::<A>(Step::ExactlyOnce, "keyless").await;
    let refused = running.create(None).await;
    assert_eq!(refused.status, StatusCode::BAD_REQUEST, "{refused:?}");
    assert_eq!(running.rows().await, [0, 0]);
}

/// The handler has made its success when the database refuses the commit.
async fn refused_commit_is_no_success<A: App>() {
    for step in [Step::Layer, Step::ExactlyOnce] {
        let running = Running::start::<A>(step, "refused").await;
        running.defer_constraint().await;
        for _ in 0..2 {
            let refused = running.create(Some("k")).await;
            let expected = match step {
                Step::ExactlyOnce => StatusCode::SERVICE_UNAVAILABLE,
                Step::Plain | Step::Layer => StatusCode::INTERNAL_SERVER_ERROR,
            };
            assert_eq!(refused.status, expected, "{refused:?}");
            assert!(!refused.is_replay(), "{refused:?}");
            assert_eq!(running.rows().await, [1, 0], "the row that was there");
        }
        run(&running.pool, &format!("delete from {}", A::TABLE)).await;
        let first = running.create(Some("k")).await;
        assert!(!first.is_replay(), "{first:?}");
        running.assert_replayed(&first).await;
    }
}

/// The commit arrives, and its reply does not: the client gets the committed response.
async fn lost_commit_reply_is_no_second_effect<A: App>() {
    let running = Running::start::<A>(Step::ExactlyOnce, "lost_reply").await;
    running
        .proxy
        .once(Fault::reply_to(A::Driver::COMMIT), ConnectionEnd::Cut);
    let first = running.create(Some("k")).await;
    assert_eq!(running.proxy.injected_faults(), 1, "the commit was seen");
    running.assert_replayed(&first).await;
}

/// The layer alone cannot know that the commit of the handler succeeded.
async fn lost_reply_with_layer_alone_repeats<A: App>() {
    let running = Running::start::<A>(Step::Layer, "repeats").await;
    running
        .proxy
        .once(Fault::reply_to("COMMIT\0"), ConnectionEnd::Cut);
    let lost = running.create(Some("k")).await;
    assert_eq!(running.proxy.injected_faults(), 1, "the commit was seen");
    assert!(lost.status.is_server_error(), "{lost:?}");
    assert_eq!(running.create(Some("k")).await.status, StatusCode::CREATED);
    assert_eq!(running.rows().await, [2, 2]);
}

/// The commit does not arrive: nothing is committed, and the retry executes.
async fn lost_commit_is_no_success<A: App>() {
    let running = Running::start::<A>(Step::ExactlyOnce, "lost").await;
    running
        .proxy
        .once(Fault::request(A::Driver::COMMIT), ConnectionEnd::Cut);
    let refused = running.create(Some("k")).await;
    assert_eq!(running.proxy.injected_faults(), 1, "the commit was seen");
    assert!(refused.status.is_server_error(), "{refused:?}");
    assert_eq!(running.rows().await, [0, 0]);
    let first = running.create(Some("k")).await;
    assert!(!first.is_replay(), "{first:?}");
    running.assert_replayed(&first).await;
}

/// Statements after the end of a transaction are committed one by one. A retry would repeat them.
async fn ended_transaction_needs_operator<A: App>() {
    let running = Running::start::<A>(Step::ExactlyOnce, "ended").await;
    running.end_transactions().await;
    let ended = running.create(Some("k")).await;
    assert_eq!(ended.status, StatusCode::INTERNAL_SERVER_ERROR, "{ended:?}");
    let sql = format!("drop trigger unmark on {}", A::OTHER);
    run(&running.pool, &sql).await;
    let retry = running.create(Some("k")).await;
    assert_eq!(retry.status, StatusCode::CONFLICT, "{retry:?}");
    assert_eq!(retry.code(), "outcome-unknown");
    assert!(retry.text().contains("transaction-ended"), "{retry:?}");
    assert_eq!(running.rows().await, [0, 0]);
}

/// Counts the lines of source that were added or replaced, from the application without the layer.
async fn changed_lines_are_few<A: App>() {
    let [layer, exactly_once] = A::DIFFS.map(|diff| {
        let body = diff.lines().skip(2);
        let of = |sign| {
            let lines = body.clone().filter_map(move |line| line.strip_prefix(sign));
            lines.collect::<Vec<_>>()
        };
        (of('+'), of('-'))
    });
    assert_eq!(layer.1, Vec::<&str>::new(), "the layer replaces no line");
    assert!(layer.0.len() <= 8, "{} lines", layer.0.len());
    // A line of the first step that the second one replaces is one line.
    let replaced = layer.0.iter().filter(|line| exactly_once.1.contains(line));
    let changed = layer.0.len() + exactly_once.0.len() - replaced.count();
    assert!(changed <= 15, "{changed} lines");
    // `Cargo.toml` has one more line for each crate.
    let all = [layer.0, exactly_once.0].concat().join("\n");
    let words = all.split(|c: char| !c.is_alphanumeric() && c != '_');
    let crates: BTreeSet<_> = words
        .filter(|it| it.starts_with("tower_idempotency"))
        .collect();
    assert_eq!(crates.len(), 3, "{crates:?}");
    println!("{}: {changed} lines, {crates:?}", A::TABLE);
}

macro_rules! adopted {
    ($($module:ident: $app:ident,)*) => { $(
        mod $module {
            use super::$app;

            adopted!(@tests $app:
                plain_retry_has_another_effect,
                retries_have_one_effect,
                keyless_request_needs_no_key_until_required,
                refused_commit_is_no_success,
                lost_commit_reply_is_no_second_effect,
                lost_reply_with_layer_alone_repeats,
                lost_commit_is_no_success,
                ended_transaction_needs_operator,
                changed_lines_are_few,
            );
        }
    )* };
    (@tests $app:ident: $($test:ident,)*) => { $(
        #[tokio::test(flavor = "multi_thread")]
        async fn $test() {
            super::$test::<$app>().await;
        }
    )* };
}

adopted! {
    newsletter: Newsletter,
    users: Users,
    posts: Posts,
}
