//! The state that all processes share: the time, the store, calls in flight, the random numbers, and the history.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use bytes::Bytes;
use http::StatusCode;
use tokio::sync::oneshot;
use tower_idempotency::store::{Acquired, Claim, KeyId, LeaseRef, Token, Ttl};

use super::{
    Millis,
    backend::Backend,
    bugs::Bug,
    expected_entry::{ExpectedEntry, Verdict},
    history::{AttemptOutcome, Event, EventKind, Reply, ReplySummary, Request},
    operator::{Decision, OperatorResponse},
    plan::Plan,
    random::Random,
    store::Entry,
};

/// The world, shared by the driver and all tasks of the processes.
#[derive(Clone)]
pub(super) struct World(Arc<Mutex<WorldState>>);

pub(super) struct WorldState {
    pub(super) now: Millis,
    /// The lead of the store's clock.
    pub(super) clock_offset: Millis,
    pub(super) plan: Plan,
    pub(super) bug: Option<Bug>,
    pub(super) random: Random,
    /// `true` if no fault is injected any more.
    pub(super) faults_ended: bool,
    queue: BTreeMap<(Millis, u64), ScheduledEvent>,
    queued: u64,
    /// The number of calls that have not reached the store yet.
    pub(super) calls_in_flight: usize,
    pub(super) backend: Backend,
    pub(super) expected: HashMap<KeyId, ExpectedEntry>,
    watchers: Vec<(KeyId, oneshot::Sender<()>)>,
    tokens: HashMap<Token, usize>,
    ids: HashMap<KeyId, usize>,
    pub(super) attempts: Vec<SimulatedAttempt>,
    pub(super) executions: Vec<Execution>,
    pub(super) clients: Vec<SimulatedClient>,
    pub(super) takeovers: usize,
    /// The number of decisions of operators, and of those that were applied.
    pub(super) decisions: usize,
    pub(super) resolutions: usize,
    pub(super) operator_responses: Vec<OperatorResponse>,
    /// The number of attempts that have not ended.
    pub(super) open: usize,
    /// The end of the last pause of each process, or `None` if it was never paused. `Millis::MAX` during a pause.
    pub(super) paused_until: Vec<Option<Millis>>,
    /// `true` for each process that has died.
    pub(super) dead: Vec<bool>,
    pub(super) history: Vec<Event>,
    /// `true` if the run is watched from inside.
    pub(super) is_watched_inside: bool,
    /// The first violation that was seen from inside.
    pub(super) violation: Option<String>,
}

/// An event that is due at its time.
pub(super) enum ScheduledEvent {
    Arrive(Box<PendingCall>),
    Reply(oneshot::Sender<Option<StoreReply>>, Option<StoreReply>),
    Notify(oneshot::Sender<()>),
    Send(usize),
    Kill(usize),
    Pause(usize, Millis),
    /// The process of this number continues, if it still exists.
    Resume(usize),
    Drain(usize),
    /// An operator looks for an orphan.
    TakeOver(usize),
    /// An operator reads this entry, or any, and may do so this often.
    Inspect(Option<KeyId>, u64),
    Resolve(Box<Decision>),
    /// The process of this number has drained.
    Leave(usize),
    Start(usize),
    StepClock(Millis),
}

/// A call that has not reached the store yet, and the receiver of its reply.
pub(super) struct PendingCall {
    pub(super) process: usize,
    pub(super) op: StoreCall,
    pub(super) reply: Option<(oneshot::Sender<Option<StoreReply>>, Millis)>,
    /// The call arrives, and an error returns.
    pub(super) fails: bool,
    /// The entry that was read when the call was sent, if the store has that bug.
    pub(super) read: Option<Option<Entry>>,
}

#[derive(Clone)]
pub(super) enum StoreCall {
    Acquire(Claim),
    Renew(LeaseRef, Ttl),
    Complete(LeaseRef, Bytes, Ttl),
    Release(LeaseRef),
    /// A transaction of the handler's: effect and record together.
    Commit(LeaseRef, Bytes, Ttl, usize),
}

pub(super) enum StoreReply {
    Acquired(Acquired),
    Ok,
    Lost,
}

/// A request of a client, and its outcome.
pub(super) struct SimulatedAttempt {
    /// The client, or `None` if an operator finishes an orphan.
    pub(super) client: Option<usize>,
    pub(super) process: usize,
    pub(super) request: Request,
    /// The time at which the request was sent.
    pub(super) sent: Millis,
    pub(super) execution: Option<usize>,
    /// `true` if its body arrives at once and complete.
    pub(super) clean: bool,
    pub(super) left: bool,
    pub(super) outcome: Option<AttemptOutcome>,
    /// The attempt ended with its own response, and the layer did not know if that response was stored.
    pub(super) reply_missing: bool,
}

