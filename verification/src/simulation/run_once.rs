//! Work of `run_once` instead of requests: it has the same script, and returns a value instead of a response.

use http::StatusCode;
use tower_idempotency::{
    IdempotencyLayer, Lease,
    run_once::{self, WorkError},
    store::StoreError,
    transaction::LeaseExt,
};

use super::{
    client::{Leave, run_attempt},
    handler::{Ending, Run, pause, run_unless_dropped},
    history::{AttemptOutcome, Reply, Request},
    link::Link,
    world::{ProducedResponse, Recording},
};

/// The return value of the work: the number of the execution, and its text.
type Value = (usize, String);

type Ended = Result<Value, WorkError<()>>;

/// Makes an attempt, in its process.
pub(super) async fn attempt(
    link: Link,
    layer: IdempotencyLayer,
    request: Request,
    number: usize,
    leave: Leave,
) {
    let works = link.clone();
    let running = async move {
        let work = move |lease| run(works, number, lease);
        let (key, variant) = (request.key, request.variant);
        let ran = layer.run_once(format!("key {key}"), format!("variant {variant}"), work);
        match ran.await {
            Ok(outcome) => to_outcome(outcome),
            Err(error) => AttemptOutcome::Refused(error.kind().code(), error.status()),
        }
    };
    run_attempt(link, running, number, leave).await;
}

/// Returns the outcome in its HTTP form.
fn to_outcome(outcome: run_once::Outcome<Value, ()>) -> AttemptOutcome {
    let answered = |(execution, text): Value, replayed| {
        AttemptOutcome::Answered(Reply {
            status: status(&text),
            execution: Some(execution),
            replayed,
            body: text.into(),
        })
    };
    match outcome {
        run_once::Outcome::Executed(value) => answered(value, false),
        run_once::Outcome::Replayed(value) => answered(value, true),
        run_once::Outcome::ValueNotRecorded => {
            AttemptOutcome::Refused("response-not-retained", StatusCode::CONFLICT)
        }
        run_once::Outcome::InProgress { .. } => {
            AttemptOutcome::Refused("in-progress", StatusCode::CONFLICT)
        }
        run_once::Outcome::Mismatch => {
            AttemptOutcome::Refused("key-reused", StatusCode::UNPROCESSABLE_ENTITY)
        }
        run_once::Outcome::Failed(()) => AttemptOutcome::Failed,
        run_once::Outcome::NeedsAttention { .. }
        | run_once::Outcome::Orphaned { .. }
        | run_once::Outcome::LeaseLost(_)
        | run_once::Outcome::Unknown(()) => {
            AttemptOutcome::Refused("outcome-unknown", StatusCode::CONFLICT)
        }
        other => panic!("unexpected outcome: {other:?}"),
    }
}

async fn run(link: Link, attempt: usize, lease: Lease) -> Ended {
    let mut run = Run::start(link.clone(), attempt, Some(lease));
    let ended = run_unless_dropped(&link, run.number, run.work_once()).await;
    run.ends(ended).unwrap_or(Err(WorkError::Release(())))
}

impl Run {
    async fn work_once(&mut self) -> Ended {
        let script = self.script;
        self.reach_effect().await;
        let transactional = self.link.world.lock().plan.transactional;
        let value = if transactional {
            self.commit_value().await
        } else {
            self.apply_effect();
            Ok(self.value(""))
        };
        pause(script.after).await;
        match script.ending {
            Ending::PanicsAfter => self.panic(),
            Ending::Fails | Ending::RespondsNoStore => Err(WorkError::Release(())),
            // The work may have had an effect: the lease expires.
            Ending::BreaksBody => Err(WorkError::Orphan(())),
            Ending::Responds(status) if !self.link.world.lock().plan.records(status) => {
                Err(WorkError::Release(()))
            }
            Ending::Responds(_) | Ending::RespondsTooLarge | Ending::PanicsBefore => value,
        }
    }

    /// Commits effect and record in one transaction, and retries once if the outcome of the commit is unknown.
    async fn commit_value(&mut self) -> Ended {
        let Some(lease) = self.lease.clone() else {
            return Err(WorkError::Release(()));
        };
        for _ in 0..2 {
            let prepared = lease.prepare_value(self.value(""));
            let (reference, record) = (prepared.lease_ref(), prepared.record().clone());
            let retention = prepared.retention();
            let commit = self.link.commit(reference, record, retention, self.number);
            match prepared.commit(commit).await {
                Ok(value) => return Ok(value),
                Err(StoreError::LeaseLost) => break,
                Err(_) => {}
            }
        }
        // The work reacts in one of two ways if the outcome of its commit is unknown.
        match self.number % 2 {
            0 => Ok(self.value(UNSURE)),
            _ => Err(WorkError::Release(())),
        }
    }

    /// Returns the value, and adds it to those that the execution has produced.
    fn value(&self, more: &str) -> Value {
        let too_much = self.script.ending == Ending::RespondsTooLarge;
        let text = self.text(too_much) + more;
        let produced = ProducedResponse {
            status: status(&text),
            body: text.clone().into(),
            breaks: false,
            recording: if too_much {
                Recording::Allowed
            } else {
                Recording::Expected
            },
        };
        let mut world = self.link.world.lock();
        world.executions[self.number].responses.push(produced);
        (self.number, text)
    }
}

/// Returns the status that a handler would send. A value has no status.
fn status(text: &str) -> StatusCode {
    match text.ends_with(UNSURE) {
        true => StatusCode::SERVICE_UNAVAILABLE,
        false => StatusCode::CREATED,
    }
}

const UNSURE: &str = ", or not";
