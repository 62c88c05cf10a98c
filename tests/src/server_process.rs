//! A process that serves HTTP and that a test can kill, and a client for it.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use bytes::Bytes;
use http::request;
use http_body_util::{BodyExt, Full};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use tokio::time::timeout;

use crate::{
    HANG_GUARD, TestResponse,
    servers::{Guard, directory, start_on_free_port, until_ready},
};

/// A server on a port, across restarts of its process. The process ends when this is dropped, and when the test process
/// ends.
///
/// Its program takes `--listen ADDR`, and prints `listening on http://ADDR` when it is ready.
#[derive(Debug)]
pub struct ServerProcess {
    address: SocketAddr,
    program: PathBuf,
    args: Vec<String>,
    running: Mutex<Running>,
}

#[derive(Debug)]
struct Running {
    guard: Guard,
    /// Number of processes started in the guard's directory; they share a log.
    starts: usize,
}

impl ServerProcess {
    /// Starts `program` with these arguments on a free port, and waits until it is ready.
    ///
    /// # Panics
    ///
    /// Panics if it does not start.
    #[must_use]
    pub fn start(program: impl AsRef<Path>, args: &[&str]) -> Self {
        let program = program.as_ref().to_owned();
        let args: Vec<_> = args.iter().map(|&arg| arg.to_owned()).collect();
        let directory = directory("actor");
        let (port, guard) = start_on_free_port(
            |port| {
                fs::create_dir_all(&directory).expect("a directory for throwaway files");
                Guard::start(&directory, &command(&program, port, &args), "KILL")
            },
            |_, guard| is_ready(guard, 1),
        );
        Self {
            address: ([127, 0, 0, 1], port).into(),
            program,
            args,
            running: Mutex::new(Running { guard, starts: 1 }),
        }
    }

    /// Returns the URL of a path.
    #[must_use]
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Kills the process with SIGKILL, and starts another process on the same port.
    ///
    /// # Panics
    ///
    /// Panics if the new process does not start.
    pub fn kill(&self) {
        let mut running = self.running();
        let command = command(&self.program, self.address.port(), &self.args);
        running.guard.replace(&command, "KILL");
        running.starts += 1;
        let is_back = until_ready(&running.guard, || is_ready(&running.guard, running.starts));
        assert!(
            is_back,
            "the new process does not start:\n{}",
            running.guard.log()
        );
    }

    /// Pauses the process for this duration.
    ///
    /// # Panics
    ///
    /// Panics if there is no process.
    pub fn pause(&self, length: Duration) {
        let running = self.running();
        running.guard.signal("STOP");
        thread::sleep(length);
        running.guard.signal("CONT");
    }

    /// Returns the output of all its processes.
    #[must_use]
    pub fn log(&self) -> String {
        self.running().guard.log()
    }

    fn running(&self) -> MutexGuard<'_, Running> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sends a request on a separate connection and returns the whole response, or `None` if the connection fails.
///
/// A process that is killed resets its connections, so no caller waits for a dead process. If the process is slow or
/// stopped, the caller waits.
///
/// # Panics
///
/// Panics if the request is invalid, or there is neither a response nor a failure within ten minutes.
pub async fn send_http(req: request::Builder, body: impl Into<Bytes>) -> Option<TestResponse> {
    let req = req.body(Full::new(body.into())).expect("a request");
    // A client with its own retries would hide the number of requests.
    let client = Client::builder(TokioExecutor::new())
        .pool_max_idle_per_host(0)
        .retry_canceled_requests(false)
        .build_http();
    let response = async {
        let (head, body) = client.request(req).await.ok()?.into_parts();
        Some(TestResponse {
            status: head.status,
            headers: head.headers,
            body: body.collect().await.ok()?.to_bytes(),
        })
    };
    let response = timeout(HANG_GUARD, response).await;
    response.expect("a response or a failure")
}

fn command(program: &Path, port: u16, args: &[String]) -> Command {
    let mut command = Command::new(program);
    let listen = format!("127.0.0.1:{port}");
    command.args(["--listen", &listen]).args(args);
    command.env_remove("RUST_LOG");
    command
}

fn is_ready(guard: &Guard, starts: usize) -> bool {
    guard.log().matches("listening on http://").count() == starts
}