/// An execution of the handler.
pub(super) struct Execution {
    pub(super) attempt: usize,
    pub(super) process: usize,
    pub(super) request: Request,
    pub(super) lease: Option<LeaseRef>,
    /// The lives of its key in which it has committed its effect.
    pub(super) commits: Vec<u64>,
    /// The expiry of the record of the first commit that was sent, if that commit succeeded.
    pub(super) over: Option<Millis>,
    /// The responses that the execution produced; the last of them is its response.
    pub(super) responses: Vec<ProducedResponse>,
    pub(super) state: Progress,
    /// `completing` is `true` if a completion under the lease was sent. `received` is `true` if a completion had a
    /// definite reply. `refused` is `true` if the last one found the lease lost, and no query has acquired it since.
    pub(super) completing: bool,
    pub(super) received: bool,
    pub(super) refused: bool,
    /// `true` if a renewal found no lease. The completion may have ended the lease, or another process holds it.
    pub(super) lost: bool,
}

/// The progress of an execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    Runs,
    /// The execution ended with the last of its responses.
    Answered,
    /// The execution ended without a response.
    Failed,
}

/// A response of a handler.
#[derive(Clone, Debug)]
pub(super) struct ProducedResponse {
    pub(super) status: StatusCode,
    pub(super) body: Bytes,
    pub(super) recording: Recording,
    /// `true` if the body breaks off. If it is slow too, the layer may see either first.
    pub(super) breaks: bool,
}

/// The rule for the layer: it must record the response, may record it, or must not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Recording {
    Expected,
    Forbidden,
    /// The response is too large, or perhaps too slow: a tombstone may be stored.
    Allowed,
}

/// A client that sends a request repeatedly.
pub(super) struct SimulatedClient {
    pub(super) request: Request,
    pub(super) left: u64,
    /// `true` if the client retries until it has a definite outcome, once no fault is injected any more.
    pub(super) asks: bool,
    pub(super) waiting: bool,
}

