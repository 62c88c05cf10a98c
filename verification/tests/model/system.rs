//! Some requests under one key, the store, and everything that can happen to them.

use stateright::{Model, Property};

use crate::{
    clients::{Client, Delivery, Move, Phase, Reply},
    history::History,
    mutant::Mutant,
    properties,
    state::{CLIENTS, State},
    store::{Call, Caller, Entry, ModelReply, Orphans, Rules, State as EntryState},
    tiers::{PROCESSES, Tier, TierRules},
};

/// The system under check.
#[derive(Clone, Debug)]
pub(crate) struct System {
    pub(crate) clients: usize,
    /// The number of clients that send another request under the same key.
    pub(crate) others: usize,
    pub(crate) orphans: Orphans,
    /// `true` if effect and record are one transaction.
    pub(crate) transactional: bool,
    /// `true` if a call may reach the store long after its caller stopped waiting. At most one call is late at a time.
    pub(crate) late_calls: bool,
    /// `true` if the store may lose its data.
    pub(crate) data_loss: bool,
    /// The requests are divided between two processes, each of which has a tier in front of the store.
    pub(crate) tiers: Option<TierRules>,
    pub(crate) rules: Rules,
    /// The names of the properties to check. The checker finds the shortest trace only if there is one property.
    pub(crate) properties: Vec<&'static str>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Tick,
    Call(usize, Call, Delivery),
    /// A call arrives at the store after its client has stopped waiting.
    Arrive(usize),
    Move(usize, Move),
    Crash(usize),
    LoseData,
    /// The tier of a process stores a record that the store has accepted or reported.
    Keep(usize),
    /// An action of a mutant.
    Sweep,
    Overwrite(usize),
}

/// A call that reached the store, and the store's reply.
pub(crate) type Exchange = (Caller, Call, ModelReply);

impl System {
    pub(crate) fn first(&self) -> State {
        let mut clients = [Client::new(0); CLIENTS];
        for (at, client) in clients.iter_mut().enumerate() {
            client.fingerprint = u8::from(at < self.others);
            client.process = u8::from(self.tiers.is_some() && at % 2 == 1);
            if at >= self.clients {
                client.phase = Phase::Finished;
            }
        }
        State {
            entry: None,
            clients,
            tiers: <[Tier; PROCESSES]>::default(),
            history: History::default(),
        }
    }

    pub(crate) fn steps(&self, state: &State, actions: &mut Vec<Action>) {
        if state.entry.is_none() && state.tiers != <[Tier; PROCESSES]>::default() {
            actions.push(Action::Tick);
        }
        let pending = (0..state.tiers.len()).filter(|&at| state.tiers[at].pending.is_some());
        actions.extend(pending.map(Action::Keep));
        if state.entry.is_some() {
            actions.push(Action::Tick);
            if self.data_loss {
                actions.push(Action::LoseData);
            }
            if self.rules.has(Mutant::ExpiryBySweeperOnly) {
                actions.push(Action::Sweep);
            }
        }
        let nothing_late = || state.clients.iter().all(|client| client.late.is_none());
        let may_be_late = self.late_calls && nothing_late();
        for (at, client) in state.clients.iter().enumerate() {
            for call in client.calls(self.orphans, self.transactional) {
                // A commit does not reach the store after its caller stopped waiting: see `transaction`.
                let late = may_be_late && *call != Call::Commit;
                let in_tier = state.tiers[usize::from(client.process)].kept.is_some();
                let deliveries: &[Delivery] = match (call, late) {
                    // A call that does not leave the process.
                    (Call::Acquire(_), _) if in_tier => &[Delivery::Delivered],
                    // A lost reply to a renewal makes no difference.
                    (Call::Renew, false) => &[Delivery::Delivered],
                    (Call::Renew, true) => &[Delivery::Delivered, Delivery::Late],
                    (_, false) => &[Delivery::Delivered, Delivery::CallLost, Delivery::ReplyLost],
                    (_, true) => &[
                        Delivery::Delivered,
                        Delivery::CallLost,
                        Delivery::ReplyLost,
                        Delivery::Late,
                    ],
                };
                let call = |delivery: &Delivery| Action::Call(at, *call, *delivery);
                actions.extend(deliveries.iter().map(call));
            }
            let moves = client.moves(self.transactional);
            actions.extend(moves.iter().map(|step| Action::Move(at, *step)));
            if client.phase == Phase::Reclaiming {
                actions.push(Action::Overwrite(at));
            }
            if !matches!(client.phase, Phase::NotArrived | Phase::Finished) {
                actions.push(Action::Crash(at));
            }
            if client.late.is_some() {
                actions.push(Action::Arrive(at));
            }
        }
    }

