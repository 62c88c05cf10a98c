//! `idempotency serve`.

mod gate;

use std::{
    fs::{self, Permissions},
    io::{self, IsTerminal as _},
    net::SocketAddr,
    os::unix::fs::{FileTypeExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use axum::{
    Router,
    extract::connect_info::Connected,
    middleware,
    serve::{IncomingStream, Listener},
};
use tokio::{
    net::{TcpListener, UnixListener},
    signal::unix::{SignalKind, signal},
    sync::watch,
    time::timeout,
};
use tower_idempotency_console::{Access, Console, audit::AuditLog};

use self::gate::{Gate, Operator, Peer};
use super::find::Identity;
use crate::{
    cli::Global,
    context::Context,
    failure::{Exit, Failure},
};

/// Serve the console: pages that list, explain and settle entries
///
/// Without --token-file and --unix-socket it listens on loopback only, and every user of this machine is an operator.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The address to listen on. Other addresses than loopback need --token-file
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:7480")]
    listen: SocketAddr,

    /// Listen on this Unix socket, which only the user of this process can connect to
    #[arg(long, value_name = "PATH", conflicts_with = "listen")]
    unix_socket: Option<PathBuf>,

    /// A file with a token of at least 16 characters. Browsers ask for it as a password, with the name of the operator
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,

    /// The file to which the audit lines are appended. Nothing is resolved without it
    #[arg(long, env = "IDEMPOTENCY_AUDIT", value_name = "FILE")]
    audit: Option<PathBuf>,

    /// Resolve nothing
    #[arg(long)]
    read_only: bool,

    /// The operator, in the audit log, if there is no token
    #[arg(long, env = "USER", value_name = "NAME", default_value = "unknown")]
    actor: String,

    /// The heading of the pages, such as the name of the service
    #[arg(long, default_value = "Idempotency")]
    title: String,

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
    if args.audit.is_none() && !args.read_only {
        return Err(Failure::usage(
            "expected --audit (or IDEMPOTENCY_AUDIT), because nothing is resolved without an audit log, or --read-only",
        ));
    }
    start_log();
    let (stop, stopped) = watch::channel(false);
    let app = router(context, args, global, token, stopped.clone())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let signals = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        stop.send_replace(true);
    };
    match &args.unix_socket {
        Some(path) => {
            let listener = bind_unix(path)?;
            context
                .output
                .line(&format!("listening on unix:{}", path.display()))?;
            let served = serve(listener, app, signals, stopped).await;
            fs::remove_file(path).ok();
            served
        }
        None => {
            let listener = TcpListener::bind(args.listen).await;
            let listener = listener.map_err(|error| {
                Failure::failed(format!("cannot listen on {}: {error}", args.listen))
            })?;
            let address = listener.local_addr()?;
            context
                .output
                .line(&format!("listening on http://{address}"))?;
            serve(listener, app, signals, stopped).await
        }
    }
}

fn router(
    context: &Context,
    args: &Args,
    global: &Global,
    token: Option<Vec<u8>>,
    mut stopped: watch::Receiver<bool>,
) -> Result<Router, Failure> {
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
        .with_store_name(context.name)
        .with_store_timeout(global.timeout)
        .with_layer(args.identity.layer()?)
        .with_shutdown(async move {
            stopped.wait_for(|stopped| *stopped).await.ok();
        });
    if let Some(path) = &args.audit {
        console = console.with_audit_log(AuditLog::new(path));
    }
    let gate = Arc::new(Gate::new(
        token,
        &args.actor,
        args.unix_socket.is_none() && args.listen.ip().is_loopback(),
    ));
    Ok(console
        .into_router()
        .layer(middleware::from_fn_with_state(gate, gate::check)))
}

/// Serves until the signal. Open requests have five seconds to end.
async fn serve<L>(
    listener: L,
    app: Router,
    signals: impl Future<Output = ()> + Send + 'static,
    mut stopped: watch::Receiver<bool>,
) -> Result<Exit, Failure>
where
    L: Listener,
    L::Addr: std::fmt::Debug,
    Peer: for<'a> Connected<IncomingStream<'a, L>>,
{
    let service = app.into_make_service_with_connect_info::<Peer>();
    let server = axum::serve(listener, service).with_graceful_shutdown(signals);
    let mut server = tokio::spawn(server.into_future());
    tokio::select! {
        ended = &mut server => {
            let ended = ended.map_err(|error| Failure::failed(error.to_string()))?;
            ended?;
        }
        _ = stopped.wait_for(|stopped| *stopped) => {
            timeout(Duration::from_secs(5), server).await.ok();
        }
    }
    Ok(Exit::Done)
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

/// Binds a socket that only the user of this process can connect to. Replaces the socket of a process that has ended.
fn bind_unix(path: &Path) -> Result<UnixListener, Failure> {
    let failed =
        |error: io::Error| Failure::failed(format!("cannot listen on {}: {error}", path.display()));
    let is_socket = fs::symlink_metadata(path).is_ok_and(|it| it.file_type().is_socket());
    if is_socket {
        if std::os::unix::net::UnixStream::connect(path).is_ok() {
            return Err(Failure::failed(format!(
                "cannot listen on {}: another process listens there",
                path.display()
            )));
        }
        fs::remove_file(path).map_err(failed)?;
    }
    let listener = UnixListener::bind(path).map_err(failed)?;
    fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(failed)?;
    Ok(listener)
}

fn start_log() {
    let filter = tracing_subscriber::EnvFilter::builder()
        .with_default_directive(tracing::Level::INFO.into())
        .from_env_lossy();
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(io::stderr().is_terminal())
        .with_writer(io::stderr);
    log.try_init().ok();
}
