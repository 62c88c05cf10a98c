//! Every call in every state of the model's store (see `docs/internals/verification.md`), on real servers. Each store
//! makes the same transitions, by its own clock.
//!
//! All keys go from one tick to the next together. All calls between two ticks must end long before the next deadline.
//! Otherwise the test starts again with longer ticks.

#![expect(clippy::unwrap_used, reason = "tests, their helpers included")]

#[allow(dead_code, reason = "the model has them all")]
#[path = "../model/mutant.rs"]
mod mutant;
#[path = "../model/sequences.rs"]
mod sequences;
#[allow(dead_code, reason = "the model has mutants and transactions, too")]
#[path = "../model/store.rs"]
mod store;
#[path = "../model/store_calls.rs"]
mod store_calls;

use std::{
    sync::{Arc, Mutex},
    time::{Duration, SystemTime},
};

use tests::{
    scratch::Scratch,
    servers::{
        dynamodb::{self, StandIn},
        mariadb::MariaDbServer,
        postgres, redis,
    },
    sql,
};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep_until},
};
use tower_idempotency::store::{Acquired, Store, Token, Ttl};
use tower_idempotency_dynamodb::DynamoDbOptions;

use self::{
    mutant::Mutant,
    sequences::{Step, all_steps, sequences},
    store::{Caller, Entry, ModelReply, Rules, Times},
    store_calls::{Durations, OBSERVER, QUERY, StoreReply, call_store, id, record, token},
};

const RULES: Rules = Rules {
    times: Times {
        lease: 1,
        orphan_retention: 2,
        retention: 2,
    },
    mutant: None,
};

/// Returns durations that fit the rounds. An entry due in a round expires before the round begins, and any other entry
/// expires after the round has ended. This holds if every round ends within a quarter of its tick. Leases and records
/// expire half a tick early. Orphans expire a quarter of a tick early, because their time begins at lease expiry or at
/// a release.
fn durations(tick: Duration) -> Durations {
    let ttl = |ticks: u8, early: Duration| Ttl::try_from(tick * ticks.into() - early).unwrap();
    Durations {
        lease: ttl(RULES.times.lease, tick / 2),
        orphan_retention: ttl(RULES.times.orphan_retention, tick / 4),
        retention: ttl(RULES.times.retention, tick / 2),
    }
}

/// A key, and the steps that remain for it.
struct Key {
    number: u64,
    rules: Rules,
    entry: Option<Entry>,
    sequence: Vec<Step>,
    done: usize,
}

impl Key {
    /// Makes all calls up to the next tick. Returns an error if a reply differs from the model.
    async fn round<S: Store>(&mut self, store: &S, durations: Durations) -> Result<(), Failed> {
        while let Some(Step::Call(caller, call)) = self.sequence.get(self.done) {
            let response = self.rules.apply(&mut self.entry, *caller, *call);
            self.compare(store, durations, *caller, *call, response)
                .await?;
            self.done += 1;
        }
        // The entry shows the effect of the calls. An absent entry is skipped, because a query would acquire it.
        if self.entry.is_some() {
            let response = self.rules.apply(&mut self.entry.clone(), OBSERVER, QUERY);
            self.compare(store, durations, OBSERVER, QUERY, response)
                .await?;
        }
        Ok(())
    }

    /// Returns `true` if there is a round after this one.
    fn tick(&mut self) -> bool {
        if let Some(Step::Tick) = self.sequence.get(self.done) {
            self.rules.tick(&mut self.entry);
            self.done += 1;
            return true;
        }
        false
    }

    async fn compare<S: Store>(
        &self,
        store: &S,
        durations: Durations,
        caller: Caller,
        call: store::Call,
        response: ModelReply,
    ) -> Result<(), Failed> {
        let found = call_store(store, durations, id(self.number), caller, call).await;
        let failed = |error| Failed::Call(format!("{call:?} of {caller:?} failed: {error}"));
        let found = found.map_err(failed)?;
        if is_equal_reply(&response, &found) {
            return Ok(());
        }
        let Self { sequence, done, .. } = self;
        Err(Failed::Differs(format!(
            "{call:?} of {caller:?} returns {found:?}, in the model {response:?}: {done} of {sequence:?}"
        )))
    }
}

/// Compares everything but the time, which cannot be predicted exactly.
fn is_equal_reply(response: &ModelReply, found: &StoreReply) -> bool {
    let StoreReply::Acquired(found) = found else {
        return matches!(
            (response, found),
            (ModelReply::Done, StoreReply::Done) | (ModelReply::LeaseLost, StoreReply::LeaseLost)
        );
    };
    match (response, found) {
        (
            ModelReply::Granted {
                generation,
                takeover,
            },
            Acquired::Granted {
                generation: found,
                takeover: reported,
            },
        ) => u64::from(*generation) == *found && takeover == reported,
        (
            ModelReply::InProgress { fingerprint, .. },
            Acquired::InProgress {
                fingerprint: of, ..
            },
        )
        | (
            ModelReply::Orphaned { fingerprint, .. },
            Acquired::Orphaned {
                fingerprint: of, ..
            },
        ) => of.as_bytes() == &[*fingerprint; 32],
        (
            ModelReply::Completed {
                fingerprint,
                record: by,
                ..
            },
            Acquired::Completed {
                fingerprint: of,
                record: found,
                token: stored_by,
                ..
            },
        ) => {
            of.as_bytes() == &[*fingerprint; 32]
                && record(*by) == found
                && *stored_by == Some(token(*by))
        }
        _ => false,
    }
}

/// The reason for a failure.
enum Failed {
    /// A round ended too late to be conclusive.
    Slow(Duration),
    /// A call returned an error, as after a stall that is longer than the timeout of the store.
    Call(String),
    Differs(String),
}