    /// Executes one step, and returns the new state with the call to the store and its reply.
    pub(crate) fn step(&self, state: &State, action: Action) -> (State, Option<Exchange>) {
        let mut next = *state;
        let exchange = match action {
            Action::Keep(process) => {
                next.tiers[process].keep();
                None
            }
            Action::Tick => {
                next.tiers.iter_mut().for_each(|tier| tier.tick(self));
                self.rules.tick(&mut next.entry);
                if next.entry.is_none() {
                    next.end_of_life();
                }
                None
            }
            Action::LoseData => {
                next.lose_record();
                next.entry = None;
                None
            }
            Action::Sweep => {
                Rules::sweep(&mut next.entry);
                if next.entry.is_none() {
                    next.end_of_life();
                }
                None
            }
            Action::Call(at, call, Delivery::CallLost) => {
                next.clients[at].miss_reply(call);
                None
            }
            Action::Call(at, call, Delivery::Late) => {
                next.clients[at].miss_reply(call);
                next.clients[at].late = Some(call);
                None
            }
            Action::Call(at, call, Delivery::ReplyLost) => {
                let exchange = self.call_store(&mut next, at, call);
                next.clients[at].miss_reply(call);
                exchange
            }
            Action::Call(at, call, Delivery::Delivered) => {
                let from_tier = match call {
                    Call::Acquire(_) => next.tier(at).response(),
                    _ => None,
                };
                let exchange = match from_tier {
                    Some(response) => Some((next.caller(at), call, response)),
                    None => self.call_store(&mut next, at, call),
                };
                if let Some((caller, call, response)) = exchange {
                    if let Some(rules) = self.tiers
                        && from_tier.is_none()
                    {
                        // Before this reply, nothing else was sent under the token.
                        let is_first = state.clients[at].phase == Phase::Executed;
                        let kept = self.record_to_store(rules, (caller, call, response), is_first);
                        let tier = next.tier(at);
                        tier.pending = kept.or(tier.pending);
                        if !rules.is_delayed {
                            tier.keep();
                        }
                    }
                    self.deliver(state, &mut next, at, (caller, call, response));
                }
                exchange
            }
            Action::Arrive(at) => {
                let call = next.clients[at].late.take();
                call.and_then(|call| self.call_store(&mut next, at, call))
            }
            Action::Move(at, step) => {
                let client = &mut next.clients[at];
                if self.rules.has(Mutant::WaiterRemoves)
                    && (client.phase, step) == (Phase::Waiting, Move::GiveUp)
                {
                    next.entry = None;
                }
                client.take(step);
                if step == Move::Effect {
                    next.history.effects += u8::from(client.current);
                    if self.rules.has(Mutant::ResponseBeforeRecord) {
                        next.answered(at, at);
                    }
                }
                None
            }
            Action::Crash(at) => {
                next.clients[at].phase = Phase::Finished;
                if self.rules.has(Mutant::DropReleases) {
                    let caller = next.caller(at);
                    self.rules.apply(&mut next.entry, caller, Call::Release);
                }
                None
            }
            Action::Overwrite(at) => {
                let generation = match state.entry.map(|held| held.state) {
                    Some(EntryState::Leased { generation, .. }) => generation + 1,
                    Some(EntryState::Completed { .. }) | None => 2,
                };
                next.entry = Some(self.rules.leased(next.caller(at), generation));
                next.runs(at, true);
                next.clients[at].phase = Phase::Running;
                None
            }
        };
        next.history.check_record(state.entry, next.entry, action);
        (next, exchange)
    }

    /// Calls the store, even if no client receives the reply.
    fn call_store(&self, next: &mut State, at: usize, call: Call) -> Option<Exchange> {
        let caller = next.caller(at);
        let before = next.entry;
        if self.rules.has(Mutant::ReadThenOverwrite)
            && call == Call::Acquire(Orphans::TakeOver)
            && let Some(Entry {
                token,
                state: EntryState::Leased { left: 0, .. },
                ..
            }) = before
            && token != Some(caller.token)
        {
            next.clients[at].phase = Phase::Reclaiming;
            return None;
        }
        let response = self.rules.apply(&mut next.entry, caller, call);
        match (call, response) {
            (Call::Commit, ModelReply::Done) => {
                next.history.effects += 1;
                let client = &mut next.clients[at];
                next.history.recommitted |= client.committed;
                client.committed = true;
            }
            // The outcome is definite and not recorded, so the next request is a first execution again.
            (Call::Release, _) if next.entry.is_none() && is_first_of(before, caller) => {
                next.end_of_life();
            }
            _ => {}
        }
        Some((caller, call, response))
    }

    fn deliver(&self, state: &State, next: &mut State, at: usize, exchange: Exchange) {
        let (caller, call, response) = exchange;
        let own = state
            .entry
            .is_some_and(|held| held.token == Some(caller.token));
        if own
            && matches!(
                response,
                ModelReply::InProgress { .. } | ModelReply::Orphaned { .. }
            )
        {
            next.history.locked_out = true;
        }
        let client = &mut next.clients[at];
        let reply = match (call, response) {
            (Call::Complete, ModelReply::LeaseLost)
                if self.rules.has(Mutant::OwnResponseAfterLostLease)
                    && client.phase != Phase::Late =>
            {
                client.phase = Phase::Finished;
                Reply::Recorded(caller.token)
            }
            (Call::Acquire(_), ModelReply::Completed { record, .. })
                if self.rules.has(Mutant::ResponseToAnotherRequest) =>
            {
                client.phase = Phase::Finished;
                Reply::Recorded(record)
            }
            (Call::Acquire(_), ModelReply::Granted { takeover, .. })
                if self.rules.has(Mutant::CommitAfterExpiry) =>
            {
                client.phase = Phase::Running;
                Reply::Run { takeover }
            }
            _ => client.receive(caller, call, response),
        };
        match reply {
            Reply::Nothing => {}
            Reply::Recorded(record) => next.answered(at, usize::from(record)),
            Reply::Run { takeover } => next.runs(at, takeover),
        }
    }
}

fn is_first_of(entry: Option<Entry>, caller: Caller) -> bool {
    matches!(
        entry,
        Some(Entry {
            token: Some(token),
            state: EntryState::Leased { generation: 1, .. },
            ..
        }) if token == caller.token
    )
}

impl Model for System {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![self.first()]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        self.steps(state, actions);
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        let (next, _) = self.step(state, action);
        let next = next.canonical();
        (next != *state).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let names = self.properties.iter();
        names.map(|name| properties::named(name)).collect()
    }
}
