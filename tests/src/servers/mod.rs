//! Throwaway servers: real processes on free ports of this machine. They end with the test process, even if it is
//! killed.

use std::{
    collections::VecDeque,
    env,
    ffi::OsStr,
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{Ipv4Addr, TcpListener, UdpSocket},
    path::{Path, PathBuf},
    process::{Child, ChildStderr, ChildStdin, Command, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crate::playground::run;

/// Adds the methods that control the process in `guard`.
macro_rules! impl_process_control {
    ($server:ty) => {
        impl $server {
            /// Returns the output of the server.
            #[must_use]
            pub fn log(&self) -> String {
                self.guard.log()
            }

            /// Sends SIGSTOP: the connections stay open, and the server no longer replies.
            ///
            /// # Panics
            ///
            /// Panics if it was killed.
            pub fn pause(&self) {
                self.guard.signal("STOP");
            }

            /// Sends SIGCONT: the server replies to the requests that arrived meanwhile, even if the client has stopped
            /// waiting.
            ///
            /// # Panics
            ///
            /// Panics if it was killed.
            pub fn resume(&self) {
                self.guard.signal("CONT");
            }
        }
    };
}

pub mod certificates;
pub mod dynamodb;
pub mod mariadb;
pub mod pgbouncer;
pub mod postgres;
pub mod redis;
mod template;

/// A process in a throwaway directory. Both are removed when this is dropped, and when the test process ends, even if it is
/// killed.
///
/// A shell runs between the two, because some process must outlive the test process to clean up. The shell reads from a
/// pipe, and only the test process has the other end. The pipe therefore ends with the test process, even if that is
/// killed. The shell is also the parent of the process. The process id cannot be reused until the shell is notified to
/// wait for the process.
#[derive(Debug)]
pub struct Guard {
    shell: Child,
    orders: Option<ChildStdin>,
    responses: BufReader<ChildStderr>,
    directory: PathBuf,
    pid: u32,
    ended: Arc<AtomicBool>,
}

impl Guard {
    /// Runs `command` in `directory`, which is deleted when the guard is dropped; see [`directory`]. The output goes to
    /// the file `log` there.
    ///
    /// `signal` is the signal that ends the command, without `SIG`: `KILL`, or another one if a server must end its own
    /// processes.
    ///
    /// # Panics
    ///
    /// Panics if there is no shell, or the directory does not exist.
    #[must_use]
    pub fn start(directory: &Path, command: &Command, signal: &str) -> Self {
        let args = [directory.as_os_str(), OsStr::new(signal)];
        let mut shell = shell(SHELL, &args, command);
        shell
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        // A terminal ends a whole process group. The shell gets its own group, so that it can clean up.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut shell, 0);
        let mut shell = shell.spawn().expect("sh is needed");
        let orders = shell.stdin.take();
        let responses = BufReader::new(shell.stderr.take().expect("a piped stderr"));
        let mut stdout = BufReader::new(shell.stdout.take().expect("a piped stdout"));
        let mut line = String::new();
        stdout.read_line(&mut line).expect("a line from the shell");
        let Ok(pid) = line.trim_end().parse() else {
            panic!("nothing was started in {}", directory.display());
        };
        let ended = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&ended);
        // After this line, only the process has the other end of the pipe. It never writes to it.
        thread::spawn(move || {
            let _ = stdout.read_to_end(&mut Vec::new());
            seen.store(true, Ordering::SeqCst);
        });
        Self {
            shell,
            orders,
            responses,
            directory: directory.to_owned(),
            pid,
            ended,
        }
    }

    /// Returns the id of the process itself, not of the shell.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Returns the directory of the process.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns the output of the process, on stdout and on stderr.
    #[must_use]
    pub fn log(&self) -> String {
        let log = fs::read(self.directory.join("log")).unwrap_or_default();
        String::from_utf8_lossy(&log).into_owned()
    }

    /// Returns `true` if the process has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }

    /// Sends a signal to the process, named without `SIG`. If the signal is `STOP`, waits until the process has
    /// stopped.
    ///
    /// The directory has a file `stopped` from `STOP` to `CONT`, because `scripts/soak` stops and continues processes too.
    ///
    /// # Panics
    ///
    /// Panics if the process was [killed](Self::kill) before, or the file cannot be created.
    pub fn signal(&self, signal: &str) {
        let stopped = self.directory.join("stopped");
        match signal {
            "STOP" => fs::write(stopped, "").expect("a throwaway directory"),
            "CONT" => drop(fs::remove_file(stopped)),
            _ => {}
        }
        let sent = run("kill", [&format!("-{signal}"), &self.pid.to_string()]);
        assert!(sent.is_ok(), "{sent:?}");
        if signal == "STOP" {
            self.wait_until_stopped();
        }
    }

    /// Ends the process with SIGKILL and waits for its end. The directory stays until this guard is dropped, or the
    /// guard of the next process in the directory.
    ///
    /// # Panics
    ///
    /// Panics if the shell has ended.
    pub fn kill(&mut self) {
        let orders = self.orders.as_mut().expect("taken only when dropped");
        orders.write_all(b"kill\n").expect("the shell is there");
        let mut line = String::new();
        while line != "killed\n" {
            line.clear();
            let read = self.responses.read_line(&mut line);
            assert!(read.expect("text") > 0, "the shell is there");
        }
        self.ended.store(true, Ordering::SeqCst);
    }

    /// Ends the process like [`kill`](Self::kill), and runs `command` in the same directory.
    ///
    /// # Panics
    ///
    /// Panics if the shell has ended.
    pub fn replace(&mut self, command: &Command, signal: &str) {
        self.kill();
        let mut former = std::mem::replace(self, Self::start(&self.directory, command, signal));
        let mut orders = former.orders.take().expect("taken only when dropped");
        orders.write_all(b"keep\n").expect("the shell is there");
    }

    /// Waits until the signal has arrived, if the system shows that: the signal may still be pending when `kill` ends.
    fn wait_until_stopped(&self) {
        let stat = format!("/proc/{}/stat", self.pid);
        let deadline = Instant::now() + Duration::from_secs(60);
        while let Ok(text) = fs::read_to_string(&stat) {
            // The process name before the state is in parentheses and may contain any character.
            let state = text.rsplit_once(") ").map_or("", |(_, rest)| rest);
            if state.starts_with(['T', 'Z', 'X']) {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "process {} does not stop",
                self.pid
            );
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.orders.take();
        let _ = self.shell.wait();
    }
}

/// Returns a shell that runs `script`. The parameters of the script are `args`, and then the words of the command. The shell
/// has the environment and the directory of the command.
pub(crate) fn shell(script: &str, args: &[&OsStr], command: &Command) -> Command {
    let mut shell = Command::new("sh");
    shell
        .args(["-c", script, "guard"])
        .args(args)
        .arg(command.get_program())
        .args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    if let Some(directory) = command.get_current_dir() {
        shell.current_dir(directory);
    }
    shell
}

/// Creates a throwaway directory, which a [`Guard`] deletes later.
///
/// # Panics
///
/// Panics if it cannot be created.
#[must_use]
pub fn directory(name: &str) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let (pid, n) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let directory = env::temp_dir().join(format!("tower-idempotency-{name}-{pid}-{n}"));
    // An earlier process with the same id may have left the directory, if it was killed together with its shell.
    let _ = fs::remove_dir_all(&directory);
    fs::create_dir(&directory).expect("a directory for throwaway files");
    directory
}

/// Finds a tool in the PATH, or in one of the other directories.
///
/// # Panics
///
/// Panics if the tool is not found: the message names the tool and its package.
#[must_use]
pub fn tool(name: &str, package: &str, others: &[PathBuf]) -> PathBuf {
    let path = env::var_os("PATH").unwrap_or_default();
    let mut directories = env::split_paths(&path).chain(others.iter().cloned());
    directories
        .find_map(|directory| Some(directory.join(name)).filter(|tool| tool.is_file()))
        .unwrap_or_else(|| panic!("{name} is not installed: install {package}"))
}

/// Starts a server on a free port. Tries another port if the server ends before it is ready, for example because another
/// process has taken the port meanwhile.
///
/// `ready` is called repeatedly. It must check that the reply comes from this server and not from that other process.
///
/// # Panics
///
/// Panics if it is not ready within three minutes, or ends on each of several ports: the message contains its output.
pub fn start_on_free_port(
    mut start: impl FnMut(u16) -> Guard,
    ready: impl Fn(u16, &Guard) -> bool,
) -> (u16, Guard) {
    let mut said = String::new();
    for _ in 0..5 {
        let port = free_port();
        let guard = start(port);
        if until_ready(&guard, || ready(port, &guard)) {
            return (port, guard);
        }
        said = guard.log();
    }
    panic!("the server does not start:\n{said}");
}

/// Waits until a server is ready. Returns `false` if the server ends before that.
///
/// # Panics
///
/// Panics if it is not ready within three minutes: the message contains its output.
pub fn until_ready(guard: &Guard, ready: impl Fn() -> bool) -> bool {
    let deadline = Instant::now() + READY_WITHIN;
    while !ready() {
        if guard.has_ended() {
            return false;
        }
        assert!(
            Instant::now() < deadline,
            "the server is not ready:\n{}",
            guard.log()
        );
        thread::sleep(Duration::from_millis(5));
    }
    true
}

/// Returns a port with no listener, below the range that systems assign to clients. While a server restarts, no
/// connection can take its port. No other test gets the port either, until the process that requested it ends.
///
/// # Panics
///
/// Panics if no port is free.
#[must_use]
pub fn free_port() -> u16 {
    use std::hash::{BuildHasher, RandomState};
    // The test process reserves the port number for UDP, which no server here uses, and gives the number to a TCP server.
    static GIVEN: Mutex<VecDeque<UdpSocket>> = Mutex::new(VecDeque::new());
    let random = RandomState::new();
    let free = |port: &u16| {
        let Ok(given) = UdpSocket::bind((Ipv4Addr::LOCALHOST, *port)) else {
            return false;
        };
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok();
        if free {
            let mut all = GIVEN.lock().unwrap_or_else(PoisonError::into_inner);
            all.push_back(given);
            // A process may start servers for hours, but can open only a limited number of files.
            if all.len() > MOST_GIVEN {
                all.pop_front();
            }
        }
        free
    };
    (0..1000)
        .map(|i| 10_000 + (random.hash_one(i) % 22_000) as u16)
        .find(free)
        .expect("a free port")
}

/// Returns a command that runs `program` as this user if the test runs as root. Database servers refuse to run as root.
#[must_use]
pub fn as_user(user: &str, program: &Path) -> Command {
    if !is_root() {
        return Command::new(program);
    }
    let mut command = Command::new(tool("setpriv", "util-linux", &[]));
    command.args(["--reuid", user, "--regid", user, "--init-groups", "--"]);
    command.arg(program);
    command
}

/// Changes the owner of a directory and its contents to this user, if the test runs as root.
///
/// # Panics
///
/// Panics if there is no such user.
pub fn set_owner(directory: &Path, user: &str) {
    if is_root() {
        let owner = format!("{user}:");
        let given = run(
            "chown",
            ["-R", owner.as_str(), &directory.to_string_lossy()],
        );
        assert!(given.is_ok(), "{given:?}");
    }
}

fn is_root() -> bool {
    run("id", ["-u"]).is_ok_and(|id| id == b"0\n")
}

/// The number of ports that a process reserves, greater than the number of servers in any test.
const MOST_GIVEN: usize = 200;

/// The time limit for the start of a server. A server that ends is detected at once, so only an overloaded machine
/// needs this time.
pub(crate) const READY_WITHIN: Duration = Duration::from_secs(180);

/// Copies the log to the directory in `SERVER_LOGS`, if it is set. `"$@"` is the command. Its fd 3 is a pipe that no
/// other process has open, so the end of the pipe is the end of the command.
const SHELL: &str = r#"
directory=$1 signal=$2
shift 2
cd "$directory" || exit
"$@" 3>&1 >>log 2>&1 </dev/null &
server=$!
echo "$server"
exec >/dev/null
while read -r order; do
    case $order in
    kill)
        kill -KILL "$server" 2>/dev/null
        wait "$server" 2>/dev/null
        server=
        echo killed >&2
        ;;
    keep) exit ;;
    esac
done
if [ -n "$server" ]; then
    kill -"$signal" "$server" 2>/dev/null
    kill -CONT "$server" 2>/dev/null
    wait "$server" 2>/dev/null
fi
if [ -n "$SERVER_LOGS" ]; then
    cp log "$SERVER_LOGS/${directory##*/}.log" 2>/dev/null
fi
cd /
rm -rf "$directory"
"#;
