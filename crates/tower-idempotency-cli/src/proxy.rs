//! `idempotency proxy`: runs the proxy of one configuration file.

mod admin_console;
mod descriptors;
mod sockets;

use std::{
    env, fs,
    io::{self, Write as _},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use sd_notify::NotifyState;
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    task::block_in_place,
    time::sleep,
};
use tower_idempotency::metrics::{RECORD_BYTES_BUCKETS, SECONDS_BUCKETS};
use tower_idempotency_any::OpenErrorKind;
use tower_idempotency_console::describe::json_text;
use tower_idempotency_proxy::{BindError, Config, ConfigError, Proxy, ProxyHandle, Sockets};

use self::admin_console::AdminConsole;
use crate::{BLOCKING_LIMIT, failure::Failure, output::print_note};

/// Exit code of a configuration that is rejected.
const WRONG_CONFIG: u8 = 2;
const UPKEEP_PERIOD: Duration = Duration::from_secs(5);

#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    /// The configuration file. SIGHUP reads it again
    #[arg(long, value_name = "FILE", required = true)]
    config: Option<PathBuf>,
    /// The address for clients, in place of the one in the file and in IDEMPOTENCY_PROXY__LISTEN__ADDRESS
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<SocketAddr>,
    /// Check the configuration, print it with all defaults as JSON, and exit
    #[arg(long)]
    check: bool,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Print the policy of each route: the rules by which a client sends keys and retries
    Policy(PolicyArgs),
}

#[derive(Debug, clap::Args)]
struct PolicyArgs {
    /// The configuration file
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Print this OpenAPI document (3.0 or 3.1, JSON) with the policies in it
    #[arg(long, value_name = "FILE")]
    openapi: Option<PathBuf>,
    /// The host of the requests in the document, for routes that have one
    #[arg(long, value_name = "HOST", default_value = "", requires = "openapi")]
    host: String,
}

impl PolicyArgs {
    /// Returns the text to print.
    fn run(&self, store: Option<&str>, is_json: bool) -> Result<String, String> {
        let named =
            |file: &Path, error: &dyn std::fmt::Display| format!("{}: {error}", file.display());
        // The policy does not depend on the store, so none is needed.
        let store = store.unwrap_or("memory");
        let config = Config::load(&self.config, Some(store), env::vars_os());
        let config = config.map_err(|error| named(&self.config, &error))?;
        if let Some(file) = &self.openapi {
            let text = fs::read(file).map_err(|error| named(file, &error))?;
            let document = serde_json::from_slice(&text);
            let mut document =
                document.map_err(|error| named(file, &format_args!("no JSON: {error}")))?;
            let described = config.describe(&mut document, &self.host);
            described.map_err(|error| named(file, &error))?;
            return Ok(json_text(&format_args!("{document:#}\n")));
        }
        let policies = config
            .policies()
            .map_err(|error| named(&self.config, &error))?;
        let mut output = String::new();
        for (route, policy) in policies {
            output.push_str(&match policy {
                _ if is_json => format!(
                    "{}\n",
                    serde_json::json!({ "route": route, "policy": policy })
                ),
                Some(policy) => format!("route {route}\n{policy}\n\n"),
                None => format!("route {route}\nnot protected\n\n"),
            });
        }
        Ok(output)
    }
}

impl Args {
    /// Returns the file of the configuration. It is missing only if there is a subcommand.
    fn config(&self) -> &Path {
        self.config.as_deref().unwrap_or(Path::new(""))
    }

    /// Reads the configuration: flags replace variables of the environment, and these replace the file. `store` is the URL of
    /// the store in the flag, or in its variable `IDEMPOTENCY_STORE`.
    fn load(&self, store: Option<&str>) -> Result<Config, ConfigError> {
        let config = Config::load(self.config(), store, env::vars_os())?;
        Ok(match self.listen {
            Some(address) => config.with_listen_address(address),
            None => config,
        })
    }
}

pub(crate) fn main(args: Args, store: Option<String>, is_json: bool) -> ExitCode {
    if let Some(Command::Policy(policy)) = &args.command {
        return match policy.run(store.as_deref(), is_json) {
            Ok(output) => print(&output),
            Err(error) => fail(&error, WRONG_CONFIG),
        };
    }
    let checked = args.load(store.as_deref()).and_then(|config| {
        if args.check {
            config.check_certificates()?;
        }
        Ok(config)
    });
    let config = match checked {
        Ok(config) => config,
        Err(error) => {
            let error = format!("{}: {error}", args.config().display());
            return fail(&error, WRONG_CONFIG);
        }
    };
    if args.check {
        return print(&format!("{:#}\n", config.to_json()));
    }
    let sockets = match sockets::take() {
        Ok(sockets) => sockets,
        Err(error) => return fail(&error, WRONG_CONFIG),
    };
    start_log();
    descriptors::raise_limit(config.max_connections());
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build();
    let ran = match runtime {
        Ok(runtime) => {
            let ran = runtime.block_on(run(args, store, config, sockets));
            runtime.shutdown_timeout(BLOCKING_LIMIT);
            ran
        }
        Err(error) => {
            let message = format!("cannot start the runtime: {error}");
            Err(Failure::failed(message))
        }
    };
    match ran {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => fail(
            "the drain timeout passed before all requests had finished",
            1,
        ),
        Err(failure) => fail(&failure.to_string(), failure.exit().code()),
    }
}

