//! Redis servers.

use std::{
    collections::BTreeMap,
    io::{self, BufRead, BufReader, Write},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    process::Command,
    sync::OnceLock,
    time::Duration,
};

use super::{Guard, directory, on_a_free_port, tool, until_ready};

/// The server that the tests of one binary share. It is empty at first, and ends with the process.
///
/// Keys are random, so nobody meets anybody else's; who stops it, empties it or counts its calls starts another.
///
/// # Panics
///
/// As [`RedisServer::start`].
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
}

impl RedisServer {
    /// Starts one on a free port, without persistence, and waits until it answers. `args` are configuration, such as
    /// `["--appendonly", "yes"]`, and win over that.
    ///
    /// # Panics
    ///
    /// When Redis is not installed, or does not start.
    #[must_use]
    pub fn start(args: &[&str]) -> Self {
        let args: Vec<_> = args.iter().map(|arg| (*arg).to_owned()).collect();
        let directory = directory("redis");
        let (port, guard) = on_a_free_port(
            |port| Guard::start(&again(&directory), &command(port, &args), "KILL"),
            |port, guard| answers(port, password(&args), guard),
        );
        Self { guard, port, args }
    }

    /// Where it listens, as an URL of its first database; with the password of `--requirepass`.
    #[must_use]
    pub fn url(&self) -> String {
        let address = self.address();
        match password(&self.args) {
            Some(password) => format!("redis://:{password}@{address}/0"),
            None => format!("redis://{address}/0"),
        }
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.guard.pid()
    }

    /// What it has logged.
    #[must_use]
    pub fn log(&self) -> String {
        self.guard.log()
    }

    /// SIGSTOP: its connections stay open, and nothing is answered.
    ///
    /// # Panics
    ///
    /// When it was killed.
    pub fn pause(&self) {
        self.guard.signal("STOP");
    }

    /// SIGCONT: it answers what has arrived meanwhile, whether or not anybody still waits.
    ///
    /// # Panics
    ///
    /// When it was killed.
    pub fn resume(&self) {
        self.guard.signal("CONT");
    }

    /// SIGKILL: it is gone when this returns, until [`restart`](Self::restart).
    ///
    /// # Panics
    ///
    /// When there is nobody to do it.
    pub fn kill(&mut self) {
        self.guard.kill();
    }

    /// Kills it if it runs, and starts it again on the same port: empty, unless its configuration has persistence.
    ///
    /// # Panics
    ///
    /// When it does not start.
    pub fn restart(&mut self) {
        self.guard.replace(&command(self.port, &self.args), "KILL");
        let ready = || answers(self.port, password(&self.args), &self.guard);
        let is_back = until_ready(&self.guard, ready);
        assert!(is_back, "Redis does not come back:\n{}", self.log());
    }

    /// What it answers to a command: numbers as text, nothing as "", lists a line for each element.
    ///
    /// # Panics
    ///
    /// When it answers with an error, or not within 10 seconds.
    pub fn command<A: AsRef<[u8]>>(&self, args: &[A]) -> String {
        let answer = self.try_command(args).expect("an answer from Redis");
        answer.unwrap_or_else(|error| panic!("Redis refuses {}: {error}", shown(args)))
    }

    /// As [`command`](Self::command), on a connection of its own, where it may fail: on the way, or by an answer that is
    /// an error.
    ///
    /// # Errors
    ///
    /// When it cannot be reached, or is silent for 10 seconds.
    pub fn try_command<A: AsRef<[u8]>>(&self, args: &[A]) -> io::Result<Result<String, String>> {
        ask(self.address(), password(&self.args), args)
    }

    /// How often it was asked each command since it started, or since `CONFIG RESETSTAT`. Names are in lower case;
    /// those of subcommands as in `config|get`. What scripts call counts as well.
    ///
    /// # Panics
    ///
    /// As [`command`](Self::command).
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
}

