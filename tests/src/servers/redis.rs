//! Redis servers.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    io,
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    process::Command,
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};

use tower_idempotency_redis::{ConnectError, RedisOptions, RedisStore};

use self::resp::{Connection, Reply};
use super::{
    Guard, READY_WITHIN, certificates::Certificates, directory, free_port, start_on_free_port,
    tool, until_ready,
};

pub use self::{
    cluster::RedisCluster,
    monitor::{Monitor, ReceivedCommand},
    sentinel::Sentinel,
};

mod cluster;
mod monitor;
mod resp;
pub mod scripts;
mod sentinel;

/// Returns the server that the tests of one binary share. It is empty at first, and ends with the process.
///
/// Keys are random, so tests do not share entries. A test that stops or empties a server, or counts its calls, must
/// start its own.
///
/// # Panics
///
/// Like [`RedisServer::start`].
pub fn shared() -> &'static RedisServer {
    static SHARED: OnceLock<RedisServer> = OnceLock::new();
    SHARED.get_or_init(|| RedisServer::start(&[]))
}

/// A running Redis; killed when it is dropped.
#[derive(Debug)]
pub struct RedisServer {
    guard: Guard,
    port: u16,
    args: Vec<String>,
    tls: Option<(u16, Certificates)>,
}

impl RedisServer {
    /// Starts a server on a free port, without persistence, and waits until it replies. `args` are configuration, such
    /// as `["--appendonly", "yes"]`, and override the defaults.
    ///
    /// # Panics
    ///
    /// Panics if Redis is not installed, or does not start.
    #[must_use]
    pub fn start(args: &[&str]) -> Self {
        let args: Vec<_> = args.iter().map(|arg| (*arg).to_owned()).collect();
        Self::launch(|_| args.clone())
    }

    /// Like [`start`](Self::start), with TLS on a second port: see [`tls_url`](Self::tls_url) and
    /// [`certificates`](Self::certificates).
    ///
    /// # Panics
    ///
    /// Like [`start`](Self::start), and if there is no `openssl`.
    #[must_use]
    pub fn start_with_tls() -> Self {
        Self::launch_with_tls(Certificates::make, Vec::new)
    }

    /// Starts a replica of `primary` and waits until it has its data. Replication is asynchronous from then on.
    ///
    /// # Panics
    ///
    /// Like [`start`](Self::start), and if the replica does not get the data.
    #[must_use]
    pub fn replica_of(primary: &RedisServer) -> Self {
        let port = primary.port.to_string();
        let mut args = vec!["--replicaof", "127.0.0.1", &port];
        if let Some(password) = password(&primary.args) {
            args.extend(["--requirepass", password, "--masterauth", password]);
        }
        let replica = Self::start(&args);
        let deadline = Instant::now() + READY_WITHIN;
        while !replica.is_linked() {
            let log = replica.log();
            assert!(
                Instant::now() < deadline,
                "the replica is not connected:\n{log}"
            );
            thread::sleep(Duration::from_millis(10));
        }
        replica
    }

    /// Makes a replica a primary, like a failover: writes that have not reached the replica are lost.
    ///
    /// # Panics
    ///
    /// Like [`command`](Self::command).
    pub fn promote(&self) {
        self.command(&["REPLICAOF", "NO", "ONE"]);
    }

    /// Launches a server. Each attempt has its own directory, because its guard deletes the directory.
    fn launch(mut args: impl FnMut(&Path) -> Vec<String>) -> Self {
        let tried = RefCell::new(Vec::new());
        let (port, guard) = start_on_free_port(
            |port| {
                let directory = directory("redis");
                let args = args(&directory);
                let guard = Guard::start(&directory, &command(port, &args), "KILL");
                tried.replace(args);
                guard
            },
            |port, guard| responses(port, password(&tried.borrow()), guard),
        );
        Self {
            guard,
            port,
            args: tried.into_inner(),
            tls: None,
        }
    }

    fn launch_with_tls(
        certificates: impl Fn(&Path) -> Certificates,
        more: impl Fn() -> Vec<String>,
    ) -> Self {
        let mut tls = None;
        let mut server = Self::launch(|directory| {
            let (port, made) = (free_port(), certificates(directory));
            let display = |path: &Path| path.display().to_string();
            let mut args = owned(&[
                ["--tls-port", &port.to_string()],
                ["--tls-ca-cert-file", &display(made.ca())],
                ["--tls-cert-file", &display(made.certificate())],
                ["--tls-key-file", &display(made.key())],
                ["--tls-auth-clients", "no"],
            ]);
            args.extend(more());
            tls = Some((port, made));
            args
        });
        server.tls = tls;
        server
    }

