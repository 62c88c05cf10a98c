//! Listening to all that a server is asked.

use std::io::{self, BufRead};

use super::{RedisServer, resp::Connection};

/// All that clients ask a server, from its start until [`asked`](Self::asked).
#[derive(Debug)]
pub struct Monitor<'a> {
    server: &'a RedisServer,
    connection: Connection,
}

/// A command: its name in lower case, and the first of what follows it, if anything does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// As in `evalsha`.
    pub name: String,
    /// As the server shows it.
    pub first: String,
}

impl<'a> Monitor<'a> {
    pub(super) fn start(server: &'a RedisServer, mut connection: Connection) -> io::Result<Self> {
        let refused = |error| io::Error::new(io::ErrorKind::PermissionDenied, error);
        connection.ask(&["MONITOR"])?.map_err(refused)?;
        Ok(Self { server, connection })
    }

    /// What clients asked, in the order in which the server did it. What their scripts call is not among it.
    ///
    /// # Panics
    ///
    /// When the server does not show it.
    #[must_use]
    pub fn asked(self) -> Vec<Asked> {
        self.server.command(&["ECHO", THE_END]);
        let lines = self.connection.into_inner().lines();
        let lines = lines.map(|line| line.expect("a line of the monitor"));
        let commands = lines.filter(|line| !line.contains(" lua] "));
        let asked = commands.map(|line| {
            let mut words = line.split('"').skip(1).step_by(2);
            let mut word = || words.next().unwrap_or_default().to_owned();
            Asked {
                name: word().to_lowercase(),
                first: word(),
            }
        });
        asked.take_while(|asked| asked.first != THE_END).collect()
    }
}

const THE_END: &str = "the-end-of-what-was-asked";