impl World {
    pub(super) fn new(plan: Plan, bug: Option<Bug>, random: Random) -> Self {
        Self(Arc::new(Mutex::new(WorldState {
            now: 0,
            clock_offset: 0,
            plan,
            bug,
            random,
            faults_ended: false,
            queue: BTreeMap::new(),
            queued: 0,
            calls_in_flight: 0,
            backend: Backend::new(&plan, bug),
            expected: HashMap::new(),
            watchers: Vec::new(),
            tokens: HashMap::new(),
            ids: HashMap::new(),
            attempts: Vec::new(),
            executions: Vec::new(),
            clients: Vec::new(),
            takeovers: 0,
            decisions: 0,
            resolutions: 0,
            operator_responses: Vec::new(),
            open: 0,
            paused_until: Vec::new(),
            dead: Vec::new(),
            history: Vec::new(),
            is_watched_inside: true,
            violation: None,
        })))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, WorldState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WorldState {
    pub(super) fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    pub(super) fn record_event(&mut self, kind: EventKind) {
        let at = self.now;
        self.history.push(Event { at, kind });
    }

    pub(super) fn violated(&mut self, what: impl Into<String>) {
        if self.is_watched_inside && self.violation.is_none() {
            self.violation = Some(format!("at {} ms: {}", self.now, what.into()));
        }
    }

    // ---- Scheduled events ----

    pub(super) fn after(&mut self, pause: Millis, due: ScheduledEvent) {
        self.queued += 1;
        // Events that are due at one instant happen in any order.
        let order = self.random.next() << 32 | self.queued;
        if let ScheduledEvent::Arrive(_) = due {
            self.calls_in_flight += 1;
        }
        self.queue.insert((self.now + pause, order), due);
    }

    pub(super) fn next_due(&self) -> Option<Millis> {
        self.queue.first_key_value().map(|((at, _), _)| *at)
    }

    pub(super) fn pop_due(&mut self) -> Option<ScheduledEvent> {
        let entry = self.queue.first_entry()?;
        (entry.key().0 <= self.now).then(|| entry.remove())
    }

    /// Returns `true` if an event is due that is not a reply or a notification.
    pub(super) fn is_eventful(&self) -> bool {
        let mut due = self.queue.values();
        due.any(|due| {
            !matches!(
                due,
                ScheduledEvent::Arrive(_) | ScheduledEvent::Reply(..) | ScheduledEvent::Notify(_)
            )
        })
    }

    // ---- Names ----

    pub(super) fn name(&mut self, token: Token) -> usize {
        let next = self.tokens.len();
        *self.tokens.entry(token).or_insert(next)
    }

    pub(super) fn name_id(&mut self, id: KeyId) -> usize {
        let next = self.ids.len();
        *self.ids.entry(id).or_insert(next)
    }

    // ---- Pauses ----

    pub(super) fn pause(&mut self, process: usize) {
        self.paused_until[process] = Some(Millis::MAX);
        self.record_event(EventKind::ProcessPaused(process));
    }

    pub(super) fn resume(&mut self, process: usize) {
        self.paused_until[process] = Some(self.now);
        self.record_event(EventKind::ProcessResumed(process));
    }

    /// Returns `true` if the process of the attempt was paused at any time since the request was sent.
    ///
    /// The timeouts and the lease of such an attempt may have expired during the pause, also if its client has left. At the
    /// end of a pause, the process handles everything that is due before the clock advances. The timeouts of a later request
    /// therefore begin after the pause. A request of the same millisecond may arrive earlier, so it counts as in flight.
    pub(super) fn was_paused_since_sent(&self, attempt: usize) -> bool {
        let known = &self.attempts[attempt];
        self.paused_until[known.process].is_some_and(|until| known.sent <= until)
    }

    // ---- The store ----

    /// Returns the time by the store's clock.
    pub(super) fn store_now(&self) -> Millis {
        self.now + self.clock_offset
    }

    /// Handles the arrival of a call at the store.
    pub(super) fn arrive(
        &mut self,
        process: usize,
        op: &StoreCall,
        read: Option<Option<Entry>>,
    ) -> StoreReply {
        let now = self.store_now();
        let (id, token) = (op.id(), op.token());
        let done = self.backend.step(op, read, now, self.bug);
        if let StoreReply::Acquired(Acquired::Granted { takeover: true, .. }) = done {
            self.takeovers += 1;
            super::oracle::judge_takeover(self, id, op.token());
        }
        let expected = self.expected.entry(id).or_default();
        let before = (expected.life, expected.takeovers);
        let is_held = expected.holder() == Some(token);
        let verdict = check_reply(expected, op, &done, now);
        let (life, takeovers) = (expected.life, expected.takeovers);
        let id_name = self.name_id(id);
        let may = match op {
            StoreCall::Release(lease) => super::oracle::judge_release(self, lease, is_held),
            _ => true,
        };
        if life > before.0 && may {
            self.record_event(EventKind::KeyFreed(id_name));
        }
        if takeovers > before.1 {
            self.record_event(EventKind::LeaseTakenOver(id_name));
        }
        if let StoreCall::Commit(.., execution) = op
            && (matches!(done, StoreReply::Ok) || self.has(Bug::CommitIsTorn))
        {
            self.executions[*execution].commits.push(life);
            super::oracle::judge_second_commit(self, id, *execution);
            let (execution, held) = (*execution, true);
            self.record_event(EventKind::Effect { execution, held });
        }
        let token = self.name(token);
        self.record_event(EventKind::CallArrived {
            process,
            call: op.name(),
            id: id_name,
            token,
            reply: reply_of(&done),
        });
        if let Err(violation) = verdict {
            let call = op.name();
            self.violated(format!("{violation} ({call} under token {token})"));
        }
        if !self.backend.is_in_progress(id, now) {
            self.wake(id);
        }
        done
    }

    /// Notifies the waiters for this entry, unless the notification is lost.
    pub(super) fn wake(&mut self, id: KeyId) {
        let mut at = 0;
        while at < self.watchers.len() {
            if self.watchers[at].0 != id {
                at += 1;
                continue;
            }
            let (_, watcher) = self.watchers.swap_remove(at);
            if self.faults_ended || !self.random.percent(self.plan.lost_notifications) {
                let pause = self.random.below(3);
                self.after(pause, ScheduledEvent::Notify(watcher));
            }
        }
    }

    pub(super) fn watch(&mut self, id: KeyId) -> oneshot::Receiver<()> {
        let (news, watcher) = oneshot::channel();
        self.watchers.push((id, news));
        let now = self.store_now();
        if !self.backend.is_in_progress(id, now) {
            self.wake(id);
        }
        watcher
    }

    /// Returns the execution under this lease.
    pub(super) fn execution_under(&mut self, lease: &LeaseRef) -> Option<&mut Execution> {
        let mut executions = self.executions.iter_mut().rev();
        executions.find(|it| it.lease.is_some_and(|it| it.token == lease.token))
    }
}

impl StoreCall {
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Acquire(_) => "acquire",
            Self::Renew(..) => "renew",
            Self::Complete(..) => "complete",
            Self::Release(_) => "release",
            Self::Commit(..) => "commit",
        }
    }

