//! MariaDB servers, which also stand in for MySQL: the stores send only statements that both support.
//!
//! With the program of a MySQL server in the environment variable `MYSQLD`, such as `/usr/sbin/mysqld`, the servers are MySQL.

use std::{
    env, fs,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
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
/// Like [`MariaDbServer::start`].
pub fn shared() -> &'static MariaDbServer {
    static SHARED: OnceLock<MariaDbServer> = OnceLock::new();
    SHARED.get_or_init(|| MariaDbServer::start(&[]))
}

/// Returns the URL of the servers' database at this address, which may be that of a proxy.
///
/// The user of MySQL has no password: without TLS, the driver sends none to it.
#[must_use]
pub fn url(address: SocketAddr) -> String {
    if is_mysql() {
        format!("mysql://app@{address}/app")
    } else {
        format!("mysql://app:{PASSWORD}@{address}/app")
    }
}

/// Returns `true` if the servers are MySQL.
#[must_use]
pub fn is_mysql() -> bool {
    mysqld().is_some()
}

/// A running MariaDB, with a user `app` that has all rights and a database of that name. It is killed when it is dropped.
#[derive(Debug)]
pub struct MariaDbServer {
    guard: Guard,
    port: u16,
    settings: Vec<String>,
    /// The certificates of a server with TLS.
    files: Option<Scratch>,
}

impl MariaDbServer {
    /// Starts a server on a free port and waits until it is ready. Its data survives a kill of the server, but not a
    /// power failure. `settings` are of the form `name=value`, such as `max_allowed_packet=1M`.
    ///
    /// # Panics
    ///
    /// Panics if MariaDB is not installed, or does not start.
    #[must_use]
    pub fn start(settings: &[&str]) -> Self {
        let settings: Vec<_> = settings.iter().map(|it| (*it).to_owned()).collect();
        let directory = directory("mariadb");
        let (port, guard) = start_on_free_port(
            |port| {
                fs::create_dir_all(&directory).expect("a directory for throwaway files");
                initialize(&directory);
                Guard::start(&directory, &command(&directory, port, &settings), "KILL")
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
        let certificate = format!("ssl-cert={}", made.certificate().display());
        let key = format!("ssl-key={}", made.key().display());
        // The last value of a setting counts. Without these, the server has no TLS.
        let mut server = Self::start(&["tls-version=TLSv1.2,TLSv1.3", &certificate, &key]);
        server.files = Some(files);
        server
    }

    /// Returns the URL of its database.
    #[must_use]
    pub fn url(&self) -> String {
        url(self.address())
    }

    /// Returns the address of the server.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// Sends SIGKILL: the server has ended when this returns, until [`restart`](Self::restart).
    ///
    /// # Panics
    ///
    /// Panics if the guard's shell has ended.
    pub fn kill(&mut self) {
        self.guard.kill();
    }

    /// Kills it if it runs, and starts it again on the same port with the same data.
    ///
    /// # Panics
    ///
    /// Panics if it does not start.
    pub fn restart(&mut self) {
        self.guard.kill();
        let directory = self.guard.directory().to_owned();
        // The old log would indicate that the server is ready before it is.
        let _ = fs::remove_file(directory.join("log"));
        let command = command(&directory, self.port, &self.settings);
        self.guard.replace(&command, "KILL");
        let is_back = until_ready(&self.guard, || is_ready(&self.guard));
        assert!(is_back, "MariaDB does not restart:\n{}", self.log());
    }
}

impl_process_control!(MariaDbServer);

fn initialize(directory: &Path) {
    let data = directory.join("data");
    if data.exists() {
        return;
    }
    // Each statement needs its own line.
    let password = if is_mysql() { "" } else { PASSWORD };
    let users = format!(
        "create database app;\n\
        create user app@'%' identified by '{password}';\n\
        grant all on *.* to app@'%' with grant option;\n"
    );
    fs::write(directory.join("users.sql"), users).expect("a throwaway file");
    // A server that starts deletes all temporary tables in its temporary directory, also those of other servers.
    fs::create_dir_all(directory.join(TEMPORARY)).expect("a throwaway directory");
    set_owner(directory, USER);
    let mut install = if is_mysql() {
        let mut install = as_user(USER, &server());
        install.args(["--no-defaults", "--initialize-insecure"]);
        install
    } else {
        let mut install = as_user(USER, &tool("mariadb-install-db", "mariadb-server", &[]));
        install.args(["--no-defaults", "--skip-test-db", "--skip-name-resolve"]);
        install.arg("--auth-root-authentication-method=normal");
        install
    };
    let template = template::path(&server(), &install);
    install.arg(format!("--datadir={}", data.display()));
    install.arg(format!("--tmpdir={}", directory.join(TEMPORARY).display()));
    // MySQL writes the UUID of a server to this file.
    template::fill(&data, &template, &["auto.cnf"], || {
        create(&data, &install);
    });
    // The user may have had another id when the template was made.
    set_owner(&data, USER);
}

/// Runs the command that creates the data directory.
fn create(data: &Path, install: &Command) {
    let program = install.get_program().to_str().expect("a path in UTF-8");
    // MariaDB sometimes ends with a segmentation fault here, before it serves any client.
    let mut installed = run(program, install.get_args());
    for _ in 0..2 {
        if installed.is_ok() {
            break;
        }
        fs::remove_dir_all(data).ok();
        installed = run(program, install.get_args());
    }
    assert!(installed.is_ok(), "{installed:?}");
}

fn command(directory: &Path, port: u16, settings: &[String]) -> Command {
    let mut command = as_user(USER, &server());
    let at = |name: &str| directory.join(name).display().to_string();
    let own = [
        format!("datadir={}", at("data")),
        format!("tmpdir={}", at(TEMPORARY)),
        format!("socket={}", at("socket")),
        format!("pid-file={}", at("pid")),
        format!("port={port}"),
        "bind-address=127.0.0.1".to_owned(),
        "skip-name-resolve".to_owned(),
        "max-connections=500".to_owned(),
        "innodb-buffer-pool-size=64M".to_owned(),
        "innodb-flush-log-at-trx-commit=2".to_owned(),
    ];
    command.arg("--no-defaults");
    if !directory.join("data/app").exists() {
        command.arg(format!("--init-file={}", at("users.sql")));
    }
    // The tests' proxies inspect the bytes, so there is no TLS unless the settings add it.
    let others: &[&str] = if is_mysql() {
        &[
            "tls-version=",
            "mysqlx=OFF",
            "skip-log-bin",
            "secure-file-priv=NULL",
        ]
    } else {
        &["skip-ssl"]
    };
    command.args(others.iter().map(|it| format!("--{it}")));
    for setting in own.iter().chain(settings) {
        command.arg(format!("--{setting}"));
    }
    command
}

/// Returns the program of the servers.
fn server() -> PathBuf {
    mysqld().unwrap_or_else(|| tool("mariadbd", "mariadb-server", &[PathBuf::from("/usr/sbin")]))
}

/// Returns the program of a MySQL server, if the tests use one.
fn mysqld() -> Option<PathBuf> {
    env::var_os("MYSQLD").map(PathBuf::from)
}

/// Another process may listen on the port, but only this server writes to this log.
fn is_ready(guard: &Guard) -> bool {
    guard.log().contains("ready for connections")
}

const USER: &str = "mysql";
/// The password of the user `app`.
const PASSWORD: &str = "app";
/// The directory for temporary tables, in that of the server.
const TEMPORARY: &str = "tmp";
