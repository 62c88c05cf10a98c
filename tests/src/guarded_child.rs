//! Child processes that end with the test process, even if it is killed.

use std::{
    io::Write,
    process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use crate::{HANG_GUARD, servers::shell};

/// A child process without input. It is killed when this is dropped, and when the test process ends, even if that is killed.
///
/// Without a guard, a child survives a test process that is killed. If the child has inherited the output of the test
/// process, the readers of that output wait for the child.
///
/// A shell starts a watcher, and the command then replaces the shell. So the process id, the output and the exit status are
/// those of the command. The watcher reads from a pipe, like the shell of a [`Guard`](crate::servers::Guard). The pipe ends
/// with the test process, and the watcher then kills the command. After the end of the command, the test process ends the
/// watcher first, because the process id may be used again.
#[derive(Debug)]
pub struct GuardedChild {
    child: Child,
    watcher: ChildStdin,
}

impl GuardedChild {
    /// Starts a command with its arguments, environment and directory. `stdout` and `stderr` replace those of the command.
    ///
    /// # Panics
    ///
    /// Panics if there is no shell.
    #[must_use]
    pub fn spawn(command: &Command, stdout: Stdio, stderr: Stdio) -> Self {
        let mut shell = shell(SHELL, &[], command);
        let mut child = shell
            .stdin(Stdio::piped())
            .stdout(stdout)
            .stderr(stderr)
            .spawn()
            .expect("sh is needed");
        let watcher = child.stdin.take().expect("a piped stdin");
        Self { child, watcher }
    }

    /// Returns the process id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns the pipe of the output.
    ///
    /// # Panics
    ///
    /// Panics if the output is not piped, or at a second call.
    pub fn stdout(&mut self) -> ChildStdout {
        self.child.stdout.take().expect("a piped stdout")
    }

    /// Returns the pipe of the error output.
    ///
    /// # Panics
    ///
    /// Panics if the error output is not piped, or at a second call.
    pub fn stderr(&mut self) -> ChildStderr {
        self.child.stderr.take().expect("a piped stderr")
    }

    /// Returns the exit status if the process has ended.
    ///
    /// # Panics
    ///
    /// Panics if the system does not know the process.
    pub fn try_wait(&mut self) -> Option<ExitStatus> {
        let status = self.child.try_wait().expect("a child process");
        if status.is_some() {
            self.end_watcher();
        }
        status
    }

    /// Waits for the end of the process.
    ///
    /// # Panics
    ///
    /// Panics if the process does not end within [`HANG_GUARD`].
    pub fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + HANG_GUARD;
        loop {
            if let Some(status) = self.try_wait() {
                return status;
            }
            assert!(Instant::now() < deadline, "the process does not end");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Ends the process with SIGKILL, unless it has ended before. Waits for its end.
    ///
    /// # Panics
    ///
    /// Panics if the system does not know the process.
    pub fn kill(&mut self) -> ExitStatus {
        self.child.kill().expect("a child process");
        let status = self.child.wait().expect("a child process");
        self.end_watcher();
        status
    }

    fn end_watcher(&mut self) {
        // The watcher has no pipe any more if it has ended before.
        let _ = self.watcher.write_all(b"\n");
    }
}

impl Drop for GuardedChild {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.end_watcher();
    }
}

/// `"$@"` is the command. The watcher ends after it has read a line. It holds no pipe of the command.
const SHELL: &str = r#"
exec 3<&0 </dev/null
(read -r line <&3 || kill -KILL $$) >/dev/null 2>&1 &
exec "$@" 3<&-
"#;
