//! The playground in a separate process, and clients for it.
//!
//! `scripts/run-tests` builds the playground before the tests and sets [`EXECUTABLE`]. Without that variable, each test
//! process builds it once. It is built with all features of the workspace, so that it shares nearly all dependencies with
//! the tests.

use std::{
    env,
    error::Error,
    ffi::OsStr,
    fmt,
    io::{BufRead, BufReader, Read},
    net::SocketAddr,
    path::PathBuf,
    process::{ChildStdout, Command, ExitStatus, Stdio},
    sync::OnceLock,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{Request, request};
use http_body_util::{BodyExt, Full};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};

use crate::{GuardedChild, HANG_GUARD, TestResponse};

/// The environment variable with the path of a playground that is built.
pub const EXECUTABLE: &str = "TOWER_IDEMPOTENCY_PLAYGROUND";

/// A running playground. It is killed when this is dropped, and when the test process ends.
pub struct Playground {
    child: GuardedChild,
    url: String,
    stdout: BufReader<ChildStdout>,
    stderr: Option<JoinHandle<String>>,
}

impl Playground {
    /// Starts a playground on a free port and waits until it is ready.
    ///
    /// # Panics
    ///
    /// Panics if it cannot be built, or does not print that it is listening.
    #[must_use]
    pub fn start(args: &[&str]) -> Self {
        Self::started_by(&command(args))
    }

    /// Like [`start`](Self::start), with another command; its process must execute the playground.
    ///
    /// # Panics
    ///
    /// Panics if it cannot be started, or does not print that it is listening.
    #[must_use]
    pub fn started_by(command: &Command) -> Self {
        let mut child = GuardedChild::spawn(command, Stdio::piped(), Stdio::piped());
        let mut stdout = BufReader::new(child.stdout());
        let mut stderr = child.stderr();
        let stderr = thread::spawn(move || {
            let mut text = String::new();
            stderr.read_to_string(&mut text).expect("stderr is text");
            text
        });
        let mut line = String::new();
        stdout.read_line(&mut line).expect("a line on stdout");
        let Some(url) = line.trim_end().strip_prefix("listening on ") else {
            child.wait();
            let said = stderr.join().expect("stderr is read");
            panic!("expected a line with the address, found {line:?} and:\n{said}");
        };
        Self {
            url: url.to_owned(),
            child,
            stdout,
            stderr: Some(stderr),
        }
    }

    /// Returns the URL of a path.
    #[must_use]
    pub fn url(&self, path: &str) -> String {
        format!("{}{path}", self.url)
    }

