//! A client that requests a key until it has a response.

use std::{
    io,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use http::{StatusCode, header};
use tests::{TestResponse, random::Random};
use tokio::time::{sleep, timeout};
use verification::oracle::{Attempt, Outcome};

use super::{Fleet, connection::Connection};

#[derive(Debug)]
pub(super) struct Client {
    fleet: Arc<Fleet>,
    path: String,
    poll: Duration,
    /// The connection to each member, or `None` if the connection failed.
    connections: Vec<Option<Connection>>,
    random: Random,
}

impl Client {
    /// Returns the `n`th client, with its own random choices.
    pub(super) fn new(fleet: &Arc<Fleet>, path: &str, poll: Duration, seed: u64, n: usize) -> Self {
        Self {
            fleet: Arc::clone(fleet),
            path: path.to_owned(),
            poll,
            connections: fleet.members.iter().map(|_| None).collect(),
            random: Random(seed ^ ((n as u64) << 32)),
        }
    }

    /// Sends the request to one member after another until a member returns the response, or reports an unknown
    /// outcome. Hangs up on each member after `patience`.
    ///
    /// # Panics
    ///
    /// Panics if no response arrives.
    pub(super) async fn request_until_response(
        &mut self,
        key: &str,
        patience: Duration,
    ) -> Vec<Attempt> {
        let began = Instant::now();
        let mut attempts = Vec::new();
        let mut silent = None;
        loop {
            let member = self.member_except(silent);
            let attempt = self.attempt(member, key, patience).await;
            let pause = match &attempt.outcome {
                Outcome::Answered(_) | Outcome::Refused => {
                    attempts.push(attempt);
                    return attempts;
                }
                Outcome::NotYet(_) => self.poll,
                Outcome::HungUp => {
                    silent = Some(member);
                    Duration::ZERO
                }
                // Another member may be up.
                Outcome::Failed => Duration::from_millis(5),
            };
            attempts.push(attempt);
            assert!(
                began.elapsed() < LONGEST,
                "no response for {key}: {attempts:?}"
            );
            sleep(pause).await;
        }
    }

    /// Returns any member, or a different member if there are several.
    fn member_except(&mut self, silent: Option<usize>) -> usize {
        let members = self.fleet.members.len();
        match silent {
            Some(silent) if members > 1 => (silent + 1 + self.random.below(members - 1)) % members,
            _ => self.random.below(members),
        }
    }

    async fn attempt(&mut self, member: usize, key: &str, patience: Duration) -> Attempt {
        let began = Instant::now();
        let outcome = match timeout(patience, self.post(member, key)).await {
            Ok(Ok(response)) => outcome(response),
            Ok(Err(_)) => Outcome::Failed,
            Err(_) => Outcome::HungUp,
        };
        Attempt {
            key: key.to_owned(),
            request: format!("POST {}", self.path),
            member,
            began,
            ended: Instant::now(),
            outcome,
        }
    }

    /// Takes the connection out of the list during the request. After an error, or if the client hangs up, the
    /// connection is closed.
    async fn post(&mut self, member: usize, key: &str) -> io::Result<TestResponse> {
        let asked = &self.fleet.members[member];
        let mut connection = match self.connections[member].take() {
            Some(connection) => connection,
            None => Connection::open(asked.address).await?,
        };
        // The process that receives the request runs now, or has already ended.
        let process = asked.process.load(Ordering::SeqCst);
        let response = connection.post(&self.path, key, "tea").await?;
        asked.at_work.fetch_max(process, Ordering::SeqCst);
        self.connections[member] = Some(connection);
        Ok(response)
    }
}

/// The longest time that a client waits in total. The most patient client waits this long for one member.
pub(super) const LONGEST: Duration = tests::HANG_GUARD;

fn outcome(mut response: TestResponse) -> Outcome {
    if response.status.is_success() {
        // The two headers that may differ between responses.
        response.headers.remove(header::DATE);
        response.headers.remove("idempotent-replayed");
        return Outcome::Answered(response);
    }
    let problem: Option<serde_json::Value> = serde_json::from_slice(&response.body).ok();
    let code = problem.and_then(|problem| problem["code"].as_str().map(str::to_owned));
    match (response.status, code.as_deref()) {
        (StatusCode::CONFLICT, Some("outcome-unknown")) => Outcome::Refused,
        (_, Some(code)) => Outcome::NotYet(code.to_owned()),
        (status, None) => Outcome::NotYet(status.as_str().to_owned()),
    }
}
