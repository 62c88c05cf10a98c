//! Runs the program, kills it with SIGKILL, and starts it again with the same work.

use std::{
    io::Read,
    os::unix::process::ExitStatusExt as _,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use tests::{GuardedChild, HANG_GUARD, random::Random};
use tokio::{sync::Mutex, task::spawn_blocking, time::sleep};

/// Processes with short leases run one after another: in parallel they could delay each other's renewals.
static ONE_AT_A_TIME: Mutex<()> = Mutex::const_new(());

/// Starts the program, waits until `is_reached` returns `true`, and kills the process.
///
/// The arguments have to make the process wait at the point that `is_reached` detects, such as `--work 1h`.
pub(crate) async fn kill_at(args: &[&str], is_reached: impl AsyncFn() -> bool) {
    let _turn = ONE_AT_A_TIME.lock().await;
    let mut process = start(args);
    let began = Instant::now();
    while !is_reached().await {
        let ended = process.try_wait();
        assert!(
            ended.is_none(),
            "ended before it reached the point: {ended:?}"
        );
        assert!(
            began.elapsed() < HANG_GUARD,
            "the process does not reach the point"
        );
        sleep(Duration::from_millis(10)).await;
    }
    let status = process.kill();
    assert_eq!(
        status.signal(),
        Some(9),
        "the process ended by itself: {status}"
    );
}

/// Kills the program up to `most` times at random moments, and then [runs it to its end](run_to_end). Returns the number of
/// kills and the output of the last run.
///
/// The moments of the kills are random: assertions about a certain moment belong to [`kill_at`].
pub(crate) async fn kill_at_random(args: &[&str], most: usize) -> (usize, String) {
    let turn = ONE_AT_A_TIME.lock().await;
    let owned: Vec<_> = args.iter().map(|&it| it.to_owned()).collect();
    let killing = spawn_blocking(move || {
        let args: Vec<_> = owned.iter().map(String::as_str).collect();
        let (mut random, mut kills) = (Random(7), 0);
        while kills < most {
            let mut process = start(&args);
            thread::sleep(random.around(Duration::from_millis(250)));
            let status = process.kill();
            // A process that has done all its work leaves nothing to kill.
            if status.success() {
                break;
            }
            assert_eq!(
                status.signal(),
                Some(9),
                "the process ended by itself: {status}"
            );
            kills += 1;
        }
        kills
    });
    let kills = killing.await.expect("the task does not panic");
    drop(turn);
    (kills, run_to_end(args).await)
}

/// Runs the program to its end and returns its output.
pub(crate) async fn run_to_end(args: &[&str]) -> String {
    let _turn = ONE_AT_A_TIME.lock().await;
    let mut process = start(args);
    let running = spawn_blocking(move || {
        assert!(process.wait().success());
        let mut output = String::new();
        process.stdout().read_to_string(&mut output).expect("text");
        output
    });
    running.await.expect("the task does not panic")
}

fn start(args: &[&str]) -> GuardedChild {
    let mut command = Command::new(env!("CARGO_BIN_EXE_consumers"));
    command.args(args);
    GuardedChild::spawn(&command, Stdio::piped(), Stdio::inherit())
}
