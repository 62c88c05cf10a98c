//! PgBouncer in front of a PostgreSQL server.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    process::Command,
};

use super::{
    Guard, as_user, directory, postgres::PostgresServer, set_owner, start_on_free_port, tool,
};

/// A running PgBouncer in transaction mode: it lends a server connection for one transaction at a time. It is killed
/// when it is dropped.
#[derive(Debug)]
pub struct PgBouncer {
    guard: Guard,
    port: u16,
}

impl PgBouncer {
    /// Starts PgBouncer on a free port, with at most `connections` to the server, and waits until it is ready.
    ///
    /// # Panics
    ///
    /// Panics if PgBouncer is not installed, or does not start.
    #[must_use]
    pub fn start(server: &PostgresServer, connections: u32) -> Self {
        let directory = directory("pgbouncer");
        let (port, guard) = start_on_free_port(
            |port| {
                fs::create_dir_all(&directory).expect("a directory for throwaway files");
                let configured = configuration(server.address(), port, connections);
                let file = directory.join("pgbouncer.ini");
                fs::write(&file, configured).expect("a throwaway file");
                fs::write(directory.join("users"), "\"app\" \"\"\n").expect("a throwaway file");
                set_owner(&directory, USER);
                Guard::start(&directory, &command(), "KILL")
            },
            |_, guard| guard.log().contains("process up"),
        );
        Self { guard, port }
    }

    /// Returns the URL of the server's database, through the pooler.
    #[must_use]
    pub fn url(&self) -> String {
        format!("postgres://app@{}/postgres", self.address())
    }

    /// Returns the address of PgBouncer.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// Returns the log of PgBouncer.
    #[must_use]
    pub fn log(&self) -> String {
        self.guard.log()
    }
}

fn command() -> Command {
    let mut command = as_user(
        USER,
        &tool("pgbouncer", "pgbouncer", &[PathBuf::from("/usr/sbin")]),
    );
    command.arg("pgbouncer.ini");
    command
}

fn configuration(server: SocketAddr, port: u16, connections: u32) -> String {
    format!(
        "[databases]\n\
         postgres = host={} port={} dbname=postgres user=app\n\
         [pgbouncer]\n\
         listen_addr = 127.0.0.1\n\
         listen_port = {port}\n\
         unix_socket_dir =\n\
         auth_type = trust\n\
         auth_file = users\n\
         pool_mode = transaction\n\
         default_pool_size = {connections}\n\
         max_client_conn = 1000\n\
         ignore_startup_parameters = extra_float_digits\n",
        server.ip(),
        server.port(),
    )
}

const USER: &str = "postgres";
