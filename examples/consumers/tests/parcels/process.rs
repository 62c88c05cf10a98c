//! The program as a process, which runs to its end or is killed.

use std::{
    io::Read,
    os::unix::process::ExitStatusExt as _,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use tests::{GuardedChild, HANG_GUARD, playground::run};
use tokio::time::sleep;

/// A process that is killed when this is dropped, and when the test process ends.
pub(crate) struct Process(GuardedChild);

impl Process {
    pub(crate) fn start(args: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_parcels"));
        command.args(args);
        // Both pipes are read at the end: the program writes less than they hold.
        let child = GuardedChild::spawn(&command, Stdio::piped(), Stdio::piped());
        Self(child)
    }

    /// Waits until `is_reached` returns `true`, and kills the process with SIGKILL.
    pub(crate) async fn kill_when(mut self, is_reached: impl AsyncFn() -> bool) {
        let began = Instant::now();
        while !is_reached().await {
            let ended = self.0.try_wait();
            assert!(ended.is_none(), "it ended before the point: {ended:?}");
            assert!(began.elapsed() < HANG_GUARD, "it does not reach the point");
            sleep(Duration::from_millis(5)).await;
        }
        let status = self.0.kill();
        assert_eq!(status.signal(), Some(9), "it ended by itself: {status}");
    }

    /// Sends SIGTERM, and waits for the [end](Self::end).
    pub(crate) async fn stop(self) -> (bool, String) {
        run("kill", ["-TERM", &self.0.id().to_string()]).expect("a child process");
        self.end().await
    }

    /// Waits until the process ends. Returns `true` if it succeeded, and its output: stdout, then stderr.
    pub(crate) async fn end(mut self) -> (bool, String) {
        let began = Instant::now();
        let status = loop {
            if let Some(status) = self.0.try_wait() {
                break status;
            }
            assert!(began.elapsed() < HANG_GUARD, "it does not end");
            sleep(Duration::from_millis(5)).await;
        };
        let mut output = String::new();
        self.0.stdout().read_to_string(&mut output).expect("text");
        self.0.stderr().read_to_string(&mut output).expect("text");
        (status.success(), output)
    }
}

/// Waits until the test sees this state.
pub(crate) async fn wait_until(is_reached: impl AsyncFn() -> bool) {
    let began = Instant::now();
    while !is_reached().await {
        assert!(began.elapsed() < HANG_GUARD, "the state is not reached");
        sleep(Duration::from_millis(5)).await;
    }
}
