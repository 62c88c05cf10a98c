//! A process that is killed again and again, and started again with the same work each time.

use std::{
    io::Read,
    os::unix::process::ExitStatusExt as _,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use tests::random::Random;
use tokio::{sync::Mutex, task::spawn_blocking};

/// At most so many times, at random moments. Every life has all the work before it, and knows what was done by the records
/// alone. How often it was killed, and what it said once it was left alone.
pub(crate) async fn killed(args: &[&str], most: usize) -> (usize, String) {
    // Leases are short here: processes that keep each other from renewing theirs would never be done.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::const_new(());
    let _turn = ONE_AT_A_TIME.lock().await;
    let args: Vec<_> = args.iter().map(|&it| it.to_owned()).collect();
    let lives = spawn_blocking(move || {
        let (mut random, mut kills) = (Random(7), 0);
        while kills < most {
            let mut process = start(&args);
            thread::sleep(random.around(Duration::from_millis(250)));
            process.kill().expect("a process of ours");
            // One that was done has nothing left to be killed at.
            let status = process.wait().expect("a process of ours");
            if status.success() {
                break;
            }
            assert_eq!(status.signal(), Some(9), "it ended by itself: {status}");
            kills += 1;
        }
        let mut process = start(&args);
        let began = Instant::now();
        while process.try_wait().expect("a process of ours").is_none() {
            if began.elapsed() > Duration::from_secs(120) {
                process.kill().expect("a process of ours");
                panic!("something is stuck");
            }
            thread::sleep(Duration::from_millis(20));
        }
        assert!(process.wait().expect("a process of ours").success());
        let mut said = String::new();
        let mut stdout = process.stdout.take().expect("a piped stdout");
        stdout.read_to_string(&mut said).expect("text");
        (kills, said)
    });
    lives.await.expect("it comes back")
}

fn start(args: &[String]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_consumers"))
        .args(args)
        .stdout(Stdio::piped())
        .spawn()
        .expect("it is built")
}