/// Of several tries each has its directory to itself: a guard takes it with it.
fn again(directory: &std::path::Path) -> std::path::PathBuf {
    std::fs::create_dir_all(directory).expect("a directory for throwaway files");
    directory.to_owned()
}

fn command(port: u16, args: &[String]) -> Command {
    let mut command = Command::new(tool("redis-server", "redis-server", &[]));
    command
        .args(["--bind", "127.0.0.1", "--port", &port.to_string()])
        .args(["--save", "", "--appendonly", "no"])
        .args(args);
    command
}

fn password(args: &[String]) -> Option<&str> {
    let at = args.iter().position(|arg| arg == "--requirepass")?;
    args.get(at + 1).map(String::as_str)
}

/// Whether it is this process that answers on the port.
fn answers(port: u16, password: Option<&str>, guard: &Guard) -> bool {
    let address = (Ipv4Addr::LOCALHOST, port).into();
    let pid = format!("process_id:{}", guard.pid());
    let info = ask(address, password, &["INFO", "server"]);
    matches!(info, Ok(Ok(info)) if info.lines().any(|line| line == pid))
        // While it loads what was persisted it answers that only.
        && matches!(ask(address, password, &["PING"]), Ok(Ok(_)))
}

fn ask<A: AsRef<[u8]>>(
    address: SocketAddr,
    password: Option<&str>,
    args: &[A],
) -> io::Result<Result<String, String>> {
    let patience = Duration::from_secs(10);
    let stream = TcpStream::connect_timeout(&address, patience)?;
    stream.set_read_timeout(Some(patience))?;
    stream.set_nodelay(true)?;
    let mut stream = BufReader::new(stream);
    if let Some(password) = password {
        stream.get_mut().write_all(&encode(&["AUTH", password]))?;
        if let Err(error) = reply(&mut stream)? {
            return Ok(Err(error));
        }
    }
    stream.get_mut().write_all(&encode(args))?;
    reply(&mut stream)
}

fn encode<A: AsRef<[u8]>>(args: &[A]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", args.len()).into_bytes();
    for arg in args.iter().map(AsRef::as_ref) {
        bytes.extend_from_slice(format!("${}\r\n", arg.len()).as_bytes());
        bytes.extend_from_slice(arg);
        bytes.extend_from_slice(b"\r\n");
    }
    bytes
}

/// One reply of RESP 2.
fn reply(stream: &mut impl BufRead) -> io::Result<Result<String, String>> {
    let unexpected = || io::Error::new(io::ErrorKind::InvalidData, "no reply of Redis");
    let mut line = String::new();
    stream.read_line(&mut line)?;
    let line = line.strip_suffix("\r\n").ok_or_else(unexpected)?;
    let (kind, rest) = line.split_at_checked(1).ok_or_else(unexpected)?;
    let length = || rest.parse::<i64>().map_err(|_| unexpected());
    match kind {
        "+" | ":" => Ok(Ok(rest.to_owned())),
        "-" => Ok(Err(rest.to_owned())),
        "$" => {
            let Ok(length) = usize::try_from(length()?) else {
                return Ok(Ok(String::new()));
            };
            let mut bytes = vec![0; length + 2];
            stream.read_exact(&mut bytes)?;
            Ok(Ok(String::from_utf8_lossy(&bytes[..length]).into_owned()))
        }
        "*" => {
            let mut lines = Vec::new();
            for _ in 0..length()? {
                match reply(stream)? {
                    Ok(element) => lines.push(element),
                    Err(error) => return Ok(Err(error)),
                }
            }
            Ok(Ok(lines.join("\n")))
        }
        _ => Err(unexpected()),
    }
}

fn shown<A: AsRef<[u8]>>(args: &[A]) -> String {
    let args = args.iter().map(|arg| String::from_utf8_lossy(arg.as_ref()));
    args.collect::<Vec<_>>().join(" ")
}
