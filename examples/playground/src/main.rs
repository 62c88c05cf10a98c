//! A server that shows every behaviour of `tower-idempotency`: run it, and try the lines it prints.

use std::{
    io::{self, Write},
    process::ExitCode,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use axum::serve::ListenerExt;
use clap::Parser;
use tokio::{net::TcpListener, sync::Notify, time::timeout};
use tower_idempotency::IdempotencyLayer;
use tracing_subscriber::{EnvFilter, filter::LevelFilter};

use self::{args::Args, effects::Effects};

mod args;
#[cfg(feature = "dynamodb")]
mod dynamodb;
mod effects;
mod routes;
mod sql;

#[tokio::main]
async fn main() -> ExitCode {
    let quiet = EnvFilter::builder().with_default_directive(LevelFilter::WARN.into());
    tracing_subscriber::fmt()
        .with_env_filter(quiet.from_env_lossy())
        .with_writer(io::stderr)
        .init();
    let args = Args::parse();
    let layer = match args.layer().await {
        Ok(layer) => layer,
        Err(sentence) => {
            eprintln!("error: {sentence}");
            return ExitCode::from(2);
        }
    };
    match serve(&args, layer).await {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Serves until it is asked to stop, and says whether everything that had begun has ended.
async fn serve(args: &Args, layer: IdempotencyLayer) -> io::Result<bool> {
    let effects = match &args.effects {
        Some(path) => Effects::in_file(path)
            .map_err(|error| because(&format!("cannot open {}", path.display()), &error))?,
        None => Effects::default(),
    };
    // Before anybody is told that we are ready: a signal that nobody listens for ends the process at once.
    let asked_to_stop = stop_signal()?;
    let app = routes::app(layer.clone(), Arc::new(effects));
    let listener = TcpListener::bind(&args.listen)
        .await
        .map_err(|error| because(&format!("cannot listen on {}", args.listen), &error))?;
    let url = format!("http://{}", listener.local_addr()?);

    let stop = Arc::new(Notify::new());
    let stopped = Arc::clone(&stop);
    // Chunks leave as they come, and do not wait for the client to confirm the last one.
    let listener = listener.tap_io(|stream| {
        let _ = stream.set_nodelay(true);
    });
    let server = axum::serve(listener, app)
        .with_graceful_shutdown(async move { stopped.notified().await })
        .into_future();
    let server = tokio::spawn(server);
    writeln!(io::stdout(), "listening on {url}")?;
    let lines = lines_to_try(&url, start(), args.another_request());
    eprint!("{lines}");

    asked_to_stop.await;
    stop.notify_one();
    eprintln!("stopping; what has begun may take {:?} to end", GRACE * 2);
    let closed = timeout(GRACE, server).await.is_ok();
    // The server knows nothing of executions whose clients have left.
    let ended = layer.drain(GRACE).await;
    eprintln!("{}", stopped_how(closed, ended, layer.in_flight()));
    Ok(closed && ended)
}

/// Listens for SIGTERM and ctrl-c from now on; the future ends with the first of them.
#[cfg(unix)]
fn stop_signal() -> io::Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

#[cfg(not(unix))]
fn stop_signal() -> io::Result<impl Future<Output = ()>> {
    let mut interrupt = tokio::signal::windows::ctrl_c()?;
    Ok(async move {
        interrupt.recv().await;
    })
}

fn because(what: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{what}: {error}"))
}

fn stopped_how(closed: bool, ended: bool, left: usize) -> String {
    match (closed, ended) {
        (true, true) => "stopped; everything that had begun has ended".to_owned(),
        (false, true) => "stopped, though connections are still open".to_owned(),
        (true, false) => format!("stopped; executions still under way: {left}"),
        (false, false) => format!(
            "stopped, though connections are still open; executions still under way: {left}"
        ),
    }
}

/// Not that of another start: a store may know its keys.
fn start() -> u128 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| now.as_millis() & 0xff_ffff)
}

/// The keys are quoted, which every preset takes.
fn lines_to_try(url: &str, start: u128, another_request: &str) -> String {
    format!(
        "\
try:
  curl -i -d tea    -H 'Idempotency-Key: \"order-{start:x}\"' {url}/orders   # is executed
  curl -i -d tea    -H 'Idempotency-Key: \"order-{start:x}\"' {url}/orders   # again: the same answer, replayed
  curl -i -d coffee -H 'Idempotency-Key: \"order-{start:x}\"' {url}/orders   # another request under the key: {another_request}
  curl -i -m 1 -d x -H 'Idempotency-Key: \"slow-{start:x}\"' {url}/slow/3000 # give up; then send it again, now and later
  curl -i -d x      -H 'Idempotency-Key: \"half-{start:x}\"' {url}/attention # half done: again, and it is refused with a code
  curl -s {url}/executions                                              # what was executed
"
    )
}

const GRACE: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use axum::{body::Body, http::Request};
    use tower::ServiceExt;

    use super::*;

    #[test]
    fn what_is_said_to_be_left_is_what_is_left() {
        let said = |closed, ended| stopped_how(closed, ended, 3);
        assert!(said(true, true).contains("everything"));
        for (closed, ended) in [(true, false), (false, true), (false, false)] {
            let said = said(closed, ended);
            assert_eq!(said.contains("connections"), !closed, "{said}");
            assert_eq!(said.contains("under way: 3"), !ended, "{said}");
        }
    }

    #[tokio::test]
    async fn the_orders_to_try_do_what_is_said_under_each_preset() {
        for (preset, third) in [
            ("recommended", "422"),
            ("ietf", "422"),
            ("stripe", "400"),
            ("idempo", "201"),
        ] {
            let args = Args::parse_from(["playground", "--preset", preset]);
            let layer = args.layer().await.expect("a store in memory");
            let app = routes::app(layer, Arc::default());
            let lines = lines_to_try("", 0xc0_ffee, args.another_request());
            let orders: Vec<_> = lines.lines().filter(|it| it.contains("/orders")).collect();
            assert!(orders[2].contains(third), "{preset}: {}", orders[2]);
            for (line, status) in orders.into_iter().zip(["201", "201", third]) {
                let (_, body) = line.split_once("-d ").expect("a body");
                let (_, header) = line.split_once("-H '").expect("a header");
                let (name, value) = header.split_once(": ").expect("a name and a value");
                let req = Request::post("/orders")
                    .header(name, value.split('\'').next().expect("a value"))
                    .body(Body::from(
                        body.split(' ').next().expect("a word").to_owned(),
                    ))
                    .expect("a request");
                let res = app.clone().oneshot(req).await.expect("an answer");
                assert_eq!(res.status().as_str(), status, "{preset}: {line}");
            }
        }
    }
}
