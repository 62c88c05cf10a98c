//! Several playgrounds on one store, under load, while a striker kills or pauses them at any moment. The result is a
//! history.
//!
//! ```text
//! clients -> members (processes that strikes run_with_fault) -> store
//!    |          |
//! attempts    effects   ->   History, which the oracle judges
//! ```

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use tests::{
    playground,
    servers::{Guard, directory, start_on_free_port, until_ready},
};
use verification::oracle::{Attempt, Effect, History, Occasion, Strike};

pub use self::{
    load::{Load, StrikeKind},
    rounds::{Case, until_seen},
    stampede::Stampede,
};

mod client;
mod connection;
mod load;
mod rounds;
mod stampede;
mod strikes;

/// Playgrounds that share a store and a file of effects. All processes are stopped when this is dropped, and when the test
/// process ends.
#[derive(Debug)]
pub struct Fleet {
    members: Vec<Member>,
    effects: PathBuf,
}

/// A function that returns a command for a program with these arguments.
pub type Program = fn(&[&str]) -> Command;

/// A playground on one port, with its current process.
#[derive(Debug)]
struct Member {
    address: SocketAddr,
    program: Program,
    args: Vec<String>,
    running: Mutex<Guard>,
    /// The number of the running process, from 1.
    process: AtomicU64,
    /// The number of the last process that responded to a client.
    at_work: AtomicU64,
}

impl Fleet {
    /// Starts `size` playgrounds with these arguments, and a file for their effects. More than one playground needs a store
    /// that they can share.
    ///
    /// # Panics
    ///
    /// Panics if the playgrounds do not start.
    #[must_use]
    pub fn start(size: usize, args: &[&str]) -> Self {
        Self::of_playgrounds(playground::command, size, args)
    }

    /// Like [`start`](Self::start), but with playgrounds that were built elsewhere.
    ///
    /// # Panics
    ///
    /// Panics if the playgrounds do not start.
    #[must_use]
    pub fn of_playgrounds(program: Program, size: usize, args: &[&str]) -> Self {
        let first = directory("fleet");
        let effects = first.join("effects");
        let file = effects.display().to_string();
        let args = [&["--effects", &file], args].concat();
        Self::build(size, first, effects, program, &args)
    }

    /// Like [`start`](Self::start), but with another program. The program takes `--listen` and reports that it is ready
    /// like a playground does. It does not write its effects to a file.
    ///
    /// # Panics
    ///
    /// Panics if the processes do not start.
    #[must_use]
    pub fn of(program: Program, size: usize, args: &[&str]) -> Self {
        let first = directory("fleet");
        let effects = first.join("effects");
        Self::build(size, first, effects, program, args)
    }

    /// The first directory is dropped with the first member.
    fn build(
        size: usize,
        first: PathBuf,
        effects: PathBuf,
        program: Program,
        args: &[&str],
    ) -> Self {
        let mut first = Some(first);
        let members = (0..size).map(|_| {
            let directory = first.take().unwrap_or_else(|| directory("fleet"));
            Member::start(&directory, program, args)
        });
        Self {
            members: members.collect(),
            effects,
        }
    }

    /// Returns the addresses on which the members listen.
    #[must_use]
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.members.iter().map(|member| member.address).collect()
    }

    /// Returns the effects so far, in the order in which they happened.
    ///
    /// # Panics
    ///
    /// Panics if playgrounds did not write the file.
    #[must_use]
    pub fn effects(&self) -> Vec<Effect> {
        // The file does not exist before the first effect.
        let text = fs::read_to_string(&self.effects).unwrap_or_default();
        text.lines().map(Effect::parse).collect()
    }

    /// Returns the history of the fleet, once no client sends requests any more.
    fn history(
        &self,
        attempts: Vec<Attempt>,
        strikes: Vec<Strike>,
        occasions: Vec<Occasion>,
        lease: Duration,
    ) -> History {
        let struck = strikes.iter().map(|strike| (strike.pid, strike.member));
        let members = self.members.iter().zip(0..);
        let running = members.map(|(member, n)| (member.running().pid(), n));
        History {
            effects: self.effects(),
            processes: struck.chain(running).collect(),
            attempts,
            strikes,
            occasions,
            lease,
            max_reply_age: Duration::ZERO,
            retention: None,
            problems: &[],
        }
    }
}

impl Member {
    fn start(directory: &Path, program: Program, args: &[&str]) -> Self {
        let args_on = |port: u16| {
            let listen = format!("127.0.0.1:{port}");
            let own = ["--listen", &listen];
            let args = own.iter().chain(args).map(|&arg| arg.to_owned());
            args.collect::<Vec<_>>()
        };
        let (port, guard) = start_on_free_port(
            |port| {
                fs::create_dir_all(directory).expect("a directory for throwaway files");
                Guard::start(directory, &command(program, &args_on(port)), "KILL")
            },
            |_, guard| is_ready(guard, 1),
        );
        Self {
            address: ([127, 0, 0, 1], port).into(),
            program,
            args: args_on(port),
            running: Mutex::new(guard),
            process: AtomicU64::new(1),
            at_work: AtomicU64::new(0),
        }
    }

    /// Kills the process and starts another. See [`Strike`].
    fn kill(&self) -> (u32, Instant, Instant, Option<Instant>) {
        let mut running = self.running();
        let (pid, ordered) = (running.pid(), Instant::now());
        running.kill();
        self.process.fetch_add(1, Ordering::SeqCst);
        let down = Instant::now();
        let again = command(self.program, &self.args);
        // On a busy machine a process may exit because its store call timed out at startup. An operator of a service
        // would start another process.
        let is_back = (0..STARTS).any(|_| {
            let said = ready(&running);
            running.replace(&again, "KILL");
            until_ready(&running, || is_ready(&running, said + 1))
        });
        assert!(is_back, "the member does not restart:\n{}", running.log());
        (pid, ordered, down, None)
    }

    /// Returns `true` if the running process has responded to a client. Before that, a strike does not end an execution.
    fn has_responded(&self) -> bool {
        self.at_work.load(Ordering::SeqCst) == self.process.load(Ordering::SeqCst)
    }

    /// Stops the process for this duration. See [`Strike`].
    fn pause(&self, length: Duration) -> (u32, Instant, Instant, Option<Instant>) {
        let running = self.running();
        let ordered = Instant::now();
        running.signal("STOP");
        let down = Instant::now();
        thread::sleep(length);
        let resumed = Instant::now();
        running.signal("CONT");
        (running.pid(), ordered, down, Some(resumed))
    }

    fn running(&self) -> MutexGuard<'_, Guard> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn command(program: Program, args: &[String]) -> Command {
    let args: Vec<_> = args.iter().map(String::as_str).collect();
    program(&args)
}

fn is_ready(guard: &Guard, starts: usize) -> bool {
    ready(guard) == starts
}

/// Returns the number of processes in this log that reported that they are ready.
fn ready(guard: &Guard) -> usize {
    guard.log().matches("listening on http://").count()
}

const STARTS: usize = 5;