/// Returns the failure of a proxy that did not start. The exit code shows if its configuration is wrong.
fn bind_failure(error: &BindError) -> Failure {
    let message = error.to_string();
    match error {
        BindError::Config(_) => Failure::usage(message),
        BindError::Store(error) if is_wrong_url(error.kind()) => Failure::usage(message),
        _ => Failure::failed(message),
    }
}

/// Returns `true` if no start with the same URL of the store can succeed.
fn is_wrong_url(kind: OpenErrorKind) -> bool {
    matches!(kind, OpenErrorKind::Url | OpenErrorKind::NotBuilt)
}

/// Prints the result of a command. A reader that has ended is no failure.
fn print(output: &str) -> ExitCode {
    match io::stdout().write_all(output.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            fail(&format!("cannot print: {error}"), 1)
        }
        Ok(()) | Err(_) => ExitCode::SUCCESS,
    }
}

fn fail(error: &str, code: u8) -> ExitCode {
    print_note(format_args!("idempotency proxy: {error}"));
    ExitCode::from(code)
}

fn start_log() {
    let filter = tracing_subscriber::EnvFilter::builder()
        .with_default_directive(tracing::Level::INFO.into())
        .from_env_lossy();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(false)
        .with_writer(io::stderr)
        // The subscriber would print its own errors to standard error, and panic if the reader has ended.
        .log_internal_errors(false)
        .init();
}

/// Installs the recorder of the metrics. Its histograms have the buckets that the dashboard and the alert rules expect.
fn install_recorder() -> Result<PrometheusHandle, BuildError> {
    let full = |name: &str| Matcher::Full(name.to_owned());
    let recorder = PrometheusBuilder::new()
        .set_buckets_for_metric(full("idempotency_handler_seconds"), SECONDS_BUCKETS)?
        .set_buckets_for_metric(full("idempotency_store_seconds"), SECONDS_BUCKETS)?
        .set_buckets_for_metric(full("idempotency_record_bytes"), RECORD_BYTES_BUCKETS)?
        .install_recorder()?;
    // Without this, the samples of histograms use up memory until the next scrape.
    let upkeep = recorder.clone();
    tokio::spawn(async move {
        loop {
            sleep(UPKEEP_PERIOD).await;
            upkeep.run_upkeep();
        }
    });
    Ok(recorder)
}

/// Serves until a signal. Returns `true` if all requests have finished.
async fn run(
    args: Args,
    store: Option<String>,
    config: Config,
    sockets: Sockets,
) -> Result<bool, Failure> {
    let recorder = install_recorder()
        .map_err(|error| Failure::failed(format!("cannot record metrics: {error}")))?;
    let console = config.console();
    let proxy = Proxy::bind_with(config, sockets)
        .await
        .map_err(|error| bind_failure(&error))?;
    let metrics = recorder.clone();
    let mut proxy = proxy.with_metrics(move || metrics.render());
    let mut changes = None;
    if let Some(console) = console {
        let console = AdminConsole::new(&console, &proxy, recorder)
            .await
            .map_err(|error| Failure::usage(format!("cannot serve the console: {error}")))?;
        changes = Some(console.changes());
        proxy = proxy.with_console(console.router);
    }
    let (address, admin) = (proxy.address(), proxy.admin_address());
    let listen = |kind| {
        let failed = |error: io::Error| Failure::failed(format!("cannot handle signals: {error}"));
        signal(kind).map_err(failed)
    };
    let mut stop = [
        listen(SignalKind::terminate())?,
        listen(SignalKind::interrupt())?,
    ];
    tokio::spawn(reload_on_signal(
        proxy.handle(),
        args,
        store,
        listen(SignalKind::hangup())?,
    ));
    print(&format!("listening on {address}\n"));
    if let Some(admin) = admin {
        print(&format!("admin on {admin}\n"));
    }
    notify(NotifyState::Ready);
    let shutdown = async move {
        wait(&mut stop).await;
        notify(NotifyState::Stopping);
        // A second signal ends the process at once.
        tokio::spawn(async move {
            wait(&mut stop).await;
            std::process::exit(1);
        });
    };
    let is_finished = proxy.serve(shutdown).await;
    if let Some(changes) = changes {
        changes.await;
    }
    Ok(is_finished)
}

/// Notifies systemd, if it started this process and waits for it.
fn notify(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "systemd not notified");
    }
}

async fn wait([terminate, interrupt]: &mut [Signal; 2]) {
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}

async fn reload_on_signal(
    handle: ProxyHandle,
    args: Args,
    store: Option<String>,
    mut signal: Signal,
) {
    while signal.recv().await.is_some() {
        // The handle logs and counts the result.
        let reload = || handle.reload(args.load(store.as_deref()));
        // Reading a file may hang, and other tasks must not wait for it.
        let _ = block_in_place(reload);
    }
}