/// The clock of a store that uses the clock of its process. It does not advance during a round.
#[derive(Clone)]
struct RoundClock(Arc<Mutex<SystemTime>>);

impl RoundClock {
    fn read(&self) -> SystemTime {
        *self.0.lock().unwrap()
    }

    fn advance(&self, time: Duration) {
        *self.0.lock().unwrap() += time;
    }
}

/// Takes a sequence to every state, and every step in it. Returns the number of sequences.
async fn every_transition<S: Store>(
    store: &Arc<S>,
    mutant: Option<Mutant>,
    tick: Duration,
    clock: Option<&RoundClock>,
) -> Result<usize, Failed> {
    let rules = Rules { mutant, ..RULES };
    let first = u64::from_be_bytes(Token::random().unwrap().as_bytes()[..8].try_into().unwrap());
    let mut keys = Vec::new();
    for sequence in sequences(&rules, 3) {
        for step in all_steps() {
            let mut sequence = sequence.clone();
            // The final acquire shows if an entry is left.
            sequence.extend([step, Step::Call(OBSERVER, QUERY)]);
            keys.push(Key {
                number: first.wrapping_add(keys.len() as u64),
                rules,
                entry: None,
                sequence,
                done: 0,
            });
        }
    }
    let sequences = keys.len();
    let durations = durations(tick);
    let mut due = Instant::now();
    while !keys.is_empty() {
        let mut at_work = JoinSet::new();
        let share = keys.len().div_ceil(AT_ONCE);
        while !keys.is_empty() {
            let mut some = keys.split_off(keys.len().saturating_sub(share));
            let store = Arc::clone(store);
            at_work.spawn(async move {
                for key in &mut some {
                    key.round(&*store, durations).await?;
                }
                Ok(some)
            });
        }
        let mut differs = None;
        while let Some(done) = at_work.join_next().await {
            match done.unwrap() {
                Ok(some) => keys.extend(some),
                // A different reply is more informative than a failed call.
                Err(failed) if !matches!(differs, Some(Failed::Differs(_))) => {
                    differs = Some(failed);
                }
                Err(_) => {}
            }
        }
        let took = due.elapsed();
        if clock.is_none() && took > tick / 4 {
            return Err(Failed::Slow(took));
        }
        if let Some(failed) = differs {
            return Err(failed);
        }
        keys.retain_mut(Key::tick);
        match clock {
            Some(clock) => clock.advance(tick),
            None => {
                due += tick;
                sleep_until(due).await;
            }
        }
    }
    Ok(sequences)
}

/// Runs like [`every_transition`], with ticks as long as necessary.
async fn compare_with_model<S: Store>(store: S, mutant: Option<Mutant>) -> Result<(), String> {
    let store = Arc::new(store);
    let mut tick = Duration::from_secs(4);
    let mut failed_calls = 0;
    loop {
        match every_transition(&store, mutant, tick, None).await {
            Ok(sequences) => {
                println!("{sequences} sequences, ticks of {tick:?}");
                return Ok(());
            }
            Err(Failed::Differs(message)) => return Err(message),
            Err(Failed::Call(message)) if failed_calls < 5 => {
                println!("{message}");
                failed_calls += 1;
            }
            Err(Failed::Call(message)) => panic!("{message}"),
            Err(Failed::Slow(took)) if tick < Duration::from_secs(128) => {
                println!("a round ended after {took:?} of {tick:?}");
                tick *= 2;
            }
            Err(Failed::Slow(took)) => {
                panic!("inconclusive: a round took {took:?}")
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn redis_makes_every_transition() {
    let store = redis::shared().store().await;
    compare_with_model(store, None).await.unwrap();
}

// F-144
#[tokio::test(flavor = "multi_thread")]
async fn postgres_makes_every_transition() {
    let store = sql::postgres(postgres::shared(), "transitions").await;
    compare_with_model(store, None).await.unwrap();
}

// F-144, F-145
#[tokio::test(flavor = "multi_thread")]
async fn mariadb_makes_every_transition() {
    let server = MariaDbServer::start(&[]);
    let store = sql::mariadb(&server, "transitions").await;
    compare_with_model(store, None).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn sqlite_makes_every_transition() {
    let scratch = Scratch::new();
    let store = sql::sqlite(&scratch).await;
    compare_with_model(store, None).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn dynamodb_makes_every_transition() {
    let clock = RoundClock(Arc::new(Mutex::new(SystemTime::now())));
    let options = DynamoDbOptions::new()
        .with_clock_skew(Duration::ZERO)
        .with_clock({
            let clock = clock.clone();
            move || clock.read()
        })
        .with_timeout(Duration::from_secs(30));
    let store = dynamodb::shared(StandIn::Dynoxide).store(options).await;
    let tick = Duration::from_secs(4);
    match every_transition(&Arc::new(store), None, tick, Some(&clock)).await {
        Ok(sequences) => println!("{sequences} sequences"),
        Err(Failed::Differs(message) | Failed::Call(message)) => panic!("{message}"),
        Err(Failed::Slow(_)) => unreachable!("with its own clock no round is too slow"),
    }
}

/// A model that lacks a rule differs from the store.
#[tokio::test(flavor = "multi_thread")]
async fn extra_store_rule_is_noticed() {
    let scratch = Scratch::new();
    for mutant in [
        Mutant::NoOwnToken,
        Mutant::UnfencedComplete,
        Mutant::ReleaseByAnyone,
        Mutant::RefuseIsIgnored,
    ] {
        let store = sql::sqlite(&scratch).await;
        let differs = compare_with_model(store, Some(mutant)).await.unwrap_err();
        println!("{mutant:?}: {differs}");
    }
}

const AT_ONCE: usize = 16;