    /// Returns the URL of its first database, including the password of `--requirepass`.
    #[must_use]
    pub fn url(&self) -> String {
        let address = self.address();
        match password(&self.args) {
            Some(password) => format!("redis://:{password}@{address}/0"),
            None => format!("redis://{address}/0"),
        }
    }

    /// Returns the address of the server.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// Returns the TLS address, by name: the certificate is valid for `localhost` and for `127.0.0.1`.
    ///
    /// # Panics
    ///
    /// Panics if it was not started with TLS.
    #[must_use]
    pub fn tls_url(&self) -> String {
        let (port, _) = self.tls.as_ref().expect("a server with TLS");
        format!("rediss://localhost:{port}/0")
    }

    /// Returns the certificates of a server with TLS.
    ///
    /// # Panics
    ///
    /// Panics if it was not started with TLS.
    #[must_use]
    pub fn certificates(&self) -> &Certificates {
        let (_, certificates) = self.tls.as_ref().expect("a server with TLS");
        certificates
    }

    /// Returns the process id of the server.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.guard.pid()
    }

    /// Sends SIGKILL: the server has ended when this returns, until [`restart`](Self::restart).
    ///
    /// # Panics
    ///
    /// Panics if the guard's shell has ended.
    pub fn kill(&mut self) {
        self.guard.kill();
    }

    /// Kills the server if it runs, and restarts it on the same port. It is empty, unless its configuration has persistence.
    ///
    /// # Panics
    ///
    /// Panics if it does not start.
    pub fn restart(&mut self) {
        self.guard.replace(&command(self.port, &self.args), "KILL");
        let ready = || responses(self.port, password(&self.args), &self.guard);
        let is_back = until_ready(&self.guard, ready);
        assert!(is_back, "Redis does not restart:\n{}", self.log());
    }

    /// Connects a store with the default options, and a timeout that is long enough for a busy machine.
    ///
    /// # Panics
    ///
    /// Panics if the store cannot connect: see [`until_connected`].
    pub async fn store(&self) -> RedisStore {
        let (options, url) = (RedisOptions::new().with_timeout(UNHURRIED), self.url());
        until_connected(|| options.clone().connect(&url)).await
    }

    /// Returns the reply to a command: numbers as text, nil as "", lists with a line for each element.
    ///
    /// # Panics
    ///
    /// Panics if the reply is an error, or does not arrive within 10 seconds.
    pub fn command<A: AsRef<[u8]>>(&self, args: &[A]) -> String {
        let response = self.try_command(args).expect("a reply from Redis");
        response.unwrap_or_else(|error| panic!("Redis refuses {}: {error}", display_args(args)))
    }

    /// Changes the rights of the user `service`, such as `+zadd -zrem`.
    ///
    /// # Panics
    ///
    /// Like [`command`](Self::command).
    pub fn permit(&self, rights: &str) {
        let mut user = vec!["ACL", "SETUSER", "service"];
        user.extend(rights.split_whitespace());
        self.command(&user);
    }

    /// Like [`command`](Self::command), on a separate connection, but returns failures: of the connection, or an error
    /// reply.
    ///
    /// # Errors
    ///
    /// Returns an error if the server cannot be reached, or does not reply for 10 seconds.
    pub fn try_command<A: AsRef<[u8]>>(&self, args: &[A]) -> io::Result<Result<String, String>> {
        let response = query(self.address(), password(&self.args), args)?;
        Ok(response.map(|reply| reply.text()))
    }

    /// Returns the elements of a reply that is a list, as bytes.
    ///
    /// # Panics
    ///
    /// Like [`command`](Self::command).
    pub fn list<A: AsRef<[u8]>>(&self, args: &[A]) -> Vec<Vec<u8>> {
        let response = query(self.address(), password(&self.args), args);
        let response = response.expect("a reply from Redis");
        response.expect("a valid command").elements()
    }

    /// Returns the keys of all entries, without those of their indexes.
    ///
    /// # Panics
    ///
    /// Like [`command`](Self::command).
    #[must_use]
    pub fn entries(&self) -> Vec<String> {
        let keys = self.list(&["KEYS", "*"]).into_iter();
        let keys = keys.map(|key| String::from_utf8(key).expect("a key in hexadecimal"));
        keys.filter(|key| !key.contains('~')).collect()
    }

    /// Starts recording the commands of clients.
    ///
    /// # Panics
    ///
    /// Panics if the server does not reply.
    #[must_use]
    pub fn monitor(&self) -> Monitor<'_> {
        let connection = Connection::open(self.address(), password(&self.args));
        let monitor = connection.and_then(|connection| Monitor::start(self, connection));
        monitor.expect("a reply from Redis")
    }

    /// Returns how often each command was called since the start, or since `CONFIG RESETSTAT`. Names are in lower case;
    /// those of subcommands are like `config|get`. Calls from scripts count as well.
    ///
    /// # Panics
    ///
    /// Like [`command`](Self::command).
    #[must_use]
    pub fn commandstats(&self) -> BTreeMap<String, u64> {
        let info = self.command(&["INFO", "commandstats"]);
        let calls = |line: &str| {
            let (name, figures) = line.strip_prefix("cmdstat_")?.split_once(':')?;
            let calls = figures.split(',').find_map(|it| it.strip_prefix("calls="));
            Some((name.to_owned(), calls?.parse().ok()?))
        };
        info.lines().filter_map(calls).collect()
    }

    /// Returns `true` if the server is a replica that has the data of its primary.
    fn is_linked(&self) -> bool {
        let info = fields(&self.command(&["INFO", "replication"]));
        info.get("master_link_status").is_some_and(|it| it == "up")
    }
}

