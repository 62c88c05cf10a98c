//! The program as a process, and raw HTTP over blocking sockets.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use tests::{HANG_GUARD, environment::remove_settings};

/// Returns the command `idempotency proxy` for a configuration, without settings of the environment.
pub(crate) fn command(config: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_idempotency"));
    command.arg("proxy").arg("--config").arg(config);
    remove_settings(&mut command);
    command
}

/// A running proxy. It is killed when this is dropped.
pub(crate) struct Process {
    child: Child,
    pub(crate) address: SocketAddr,
    pub(crate) admin: SocketAddr,
    log: PathBuf,
}

impl Process {
    pub(crate) fn start(config: &Path) -> Self {
        Self::spawn(command(config), config)
    }

    /// Starts the proxy with a command for this configuration.
    pub(crate) fn spawn(mut command: Command, config: &Path) -> Self {
        let log = config.with_extension("log");
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(
                fs::File::options()
                    .create(true)
                    .append(true)
                    .open(&log)
                    .unwrap(),
            )
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut next = |prefix: &str| {
            let line = lines.next().map(Result::unwrap);
            let line = line.unwrap_or_else(|| panic!("{}", fs::read_to_string(&log).unwrap()));
            line.strip_prefix(prefix).unwrap().parse().unwrap()
        };
        let (address, admin) = (next("listening on "), next("admin on "));
        Self {
            child,
            address,
            admin,
            log,
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }

    pub(crate) fn signal(&self, signal: &str) {
        let status = Command::new("kill")
            .arg(signal)
            .arg(self.pid().to_string())
            .status();
        assert!(status.unwrap().success());
    }

    /// Waits until the condition holds. The process must run until then.
    pub(crate) fn wait_until(&mut self, condition: impl Fn(&Self) -> bool) {
        let began = Instant::now();
        while !condition(self) {
            let ended = self.child.try_wait().unwrap();
            assert!(ended.is_none(), "{ended:?}: {}", self.log());
            assert!(began.elapsed() < HANG_GUARD, "{}", self.log());
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until the log contains the text. The process must run until then.
    pub(crate) fn wait_for_log(&mut self, text: &str) {
        self.wait_until(|it| it.log().contains(text));
    }

    /// Ends the process with SIGKILL.
    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn wait(mut self) -> ExitStatus {
        let began = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(began.elapsed() < HANG_GUARD, "{}", self.log());
            thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns a configuration for all paths of one upstream.
pub(crate) fn config(store: &str, upstream: SocketAddr, route: &str) -> String {
    format!(
        "[listen]\naddress = \"127.0.0.1:0\"\n[admin]\naddress = \"127.0.0.1:0\"\n[store]\nurl = \"{store}\"\n[upstream.app]\nurl = \"http://{upstream}\"\n[[route]]\npath = \"/open/**\"\nupstream = \"app\"\nmode = \"off\"\n[[route]]\npath = \"/**\"\nupstream = \"app\"\n{route}\n"
    )
}

/// An upstream on threads, which counts each complete request as an effect.
#[derive(Clone)]
pub(crate) struct Upstream {
    pub(crate) address: SocketAddr,
    /// The path of each effect.
    paths: Arc<Mutex<Vec<String>>>,
    open_connections: Arc<AtomicUsize>,
}

impl Upstream {
    /// Starts an upstream. `respond` gets the number of the effect, from 1, and returns `false` to close without a response.
    pub(crate) fn start(respond: impl Fn(usize) -> bool + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let upstream = Self {
            address,
            paths: Arc::default(),
            open_connections: Arc::default(),
        };
        let (serving, respond) = (upstream.clone(), Arc::new(respond));
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (serving, respond) = (serving.clone(), Arc::clone(&respond));
                let mut stream = stream.unwrap();
                serving.open_connections.fetch_add(1, Ordering::SeqCst);
                thread::spawn(move || {
                    if let Some(path) = read_request(&mut stream)
                        && respond(serving.count(path))
                    {
                        let response = "HTTP/1.1 201 Created\r\ncontent-length: 7\r\nconnection: close\r\n\r\ncreated";
                        let _ = stream.write_all(response.as_bytes());
                    }
                    drop(stream);
                    serving.open_connections.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        upstream
    }

    /// Counts an effect, and returns its number.
    fn count(&self, path: String) -> usize {
        let mut paths = self.paths.lock().unwrap();
        paths.push(path);
        paths.len()
    }

    pub(crate) fn effects(&self) -> usize {
        self.paths.lock().unwrap().len()
    }

    /// Returns the number of effects of this path.
    pub(crate) fn effects_of(&self, path: &str) -> usize {
        let paths = self.paths.lock().unwrap();
        paths.iter().filter(|it| *it == path).count()
    }

    /// Waits until all requests that were sent before are counted. Sends a request of its own.
    pub(crate) fn wait_for_sent_requests(&self) {
        // The listener accepts connections in their order, so it has accepted the earlier ones when it responds.
        assert_eq!(post(self.address, "/last", "last", "").status(), 201);
        let began = Instant::now();
        while self.open_connections.load(Ordering::SeqCst) > 0 {
            assert!(began.elapsed() < HANG_GUARD, "a connection stays open");
            thread::sleep(Duration::from_millis(1));
        }
    }

    pub(crate) fn wait_for(&self, effects: usize) {
        let began = Instant::now();
        while self.effects() < effects {
            assert!(began.elapsed() < HANG_GUARD, "{} effects", self.effects());
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Reads a request with a length, and returns its path.
fn read_request(stream: &mut TcpStream) -> Option<String> {
    let mut request = Vec::new();
    loop {
        if let Some(end) = request.windows(4).position(|four| four == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&request[..end]).to_ascii_lowercase();
            let length = head.split("content-length: ").nth(1);
            let length: usize = length.map_or(0, |rest| {
                rest.split("\r\n").next().unwrap().parse().unwrap()
            });
            if request.len() >= end + 4 + length {
                return head.split(' ').nth(1).map(str::to_owned);
            }
        }
        let mut buffer = [0; 4096];
        match stream.read(&mut buffer) {
            Ok(read @ 1..) => request.extend_from_slice(&buffer[..read]),
            Ok(_) | Err(_) => return None,
        }
    }
}

/// A response as text: empty if the connection closed before.
#[derive(Debug)]
pub(crate) struct Reply(pub(crate) String);

impl Reply {
    pub(crate) fn status(&self) -> u16 {
        self.0
            .get(9..12)
            .and_then(|status| status.parse().ok())
            .unwrap_or(0)
    }

    /// Returns the body, of a length or of one chunk.
    pub(crate) fn body(&self) -> &str {
        let (head, body) = self.0.split_once("\r\n\r\n").unwrap();
        if head.contains("transfer-encoding: chunked") {
            return body.split("\r\n").nth(1).unwrap();
        }
        body
    }

    pub(crate) fn is_replay(&self) -> bool {
        self.0.contains("\r\nidempotent-replayed: true\r\n")
    }

    pub(crate) fn is_problem(&self, code: &str) -> bool {
        self.0.contains(&format!("\"code\":\"{code}\""))
    }
}

/// Sends a request, and reads until the connection is closed.
pub(crate) fn exchange(address: SocketAddr, request: &str) -> Reply {
    let mut reply = Vec::new();
    if let Ok(mut stream) = TcpStream::connect(address) {
        stream.set_read_timeout(Some(HANG_GUARD)).unwrap();
        if stream.write_all(request.as_bytes()).is_ok() {
            let _ = stream.read_to_end(&mut reply);
        }
    }
    Reply(String::from_utf8_lossy(&reply).into_owned())
}

pub(crate) fn get(address: SocketAddr, path: &str) -> Reply {
    exchange(
        address,
        &format!("GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"),
    )
}

pub(crate) fn post(address: SocketAddr, path: &str, key: &str, body: &str) -> Reply {
    let length = body.len();
    exchange(
        address,
        &format!(
            "POST {path} HTTP/1.1\r\nhost: a\r\nidempotency-key: {key}\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
        ),
    )
}

/// Sends a POST until the response is neither `in-progress` nor `store-unavailable`.
pub(crate) fn post_until_resolved(address: SocketAddr, path: &str, key: &str) -> Reply {
    let began = Instant::now();
    loop {
        let reply = post(address, path, key, "1");
        if !reply.is_problem("in-progress") && !reply.is_problem("store-unavailable") {
            return reply;
        }
        assert!(began.elapsed() < HANG_GUARD, "{reply:?}");
        thread::sleep(Duration::from_millis(20));
    }
}
