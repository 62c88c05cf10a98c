//! `idempotency serve`.

pub(crate) mod authentication;
mod scrape;
mod server;

use std::{
    fs::{self, Permissions},
    io,
    net::SocketAddr,
    os::unix::fs::{FileTypeExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use axum::{Router, middleware};
use clap::builder::BoolishValueParser;
use tokio::{
    net::{TcpListener, UnixListener, UnixStream},
    signal::unix::{SignalKind, signal},
    sync::watch,
    time::timeout,
};
use tower_idempotency_console::{
    Access, Changes, Console, audit::AuditLog, scrape::ScrapedMetrics,
};

use self::{
    authentication::{Authentication, ListenerKind, Operator},
    scrape::Targets,
};
use super::find::Identity;
use crate::{
    change::{catch_hangup, hangup},
    cli::{Global, UNKNOWN_ACTOR, actor_parser},
    context::Context,
    failure::{Exit, Failure},
};

/// Serve the console: pages that list, explain and resolve entries
///
/// Without --token-file and --unix-socket it listens on loopback only, and every user of this machine is an operator.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The address to listen on. Other addresses than loopback need --token-file
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:7480")]
    listen: SocketAddr,

    /// Listen on this Unix socket. Without --token-file it serves only the user of this process and root
    #[arg(long, value_name = "PATH", conflicts_with = "listen")]
    unix_socket: Option<PathBuf>,

    /// A file with a token of at least 16 characters. Browsers ask for it as a password, with the name of the operator
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,

    /// The file to which the audit lines are appended. Nothing is resolved without a line
    #[arg(long, env = "IDEMPOTENCY_AUDIT", value_name = "FILE")]
    audit: Option<PathBuf>,

    /// Append the audit lines to a table of the SQL store: its name is that of the entries and `_audit`. With --audit, to
    /// both
    #[arg(long, env = "IDEMPOTENCY_AUDIT_TABLE", value_parser = BoolishValueParser::new())]
    audit_table: bool,

    /// Resolve nothing
    #[arg(long)]
    read_only: bool,

    /// The operator, in the audit log, if there is no token. An empty name counts as absent
    #[arg(
        long,
        env = "USER",
        value_name = "NAME",
        default_value = UNKNOWN_ACTOR,
        value_parser = actor_parser()
    )]
    actor: String,

    /// The heading of the pages, such as the name of the service
    #[arg(long, default_value = "Idempotency")]
    title: String,

    /// Draw the chart of requests from the metrics of the service: a page in the text format of Prometheus, http:// or
    /// https://. Name each replica, at most 32. A name and a password in the URL are sent with the request. In the variable, a
    /// space separates two URLs
    #[arg(
        long,
        env = "IDEMPOTENCY_METRICS",
        hide_env_values = true,
        value_name = "URL",
        value_delimiter = ' '
    )]
    metrics: Vec<String>,

    /// The time that the charts show, from 1m
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = chart_window)]
    chart_window: Duration,

    #[command(flatten)]
    identity: Identity,
}

pub(crate) async fn run(context: &Context, args: &Args, global: &Global) -> Result<Exit, Failure> {
    let token = args.token_file.as_deref().map(read_token).transpose()?;
    if token.is_none() && args.unix_socket.is_none() && !args.listen.ip().is_loopback() {
        return Err(Failure::usage(format!(
            "{} is not loopback: expected --token-file, or --unix-socket",
            args.listen
        )));
    }
    let log = context.audit_log(args.audit.as_deref(), args.audit_table)?;
    if log.is_none() && !args.read_only {
        return Err(Failure::usage(
            "expected --audit FILE or --audit-table, because nothing is resolved without an audit log, or --read-only",
        ));
    }
    // A file that cannot be written would reject each decision.
    if let Some(log) = log.as_ref().filter(|_| !args.read_only) {
        let checked = log.check().await;
        checked.map_err(|error| Failure::failed(error.to_string()))?;
    }
    let targets = Targets::parse(&args.metrics)?;
    start_log();
    // The tasks end with this function.
    let (metrics, _scrapes) = targets.start(args.chart_window).unzip();
    let (stop, stopped) = watch::channel(false);
    let (console, changes) = console(context, args, global, log, metrics, stopped.clone())?;
    let router = |listener| {
        let authentication = Arc::new(Authentication::new(token, &args.actor, listener));
        console.layer(middleware::from_fn_with_state(
            authentication,
            authentication::check,
        ))
    };
    let uncaught = |error: io::Error| Failure::failed(format!("cannot catch signals: {error}"));
    let mut terminate = signal(SignalKind::terminate()).map_err(uncaught)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(uncaught)?;
    let mut hung_up = catch_hangup().map_err(uncaught)?;
    let socket = args.unix_socket.clone();
    let signals = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            () = hangup(&mut hung_up) => {}
        }
        // While this process still listens: later, the path may be the socket of the next process.
        if let Some(path) = socket {
            fs::remove_file(path).ok();
        }
        stop.send_replace(true);
    };
    match &args.unix_socket {
        Some(path) => {
            let listener = bind_unix(path)?;
            let owner = own_uid().map_err(|error| {
                Failure::failed(format!("cannot read the user ID of this process: {error}"))
            })?;
            let app = router(ListenerKind::Unix { owner });
            print_address(context, &format!("unix:{}", path.display()));
            tokio::spawn(signals);
            server::serve(listener, app, stopped).await;
        }
        None => {
            let listener = TcpListener::bind(args.listen).await;
            let listener = listener.map_err(|error| {
                Failure::failed(format!("cannot listen on {}: {error}", args.listen))
            })?;
            let address = listener.local_addr()?;
            let app = router(if address.ip().is_loopback() {
                ListenerKind::Loopback
            } else {
                ListenerKind::Network
            });
            print_address(context, &format!("http://{address}"));
            tokio::spawn(signals);
            server::serve(listener, app, stopped).await;
        }
    }
    // A change whose browser has left continues. Its outcome belongs in the audit log. It makes two calls of the store, and takes
    // the lock of the file twice, for at most five seconds each. With the table, the intent and the outcome are calls too.
    let calls = if args.audit_table { 4 } else { 2 };
    let limit = global.timeout.saturating_mul(calls);
    let limit = limit.saturating_add(Duration::from_secs(11));
    timeout(limit, changes.finished()).await.ok();
    Ok(Exit::Done)
}

