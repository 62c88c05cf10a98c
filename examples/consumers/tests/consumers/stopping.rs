//! Consumers that are stopped, or reach their time limit, while they handle messages.

use std::{
    io::Read,
    process::{Command, ExitStatus, Stdio},
    time::Duration,
};

use consumers::Tally;
use tests::{
    GuardedChild,
    playground::run,
    servers::dynamodb::{StandIn, client, shared},
};
use tokio::time::{sleep, timeout};

// F-049
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopped_consumers_finish_received_messages() {
    for signal in ["-TERM", "-INT"] {
        let fixture = ProcessFixture::new();
        let mut process = fixture.start(LEASE, &[], WORK);
        assert!(fixture.work_has_begun(&mut process).await, "it has ended");
        run("kill", [signal, &process.id().to_string()]).expect("kill");
        let (status, said) = end(process).await;
        assert!(status.success(), "{signal}: {status}, {said}");
        fixture.nothing_needs_attention().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn impatient_consumers_finish_received_messages() {
    let fixture = ProcessFixture::new();
    let mut process = fixture.start(LEASE, &["--patience", "1s"], WORK);
    // A process that was stopped from outside as it started may run out of patience before it has received anything.
    while !fixture.work_has_begun(&mut process).await {
        process = fixture.start(LEASE, &["--patience", "1s"], WORK);
    }
    let (status, said) = end(process).await;
    assert_eq!(status.code(), Some(1), "{status}, {said}");
    fixture.nothing_needs_attention().await;
}

/// The tables of one process after another.
struct ProcessFixture {
    endpoint: String,
    table: String,
    parcels: Tally,
}

impl ProcessFixture {
    fn new() -> Self {
        let server = shared(StandIn::Dynoxide);
        let table = server.new_table();
        Self {
            endpoint: format!("http://{}", server.address()),
            parcels: Tally::new(&client(server.address()), format!("{table}-tally")),
            table,
        }
    }

    fn start(&self, lease: &str, args: &[&str], work: &str) -> GuardedChild {
        let mut command = Command::new(env!("CARGO_BIN_EXE_consumers"));
        command.args(["--endpoint", &self.endpoint, "--table", &self.table]);
        command.args(["--lease", lease, "--skew", "0s"]).args(args);
        command.args(["shipments", "--packing", "0s", "--work", work]);
        command.args(["--messages", &MESSAGES.to_string()]);
        GuardedChild::spawn(&command, Stdio::piped(), Stdio::inherit())
    }

    async fn sent(&self) -> Vec<u64> {
        let mut sent = Vec::new();
        for n in 0..MESSAGES {
            let order = format!(r#"{{"order":{n},"items":["tea"]}}"#);
            // The table is missing until the process has created it.
            sent.push(self.parcels.amount(&order).await.unwrap_or(0));
        }
        sent
    }

    /// Waits until a parcel is sent, which is recorded when the work for it is done. Returns `false` if the process ends
    /// instead.
    async fn work_has_begun(&self, process: &mut GuardedChild) -> bool {
        let begun = async {
            while self.sent().await.iter().sum::<u64>() == 0 {
                if process.try_wait().is_some() {
                    return false;
                }
                sleep(Duration::from_millis(10)).await;
            }
            true
        };
        timeout(PATIENCE, begun).await.expect("a parcel")
    }

    /// Checks that only messages that were not received are left, and no dead letters.
    async fn nothing_needs_attention(&self) {
        let sent = self.sent().await;
        assert!(sent.contains(&0), "it went on receiving: {sent:?}");
        let (status, said) = end(self.start("15s", &[], "0s")).await;
        assert!(status.success(), "{status}");
        assert!(said.contains(", 0 dead letters"), "{said}");
        assert_eq!(self.sent().await, [1; MESSAGES]);
    }
}

/// Waits for the end of the process. It writes less than a pipe holds.
async fn end(mut process: GuardedChild) -> (ExitStatus, String) {
    let ended = async {
        loop {
            if let Some(status) = process.try_wait() {
                return status;
            }
            sleep(Duration::from_millis(10)).await;
        }
    };
    let status = timeout(PATIENCE, ended).await.expect("it ends");
    let mut said = String::new();
    process.stdout().read_to_string(&mut said).expect("text");
    (status, said)
}

const MESSAGES: usize = 12;
const WORK: &str = "3s";
/// A process that stalls for seconds keeps its leases. The next process finds an orphan within its hang guard.
const LEASE: &str = "10s";
const PATIENCE: Duration = Duration::from_secs(120);