    /// Returns the address of the playground.
    ///
    /// # Panics
    ///
    /// Panics if its output is not an address.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        let address = self.url.strip_prefix("http://").map(str::parse);
        address.expect("http").expect("an address and a port")
    }

    /// Returns the process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a stop signal.
    ///
    /// # Panics
    ///
    /// Panics if there is no `kill`.
    pub fn terminate(&self) {
        let pid = self.pid().to_string();
        let sent = run("kill", ["-TERM", &pid]);
        assert!(sent.is_ok(), "{sent:?}");
    }

    /// Waits for its end, and returns its exit status and its further output on stdout and stderr.
    ///
    /// # Panics
    ///
    /// Panics if it does not end within [`HANG_GUARD`].
    #[must_use]
    pub fn wait(mut self) -> (ExitStatus, String, String) {
        let status = self.child.wait();
        let mut rest = String::new();
        self.stdout
            .read_to_string(&mut rest)
            .expect("stdout is text");
        let stderr = self.stderr.take().expect("waited for once");
        (status, rest, stderr.join().expect("stderr is read"))
    }

    /// Creates a builder of a POST to a path under a key.
    #[must_use]
    pub fn keyed(&self, path: &str, key: &str) -> request::Builder {
        Request::post(self.url(path)).header("idempotency-key", key)
    }

    /// Posts to a path under a key.
    ///
    /// # Panics
    ///
    /// Panics if no complete response arrives.
    pub async fn post(&self, path: &str, key: &str, body: &[u8]) -> TestResponse {
        self.send(self.keyed(path, key), body).await
    }

    /// Sends a request over HTTP/1.1 on a separate connection, and reads the response to its end.
    ///
    /// # Panics
    ///
    /// Panics if no complete response arrives.
    pub async fn send(&self, req: request::Builder, body: &[u8]) -> TestResponse {
        self.try_send(req, body).await.expect("a whole answer")
    }

    /// Like [`send`](Self::send), over HTTP/2 without negotiation.
    ///
    /// # Panics
    ///
    /// Panics if no complete response arrives.
    pub async fn send_h2(&self, req: request::Builder, body: &[u8]) -> TestResponse {
        let sent = send(true, req, body).await;
        sent.expect("a whole answer")
    }

    /// Like [`send`](Self::send), but returns failures.
    ///
    /// # Errors
    ///
    /// Returns an error if no complete response arrives.
    pub async fn try_send(
        &self,
        req: request::Builder,
        body: &[u8],
    ) -> Result<TestResponse, SendError> {
        send(false, req, body).await
    }

    /// Returns the number of executions.
    ///
    /// # Panics
    ///
    /// Panics if it does not report the number.
    pub async fn executions(&self) -> u64 {
        let req = Request::get(self.url("/executions"));
        let response = self.send(req, b"").await;
        let executions: serde_json::Value = serde_json::from_slice(&response.body).expect("JSON");
        executions["total"].as_u64().expect("a total")
    }

    /// Waits until this number of executions has begun.
    ///
    /// # Panics
    ///
    /// Panics if fewer have begun after [`HANG_GUARD`].
    pub async fn wait_until_begun(&self, executions: u64) {
        let deadline = Instant::now() + HANG_GUARD;
        while self.executions().await < executions {
            assert!(
                Instant::now() < deadline,
                "expected {executions} executions"
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// The reason that no complete response arrived.
pub type SendError = Box<dyn Error + Send + Sync>;

impl fmt::Debug for Playground {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Playground")
            .field("pid", &self.pid())
            .field("url", &self.url)
            .finish_non_exhaustive()
    }
}

/// Returns the command of the playground with these arguments, on a free port of this machine unless they set another.
///
/// # Panics
///
/// Panics if it cannot be built.
#[must_use]
pub fn command(args: &[&str]) -> Command {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    let mut command = Command::new(
        BINARY.get_or_init(|| env::var_os(EXECUTABLE).map_or_else(build, PathBuf::from)),
    );
    if !args.contains(&"--listen") {
        command.args(["--listen", "127.0.0.1:0"]);
    }
    // Expected panics must not fill the pipe.
    command
        .args(args)
        .env("RUST_BACKTRACE", "0")
        .env_remove("RUST_LOG");
    command
}

async fn send(http2: bool, req: request::Builder, body: &[u8]) -> Result<TestResponse, SendError> {
    let req = req.body(Full::new(Bytes::copy_from_slice(body)))?;
    // A client with its own retries would change the counts.
    let client = Client::builder(TokioExecutor::new())
        .pool_max_idle_per_host(0)
        .retry_canceled_requests(false)
        .http2_only(http2)
        .build_http();
    let (head, body) = client.request(req).await?.into_parts();
    Ok(TestResponse {
        status: head.status,
        headers: head.headers,
        body: body.collect().await?.to_bytes(),
    })
}

/// Returns a cargo command in a directory of this package.
#[must_use]
pub fn cargo() -> Command {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    // Cargo sets variables for the package of a test, which must not reach the build below. Otherwise crates whose build
    // scripts read them, such as ring, would be rebuilt each time.
    for (name, _) in env::vars_os() {
        let of_package = ["CARGO_PKG_", "CARGO_MANIFEST_"];
        if name
            .to_str()
            .is_some_and(|name| of_package.iter().any(|it| name.starts_with(it)))
        {
            command.env_remove(name);
        }
    }
    command.current_dir(env!("CARGO_MANIFEST_DIR"));
    command
}

fn build() -> PathBuf {
    let built = cargo()
        .args([
            "build",
            "--workspace",
            "--all-features",
            "--bin",
            "playground",
        ])
        .args(["--message-format", "json-render-diagnostics"])
        .stderr(Stdio::inherit())
        .output()
        .expect("cargo starts");
    assert!(built.status.success(), "the playground does not build");
    let executable = built.stdout.split(|byte| *byte == b'\n').find_map(|line| {
        let message: serde_json::Value = serde_json::from_slice(line).ok()?;
        message["executable"].as_str().map(PathBuf::from)
    });
    executable.expect("cargo prints the path of the executable")
}

/// Returns the stdout of a tool.
///
/// # Errors
///
/// Returns an error if the tool is not installed (the error names it), or if it failed (the error contains its stderr).
pub fn run<A: AsRef<OsStr>>(
    tool: &str,
    args: impl IntoIterator<Item = A>,
) -> Result<Vec<u8>, String> {
    let output = Command::new(tool)
        .args(args)
        .output()
        .map_err(|error| format!("{tool} is needed and cannot be started: {error}"))?;
    if output.status.success() {
        Ok(output.stdout)
    } else {
        let stderr = String::from_utf8_lossy(&output.stderr);
        Err(format!("{tool} failed, {}: {stderr}", output.status))
    }
}
