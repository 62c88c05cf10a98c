//! A client that asks for a key until it has an answer.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt, Full};
use hyper_util::{
    client::legacy::{self, connect::HttpConnector},
    rt::TokioExecutor,
};
use tokio::time::{sleep, timeout};

use super::{Attempt, Fleet, Load, Member, Outcome, random::Random};
use crate::{Answer, playground::SendError};

#[derive(Debug)]
pub(super) struct Client {
    fleet: Arc<Fleet>,
    load: Arc<Load>,
    http: legacy::Client<HttpConnector, Full<Bytes>>,
    random: Random,
}

impl Client {
    /// The `n`th, which is as random as the others and in its own way.
    pub(super) fn new(fleet: &Arc<Fleet>, load: &Arc<Load>, n: u64) -> Self {
        Self {
            fleet: Arc::clone(fleet),
            load: Arc::clone(load),
            // Who repeats requests is we.
            http: legacy::Client::builder(TokioExecutor::new())
                .retry_canceled_requests(false)
                .build_http(),
            random: Random(load.seed ^ (n << 32)),
        }
    }

    /// Asks one member or another until one gives the answer, or says that it will never be known. Hangs up on each after
    /// `patience`.
    pub(super) async fn insist(&mut self, key: &str, patience: Duration) -> Vec<Attempt> {
        let began = Instant::now();
        let mut attempts = Vec::new();
        loop {
            let members = self.fleet.members.len();
            let member = &self.fleet.members[self.random.below(members)];
            let attempt = self.attempt(member, key, patience).await;
            let pause = match &attempt.outcome {
                Outcome::Answered(_) | Outcome::Refused => {
                    attempts.push(attempt);
                    return attempts;
                }
                Outcome::NotYet(_) => self.load.poll,
                Outcome::HungUp => Duration::ZERO,
                // Another one may be up.
                Outcome::Failed => Duration::from_millis(5),
            };
            attempts.push(attempt);
            assert!(
                began.elapsed() < Duration::from_secs(30),
                "no answer for {key}: {attempts:?}"
            );
            sleep(pause).await;
        }
    }

    async fn attempt(&self, member: &Member, key: &str, patience: Duration) -> Attempt {
        let (pid, began) = (member.pid(), Instant::now());
        let url = format!("http://{}{}", member.address, self.load.path);
        let outcome = match timeout(patience, self.post(&url, key)).await {
            Ok(Ok(answer)) => outcome(answer),
            Ok(Err(_)) => Outcome::Failed,
            Err(_) => Outcome::HungUp,
        };
        Attempt {
            key: key.to_owned(),
            pid,
            began,
            ended: Instant::now(),
            outcome,
        }
    }

    async fn post(&self, url: &str, key: &str) -> Result<Answer, SendError> {
        let req = Request::post(url).header("idempotency-key", key);
        let req = req.body(Full::from("tea"))?;
        let (head, body) = self.http.request(req).await?.into_parts();
        Ok(Answer {
            status: head.status,
            headers: head.headers,
            body: body.collect().await?.to_bytes(),
        })
    }
}

fn outcome(mut answer: Answer) -> Outcome {
    if answer.status.is_success() {
        // The two that may differ from one answer to another.
        answer.headers.remove(header::DATE);
        answer.headers.remove("idempotent-replayed");
        return Outcome::Answered(answer);
    }
    let problem: Option<serde_json::Value> = serde_json::from_slice(&answer.body).ok();
    let code = problem.and_then(|problem| problem["code"].as_str().map(str::to_owned));
    match (answer.status, code.as_deref()) {
        (StatusCode::CONFLICT, Some("outcome-unknown")) => Outcome::Refused,
        (_, Some(code)) => Outcome::NotYet(code.to_owned()),
        (status, None) => Outcome::NotYet(status.as_str().to_owned()),
    }
}