    fn id(&self) -> KeyId {
        match self {
            Self::Acquire(claim) => claim.id,
            Self::Renew(lease, _)
            | Self::Complete(lease, ..)
            | Self::Release(lease)
            | Self::Commit(lease, ..) => lease.id,
        }
    }

    pub(super) fn token(&self) -> Token {
        match self {
            Self::Acquire(claim) => claim.token,
            Self::Renew(lease, _)
            | Self::Complete(lease, ..)
            | Self::Release(lease)
            | Self::Commit(lease, ..) => lease.token,
        }
    }
}

fn check_reply(
    expected: &mut ExpectedEntry,
    op: &StoreCall,
    done: &StoreReply,
    now: Millis,
) -> Verdict {
    let ok = matches!(done, StoreReply::Ok);
    match (op, done) {
        (StoreCall::Acquire(claim), StoreReply::Acquired(acquired)) => {
            expected.acquired(claim, now, acquired)
        }
        (StoreCall::Acquire(_), StoreReply::Ok | StoreReply::Lost) => Err("no reply to an acquire"),
        (StoreCall::Renew(lease, ttl), _) => expected.renewed(lease, ttl.as_millis(), now, ok),
        (StoreCall::Complete(lease, record, retention), _) => {
            expected.completed(lease, record, retention.as_millis(), now, false, ok)
        }
        (StoreCall::Commit(lease, record, retention, _), _) => {
            expected.completed(lease, record, retention.as_millis(), now, true, ok)
        }
        (StoreCall::Release(lease), _) => {
            expected.released(lease, now);
            Ok(())
        }
    }
}

fn reply_of(done: &StoreReply) -> ReplySummary {
    match done {
        StoreReply::Acquired(Acquired::Granted {
            generation,
            takeover,
        }) => ReplySummary::Granted(*generation, *takeover),
        StoreReply::Acquired(Acquired::InProgress { expires_in, .. }) => ReplySummary::InProgress(
            Millis::try_from(expires_in.as_millis()).unwrap_or(Millis::MAX),
        ),
        StoreReply::Acquired(Acquired::Orphaned { since, .. }) => {
            ReplySummary::Orphaned(Millis::try_from(since.as_millis()).unwrap_or(Millis::MAX))
        }
        StoreReply::Acquired(Acquired::Completed { .. }) => ReplySummary::Completed,
        StoreReply::Ok => ReplySummary::Done,
        StoreReply::Lost => ReplySummary::Lost,
    }
}

/// Outcomes of attempts, and the next step of their clients.
impl WorldState {
    pub(super) fn ended(&mut self, attempt: usize, outcome: AttemptOutcome) {
        if self.attempts[attempt].outcome.is_some() {
            return;
        }
        self.open -= 1;
        if let AttemptOutcome::Answered(reply) = &outcome {
            self.attempts[attempt].reply_missing = super::oracle::lacks_reply(self, attempt, reply);
        }
        self.record_event(EventKind::AttemptEnded(attempt, outcome.clone()));
        super::oracle::judge_end(self, attempt, &outcome);
        if let Some(client) = self.attempts[attempt].client {
            self.advance_phase(client, &outcome);
        }
        self.attempts[attempt].outcome = Some(outcome);
    }

    fn advance_phase(&mut self, client: usize, outcome: &AttemptOutcome) {
        let lease = self.plan.lease;
        let definite = is_definite(outcome);
        let plan_pause = [0, 1, lease / 10, lease / 2, lease + 1];
        let state = &mut self.clients[client];
        state.waiting = false;
        if state.asks {
            if !definite {
                state.waiting = true;
                // The poll interval of a client that retries until it has a definite outcome.
                self.after(lease / 4, ScheduledEvent::Send(client));
            }
            return;
        }
        let again = !definite || self.random.percent(40);
        let state = &mut self.clients[client];
        if state.left > 0 && again && !self.faults_ended {
            state.left -= 1;
            state.waiting = true;
            let pause = self.random.pick(&plan_pause);
            self.after(pause, ScheduledEvent::Send(client));
        }
    }
}

/// Returns `true` if a retry cannot provide more information.
pub(super) fn is_definite(outcome: &AttemptOutcome) -> bool {
    match outcome {
        AttemptOutcome::Answered(Reply { .. })
        | AttemptOutcome::Panicked
        | AttemptOutcome::Failed => true,
        AttemptOutcome::BodyBroken => true,
        AttemptOutcome::Refused(reason, _) => matches!(
            *reason,
            "key-reused" | "outcome-unknown" | "response-not-retained"
        ),
        AttemptOutcome::Died | AttemptOutcome::Left | AttemptOutcome::NoOrphan => false,
    }
}
