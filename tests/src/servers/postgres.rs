//! PostgreSQL servers.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};

use super::{
    Guard, as_user, certificates::Certificates, directory, set_owner, start_on_free_port, template,
    tool, until_ready,
};
use crate::{playground::run, scratch::Scratch};

/// Returns the server that the tests of one binary share. It is empty at first, and ends with the process.
///
/// # Panics
///
/// Like [`PostgresServer::start`].
pub fn shared() -> &'static PostgresServer {
    static SHARED: OnceLock<PostgresServer> = OnceLock::new();
    SHARED.get_or_init(|| PostgresServer::start(&[]))
}

/// A running PostgreSQL, with a superuser `app`; killed when it is dropped.
#[derive(Debug)]
pub struct PostgresServer {
    guard: Guard,
    port: u16,
    settings: Vec<String>,
    /// The certificates of a server with TLS.
    files: Option<Scratch>,
}

impl PostgresServer {
    /// Starts a server on a free port and waits until it is ready. Its data survives a kill of the server, but not a
    /// power failure. `settings` are of the form `name=value`, such as `log_statement=all`.
    ///
    /// # Panics
    ///
    /// Panics if PostgreSQL is not installed, or does not start.
    #[must_use]
    pub fn start(settings: &[&str]) -> Self {
        let settings: Vec<_> = settings.iter().map(|it| (*it).to_owned()).collect();
        let directory = directory("postgres");
        let (port, guard) = start_on_free_port(
            |port| {
                fs::create_dir_all(&directory).expect("a directory for throwaway files");
                initialize(&directory);
                Guard::start(&directory, &command(&directory, port, &settings), "QUIT")
            },
            |_, guard| is_ready(guard),
        );
        Self {
            guard,
            port,
            settings,
            files: None,
        }
    }

    /// Like [`start`](Self::start), with TLS. The authority of the certificate is new, so no client knows it.
    ///
    /// # Panics
    ///
    /// Like [`start`](Self::start), and if there is no `openssl`.
    #[must_use]
    pub fn start_with_tls() -> Self {
        let files = Scratch::new();
        let made = Certificates::make(files.path());
        set_owner(files.path(), USER);
        let certificate = format!("ssl_cert_file={}", made.certificate().display());
        let key = format!("ssl_key_file={}", made.key().display());
        let mut server = Self::start(&["ssl=on", &certificate, &key]);
        server.files = Some(files);
        server
    }

    /// Returns the URL of its database.
    #[must_use]
    pub fn url(&self) -> String {
        format!("postgres://app@{}/postgres", self.address())
    }

    /// Returns the address of the server.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// Returns the log of the server.
    #[must_use]
    pub fn log(&self) -> String {
        self.guard.log()
    }

    /// Sends SIGSTOP to the process that accepts connections: clients that are already connected are still served.
    ///
    /// # Panics
    ///
    /// Panics if it was killed.
    pub fn pause(&self) {
        self.guard.signal("STOP");
    }

    /// Sends SIGCONT.
    ///
    /// # Panics
    ///
    /// Panics if it was killed.
    pub fn resume(&self) {
        self.guard.signal("CONT");
    }

    /// Sends SIGKILL: the server has ended when this returns, until [`restart`](Self::restart).
    ///
    /// # Panics
    ///
    /// Panics if the guard's shell has ended.
    pub fn kill(&mut self) {
        // A stopped server starts no more backends.
        if !self.guard.has_ended() {
            self.guard.signal("STOP");
        }
        let backends = self.backends();
        self.guard.kill();
        // Backends serve their clients for a while after the postmaster has ended, so they are killed too.
        for backend in &backends {
            let _ = run("kill", ["-KILL", backend.as_str()]);
        }
        let deadline = Instant::now() + Duration::from_secs(60);
        while backends.iter().any(|backend| is_running(backend)) {
            assert!(Instant::now() < deadline, "a backend does not end");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Returns the processes of this server except the first one.
    fn backends(&self) -> Vec<String> {
        let pid = self.guard.pid();
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
        let children = children.unwrap_or_default();
        children.split_whitespace().map(str::to_owned).collect()
    }

    /// Kills it if it runs, and starts it again on the same port with the same data.
    ///
    /// # Panics
    ///
    /// Panics if it does not start.
    pub fn restart(&mut self) {
        self.kill();
        let directory = self.guard.directory().to_owned();
        // The old log would indicate that the server is ready before it is.
        let _ = fs::remove_file(directory.join("log"));
        let command = command(&directory, self.port, &self.settings);
        self.guard.replace(&command, "QUIT");
        let is_back = until_ready(&self.guard, || is_ready(&self.guard));
        assert!(is_back, "PostgreSQL does not restart:\n{}", self.log());
    }
}

/// Returns `true` if the process runs. A process that has ended may still have an entry if its parent has not waited for it.
fn is_running(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
    !state.is_empty() && !state.starts_with(['Z', 'X'])
}

fn initialize(directory: &Path) {
    set_owner(directory, USER);
    let data = directory.join("data");
    if data.exists() {
        return;
    }
    let mut initdb = as_user(USER, &find("initdb"));
    initdb.args(["--username=app", "--auth=trust", "--encoding=UTF8"]);
    initdb.args(["--locale=C", "--no-sync", "--no-instructions"]);
    let template = template::path(&find("postgres"), &initdb);
    initdb.arg("--pgdata").arg(&data);
    template::fill(&data, &template, &[], || {
        let program = initdb.get_program().to_str().expect("a path in UTF-8");
        let initialized = run(program, initdb.get_args());
        assert!(initialized.is_ok(), "{initialized:?}");
    });
    // The user may have had another id when the template was made.
    set_owner(&data, USER);
    // The first line that matches counts. Writing keeps the owner of the file.
    let rules = data.join("pg_hba.conf");
    let trusting = fs::read_to_string(&rules).expect("initdb writes it");
    let locked = "host all locked 127.0.0.1/32 scram-sha-256\n";
    fs::write(&rules, locked.to_owned() + &trusting).expect("a writable file");
}

fn command(directory: &Path, port: u16, settings: &[String]) -> Command {
    let mut command = as_user(USER, &find("postgres"));
    command.arg("-D").arg(directory.join("data"));
    let port = format!("port={port}");
    let own = [
        port.as_str(),
        "listen_addresses=127.0.0.1",
        "unix_socket_directories=",
        "max_connections=500",
        "shared_buffers=64MB",
        "fsync=off",
        "full_page_writes=off",
    ];
    for setting in own.into_iter().chain(settings.iter().map(String::as_str)) {
        command.args(["-c", setting]);
    }
    command
}

/// Another process may listen on the port, but only this server writes to this log.
fn is_ready(guard: &Guard) -> bool {
    guard
        .log()
        .contains("database system is ready to accept connections")
}

/// Returns the path where Debian installs the server, newest version first, if it is not in the PATH.
fn find(name: &str) -> PathBuf {
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten();
    let mut others: Vec<_> = versions
        .filter_map(|version| Some(version.ok()?.path().join("bin")))
        .collect();
    others.sort();
    others.reverse();
    tool(name, "postgresql", &others)
}

const USER: &str = "postgres";