impl_process_control!(RedisServer);

/// Repeats `connect` until the store is connected, which takes longer on a busy machine.
///
/// # Panics
///
/// Panics with the last error if the store does not connect within two minutes.
pub async fn until_connected<F>(connect: impl Fn() -> F) -> RedisStore
where
    F: Future<Output = Result<RedisStore, ConnectError>>,
{
    let began = Instant::now();
    loop {
        match connect().await {
            Ok(store) => return store,
            Err(error) => assert!(began.elapsed() < Duration::from_secs(120), "{error:?}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// The timeout of a store's calls in tests that do not test timeouts.
pub const UNHURRIED: Duration = Duration::from_secs(30);

fn command(port: u16, args: &[String]) -> Command {
    let mut command = Command::new(tool("redis-server", "redis-server", &[]));
    command
        .args(["--bind", "127.0.0.1", "--port", &port.to_string()])
        .args(["--save", "", "--appendonly", "no"])
        // A replica gets its data at once, without the delay of five seconds in which other replicas might join.
        .args(["--repl-diskless-sync-delay", "0"])
        .args(args);
    command
}

fn password(args: &[String]) -> Option<&str> {
    let at = args.iter().position(|arg| arg == "--requirepass")?;
    args.get(at + 1).map(String::as_str)
}

/// Returns `true` if this process replies on the port.
fn responses(port: u16, password: Option<&str>, guard: &Guard) -> bool {
    let address = (Ipv4Addr::LOCALHOST, port).into();
    let pid = format!("process_id:{}", guard.pid());
    let info = query(address, password, &["INFO", "server"]);
    matches!(info, Ok(Ok(info)) if info.text().lines().any(|line| line == pid))
        // While the server loads its persisted data, it rejects other commands.
        && matches!(query(address, password, &["PING"]), Ok(Ok(_)))
}

fn query<A: AsRef<[u8]>>(
    address: SocketAddr,
    password: Option<&str>,
    args: &[A],
) -> io::Result<Result<Reply, String>> {
    Connection::open(address, password)?.query(args)
}

fn owned(pairs: &[[&str; 2]]) -> Vec<String> {
    pairs
        .iter()
        .flatten()
        .map(|&word| word.to_owned())
        .collect()
}

/// Parses the lines `name:value` of a reply.
fn fields(text: &str) -> BTreeMap<String, String> {
    let fields = text.lines().filter_map(|line| line.split_once(':'));
    fields
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

fn display_args<A: AsRef<[u8]>>(args: &[A]) -> String {
    let args = args.iter().map(|arg| String::from_utf8_lossy(arg.as_ref()));
    args.collect::<Vec<_>>().join(" ")
}
