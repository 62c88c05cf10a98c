//! A server that shows every behaviour of `tower-idempotency`: run it, and try the commands it prints.

use std::{
    io::{self, Write},
    process::ExitCode,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use axum::serve::ListenerExt;
use clap::Parser;
use metrics_exporter_prometheus::PrometheusHandle;
use tokio::{net::TcpListener, sync::Notify, time::timeout};
use tower_idempotency::IdempotencyLayer;
use tower_idempotency_any::AnyStore;
use tracing_subscriber::{EnvFilter, filter::LevelFilter};

use self::{args::Args, effects::Effects};

mod args;
mod effects;
mod metrics;
mod page;
mod routes;

#[tokio::main]
async fn main() -> ExitCode {
    let quiet = EnvFilter::builder().with_default_directive(LevelFilter::WARN.into());
    tracing_subscriber::fmt()
        .with_env_filter(quiet.from_env_lossy())
        .with_writer(io::stderr)
        .init();
    let args = Args::parse();
    let recorder = match metrics::install() {
        Ok(recorder) => recorder,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
    };
    let (store, layer) = match args.open().await {
        Ok(opened) => opened,
        Err(sentence) => {
            eprintln!("error: {sentence}");
            return ExitCode::from(2);
        }
    };
    match serve(&args, store, layer, recorder).await {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Serves until a stop signal arrives. Returns `true` if all connections and executions have finished.
async fn serve(
    args: &Args,
    store: AnyStore,
    layer: IdempotencyLayer,
    recorder: PrometheusHandle,
) -> io::Result<bool> {
    let effects = match &args.effects {
        Some(path) => Effects::in_file(path)
            .map_err(|error| with_context(&format!("cannot open {}", path.display()), &error))?,
        None => Effects::default(),
    };
    // Registers before the ready line is printed: a signal without a handler ends the process immediately.
    let asked_to_stop = stop_signal()?;
    let listener = TcpListener::bind(&args.listen)
        .await
        .map_err(|error| with_context(&format!("cannot listen on {}", args.listen), &error))?;
    let address = listener.local_addr()?;
    let url = format!("http://{address}");

    let (stop, stop_console) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let console = page::console(
        store,
        layer.clone(),
        recorder.clone(),
        address.ip(),
        Arc::clone(&stop_console),
    );
    let app = routes::app(layer.clone(), Arc::new(effects))
        .merge(metrics::routes(recorder))
        .merge(page::routes())
        .merge(console);
    let stopped = Arc::clone(&stop);
    // Sends each chunk immediately, without waiting for the acknowledgement of the previous one.
    let listener = listener.tap_io(|stream| {
        let _ = stream.set_nodelay(true);
    });
    let server = axum::serve(listener, app)
        .with_graceful_shutdown(async move { stopped.notified().await })
        .into_future();
    let server = tokio::spawn(server);
    writeln!(io::stdout(), "listening on {url}")?;
    let lines = commands_to_try(&url, start(), args.another_request());
    eprint!("{lines}");

    asked_to_stop.await;
    stop.notify_one();
    stop_console.notify_one();
    eprintln!(
        "stopping; running requests have up to {:?} to finish",
        GRACE * 2
    );
    let closed = timeout(GRACE, server).await.is_ok();
    // The server does not wait for executions whose clients have disconnected.
    let ended = layer.drain(GRACE).await;
    std::fs::remove_file(page::audit_file()).ok();
    eprintln!("{}", stop_message(closed, ended, layer.in_flight()));
    Ok(closed && ended)
}

/// Listens for SIGTERM and ctrl-c from now on. The future completes at the first of them.
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

fn with_context(context: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{context}: {error}"))
}

fn stop_message(closed: bool, ended: bool, left: usize) -> String {
    match (closed, ended) {
        (true, true) => "stopped; all connections and executions have finished".to_owned(),
        (false, true) => "stopped; connections are still open".to_owned(),
        (true, false) => format!("stopped; unfinished executions: {left}"),
        (false, false) => {
            format!("stopped; connections are still open; unfinished executions: {left}")
        }
    }
}

/// Returns a number that differs between starts, because the store may have the keys of an earlier start.
fn start() -> u128 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| now.as_millis() & 0xff_ffff)
}

/// Returns the commands to print. Their keys are quoted, which every preset accepts.
fn commands_to_try(url: &str, start: u128, another_request: &str) -> String {
    format!(
        "\
open {url}/ in a browser, or try:
  curl -i -d tea    -H 'Idempotency-Key: \"order-{start:x}\"' {url}/orders   # is executed
  curl -i -d tea    -H 'Idempotency-Key: \"order-{start:x}\"' {url}/orders   # a retry: the same response, replayed
  curl -i -d coffee -H 'Idempotency-Key: \"order-{start:x}\"' {url}/orders   # another request under the key: {another_request}
  curl -i -m 1 -d x -H 'Idempotency-Key: \"slow-{start:x}\"' {url}/slow/3000 # times out; retry it at once, and later
  curl -i -d x      -H 'Idempotency-Key: \"half-{start:x}\"' {url}/attention # half done; a retry is refused with a code
  curl -s {url}/executions                                              # the executions
  curl -s {url}/metrics                                                 # the metrics of the layer
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
    fn stop_message_names_unfinished_work() {
        let message = |closed, ended| stop_message(closed, ended, 3);
        assert!(message(true, true).contains("have finished"));
        for (closed, ended) in [(true, false), (false, true), (false, false)] {
            let message = message(closed, ended);
            assert_eq!(message.contains("connections"), !closed, "{message}");
            assert_eq!(message.contains("executions: 3"), !ended, "{message}");
        }
    }

    #[tokio::test]
    async fn printed_orders_return_printed_status() {
        for (preset, third) in [
            ("recommended", "422"),
            ("ietf", "422"),
            ("stripe", "400"),
            ("idempo", "201"),
        ] {
            let args = Args::parse_from(["playground", "--preset", preset]);
            let (_, layer) = args.open().await.expect("a store in memory");
            let app = routes::app(layer, Arc::default());
            let lines = commands_to_try("", 0xc0_ffee, args.another_request());
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
                let res = app.clone().oneshot(req).await.expect("a response");
                assert_eq!(res.status().as_str(), status, "{preset}: {line}");
            }
        }
    }
}