/// Prints the address. The console is served even if the reader of the output has ended.
fn print_address(context: &Context, address: &str) {
    let line = format!("listening on {address}");
    context.output.line(&line).ok();
}

fn console(
    context: &Context,
    args: &Args,
    global: &Global,
    log: Option<AuditLog>,
    metrics: Option<ScrapedMetrics>,
    mut stopped: watch::Receiver<bool>,
) -> Result<(Router, Changes), Failure> {
    let is_read_only = args.read_only;
    let console = Console::new(context.store.clone(), move |head| {
        match head.extensions.get::<Operator>() {
            None => Access::None,
            Some(operator) if is_read_only => Access::read(&*operator.0),
            Some(operator) => Access::resolve(&*operator.0),
        }
    });
    let mut console = console
        .with_title(&args.title)
        .with_store_name(&context.store_name)
        .with_store_timeout(global.timeout)
        .with_chart_window(args.chart_window)
        .with_layer(args.identity.layer()?)
        .with_shutdown(async move {
            stopped.wait_for(|stopped| *stopped).await.ok();
        });
    if let Some(log) = log {
        console = console.with_audit_log(log);
    }
    if let Some(metrics) = metrics {
        console = console.with_scraped_metrics(metrics);
    }
    let changes = console.changes();
    Ok((console.into_router(), changes))
}

/// Parses the time that the charts show.
fn chart_window(text: &str) -> Result<Duration, String> {
    let window = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    if window < Duration::from_secs(60) {
        return Err("expected at least 1m".to_owned());
    }
    Ok(window)
}

fn read_token(path: &Path) -> Result<Vec<u8>, Failure> {
    let token = fs::read(path)
        .map_err(|error| Failure::failed(format!("cannot read {}: {error}", path.display())))?;
    let token = token.trim_ascii().to_vec();
    if token.len() < 16 {
        return Err(Failure::usage(format!(
            "expected a token of at least 16 characters in {}",
            path.display()
        )));
    }
    Ok(token)
}

/// Binds a socket and restricts its file to the user of this process. Replaces the socket of a process that has ended.
fn bind_unix(path: &Path) -> Result<UnixListener, Failure> {
    let failed =
        |error: io::Error| Failure::failed(format!("cannot listen on {}: {error}", path.display()));
    let is_socket = fs::symlink_metadata(path).is_ok_and(|it| it.file_type().is_socket());
    if is_socket {
        match std::os::unix::net::UnixStream::connect(path) {
            Ok(_) => {
                return Err(Failure::failed(format!(
                    "cannot listen on {}: another process listens there",
                    path.display()
                )));
            }
            // The process that created the socket has ended.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                fs::remove_file(path).map_err(failed)?;
            }
            // The socket may belong to another user.
            Err(error) => return Err(failed(error)),
        }
    }
    let listener = UnixListener::bind(path).map_err(failed)?;
    fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(failed)?;
    Ok(listener)
}

/// Returns the user of this process, which is the owner of its sockets.
fn own_uid() -> io::Result<u32> {
    let (one_end, _other_end) = UnixStream::pair()?;
    Ok(one_end.peer_cred()?.uid())
}

fn start_log() {
    let filter = tracing_subscriber::EnvFilter::builder()
        .with_default_directive(tracing::Level::INFO.into())
        .from_env_lossy();
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(false)
        .with_writer(io::stderr)
        // The subscriber would print its own errors to standard error, and panic if the reader has ended.
        .log_internal_errors(false);
    log.try_init().ok();
}
