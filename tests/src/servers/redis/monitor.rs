//! Records all commands that a server receives.

use std::{
    io::{self, BufRead},
    time::Duration,
};

use super::{RedisServer, resp::Connection};

/// All commands of clients to a server, from its start until [`into_commands`](Self::into_commands).
#[derive(Debug)]
pub struct Monitor<'a> {
    server: &'a RedisServer,
    connection: Connection,
}

/// A command: its name in lower case, and its first argument, if there is one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReceivedCommand {
    /// The time of the server, since its epoch.
    pub at: Duration,
    /// The address of the client.
    pub client: String,
    /// The command, for example `evalsha`.
    pub name: String,
    /// The first argument, in the server's notation.
    pub first: String,
    /// The whole command as the server shows it.
    pub command: String,
}

impl<'a> Monitor<'a> {
    pub(super) fn start(server: &'a RedisServer, mut connection: Connection) -> io::Result<Self> {
        let refused = |error| io::Error::new(io::ErrorKind::PermissionDenied, error);
        connection.query(&["MONITOR"])?.map_err(refused)?;
        Ok(Self { server, connection })
    }

    /// Returns the commands of clients, in the order in which the server executed them. Commands called by scripts are not
    /// included.
    ///
    /// # Panics
    ///
    /// Panics if the server does not send them.
    #[must_use]
    pub fn into_commands(self) -> Vec<ReceivedCommand> {
        self.server.command(&["ECHO", THE_END]);
        let connection = self.connection.into_inner();
        let patience = Some(Duration::from_secs(60));
        let limited = connection.get_ref().set_read_timeout(patience);
        limited.expect("a socket");
        let lines = connection.lines();
        let lines = lines.map(|line| line.expect("a line of the monitor"));
        let commands = lines.filter(|line| !line.contains(" lua] "));
        let commands =
            commands.map(|line| ReceivedCommand::parse(&line).expect("a line of the monitor"));
        let commands = commands.take_while(|command| command.first != THE_END);
        commands.collect()
    }
}

impl ReceivedCommand {
    /// Reads a line such as `+1339518083.107412 [0 127.0.0.1:60866] "keys" "*"`.
    fn parse(line: &str) -> Option<Self> {
        let (origin, command) = line.split_once("] ")?;
        let (at, client) = origin.trim_start_matches('+').split_once(" [")?;
        let mut words = command.split('"').skip(1).step_by(2);
        let mut word = || words.next().unwrap_or_default().to_owned();
        Some(Self {
            at: Duration::from_secs_f64(at.parse().ok()?),
            client: client.split_once(' ')?.1.to_owned(),
            name: word().to_lowercase(),
            first: word(),
            command: command.to_owned(),
        })
    }
}

const THE_END: &str = "end-of-commands";
