//! Every call in every state of the model's store (see `docs/internals/verification.md`), on real servers. Each store
//! makes the same transitions, by its own clock.
//!
//! All keys go from one tick to the next together. On a SQL database a tick moves all times of the rows into the past. This
//! equals the passing of time: the rows have all times that the statements compare with the time of the database. On DynamoDB
//! a tick advances the clock of the test.
//!
//! The server of Redis deletes expired entries by its own clock, so these ticks pass in real time. All calls between two ticks
//! must end long before the next deadline. Otherwise the test starts again with longer ticks.

#![expect(clippy::unwrap_used, reason = "tests, their helpers included")]

#[allow(dead_code, reason = "the model has them all")]
#[path = "../../../tests/model/mutant.rs"]
mod mutant;
#[path = "../../../tests/model/sequences.rs"]
mod sequences;
#[allow(dead_code, reason = "the model has mutants and transactions, too")]
#[path = "../../../tests/model/store.rs"]
mod store;
#[path = "../../../tests/model/store_calls.rs"]
mod store_calls;

use std::{
    sync::{Arc, Mutex},
    time::{Duration, SystemTime},
};

use tests::{
    database::{self, TestDatabase, TestDialect},
    scratch::Scratch,
    servers::{
        dynamodb::{self, StandIn},
        redis,
    },
};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep_until},
};
use tower_idempotency::store::{Acquired, Fingerprint, Store, Token, Ttl};
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
    async fn round<S: Store>(&mut self, store: &S, tick: Duration) -> Result<(), Failed> {
        while let Some(Step::Call(caller, call)) = self.sequence.get(self.done) {
            let response = self.rules.apply(&mut self.entry, *caller, *call);
            self.compare(store, tick, *caller, *call, response).await?;
            self.done += 1;
        }
        // The entry shows the effect of the calls. An absent entry is skipped, because a query would acquire it.
        if self.entry.is_some() {
            let response = self.rules.apply(&mut self.entry.clone(), OBSERVER, QUERY);
            self.compare(store, tick, OBSERVER, QUERY, response).await?;
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
        tick: Duration,
        caller: Caller,
        call: store::Call,
        response: ModelReply,
    ) -> Result<(), Failed> {
        let found = call_store(store, durations(tick), id(self.number), caller, call).await;
        let failed = |error| Failed::Call(format!("{call:?} of {caller:?} failed: {error}"));
        let found = found.map_err(failed)?;
        if is_equal_reply(tick, &response, &found) {
            return Ok(());
        }
        let Self { sequence, done, .. } = self;
        Err(Failed::Differs(format!(
            "{call:?} of {caller:?} returns {found:?}, in the model {response:?}, with ticks of {tick:?}: {done} of {sequence:?}"
        )))
    }
}

/// Compares a reply, with its time if it has one.
fn is_equal_reply(tick: Duration, response: &ModelReply, found: &StoreReply) -> bool {
    let StoreReply::Acquired(found) = found else {
        return matches!(
            (response, found),
            (ModelReply::Done, StoreReply::Done) | (ModelReply::LeaseLost, StoreReply::LeaseLost)
        );
    };
    let is_of = |found: &Fingerprint, byte: u8| found.as_bytes() == &[byte; 32];
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
            ModelReply::InProgress { fingerprint, left },
            Acquired::InProgress {
                fingerprint: of,
                expires_in,
            },
        ) => is_of(of, *fingerprint) && is_time_left(tick, *left, *expires_in),
        (
            ModelReply::Orphaned { fingerprint, since },
            Acquired::Orphaned {
                fingerprint: of,
                since: found,
            },
        ) => is_of(of, *fingerprint) && is_time_since(tick, *since, *found),
        (
            ModelReply::Completed {
                fingerprint,
                record: by,
                left,
            },
            Acquired::Completed {
                fingerprint: of,
                record: found,
                token: stored_by,
                expires_in,
            },
        ) => {
            is_of(of, *fingerprint)
                && record(*by) == found
                && *stored_by == Some(token(*by))
                && is_time_left(tick, *left, *expires_in)
        }
        _ => false,
    }
}

/// Returns `true` if a lease or a record with this time left expires after this number of ticks, half a tick early.
///
/// The call and the write may each be up to a quarter of a tick after the beginning of their rounds.
fn is_time_left(tick: Duration, left: u8, found: Duration) -> bool {
    let expected = (tick * left.into()).saturating_sub(tick / 2);
    found.abs_diff(expected) <= tick * 3 / 8
}

/// Returns `true` if an entry with this age of its orphan became one this number of ticks ago.
///
/// A release made it one in that round, or its lease expired half a tick before the round.
fn is_time_since(tick: Duration, since: u8, found: Duration) -> bool {
    let expected = tick * since.into() + tick / 4;
    found.abs_diff(expected) <= tick * 5 / 8
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
///
/// `pass_tick` lets a tick pass after a round that was due at this time. It returns the time at which the next round is due.
async fn every_transition<S: Store>(
    store: &Arc<S>,
    mutant: Option<Mutant>,
    tick: Duration,
    pass_tick: &impl AsyncFn(Duration, Instant) -> Instant,
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
    let mut due = Instant::now();
    while !keys.is_empty() {
        let mut at_work = JoinSet::new();
        let share = keys.len().div_ceil(AT_ONCE);
        while !keys.is_empty() {
            let mut some = keys.split_off(keys.len().saturating_sub(share));
            let store = Arc::clone(store);
            at_work.spawn(async move {
                for key in &mut some {
                    key.round(&*store, tick).await?;
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
        if took > tick / 4 {
            return Err(Failed::Slow(took));
        }
        if let Some(failed) = differs {
            return Err(failed);
        }
        keys.retain_mut(Key::tick);
        due = pass_tick(tick, due).await;
    }
    Ok(sequences)
}

/// Runs like [`every_transition`], with ticks of this length, or longer ones if that is necessary.
async fn compare_with_model<S: Store>(
    store: S,
    mutant: Option<Mutant>,
    mut tick: Duration,
    pass_tick: impl AsyncFn(Duration, Instant) -> Instant,
) -> Result<(), String> {
    let store = Arc::new(store);
    let mut failed_calls = 0;
    loop {
        match every_transition(&store, mutant, tick, &pass_tick).await {
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

/// Compares the store of a database with the model. Instead of waiting for a tick, moves all times of the rows by a tick.
async fn compare_rows_with_model<S: TestDialect>(
    database: &TestDatabase<S>,
    mutant: Option<Mutant>,
) -> Result<(), String> {
    let pass_tick = async |tick: Duration, _: Instant| {
        let times = ["lease_ends", "expires", "created", "completed"];
        let moved = times.map(|time| format!("{time} = {time} - {}", tick.as_millis()));
        let update = format!("update {{table}} set {}", moved.join(", "));
        database.admin(&update).await;
        Instant::now()
    };
    compare_with_model(database.store.clone(), mutant, DAY, pass_tick).await
}

#[tokio::test(flavor = "multi_thread")]
async fn redis_makes_every_transition() {
    let store = redis::shared().store().await;
    let pass_tick = async |tick: Duration, due: Instant| {
        let next = due + tick;
        sleep_until(next).await;
        next
    };
    let compared = compare_with_model(store, None, Duration::from_secs(4), pass_tick).await;
    compared.unwrap();
}

// F-144
#[tokio::test(flavor = "multi_thread")]
async fn postgres_makes_every_transition() {
    let database = database::on_postgres("transitions").await;
    compare_rows_with_model(&database, None).await.unwrap();
}

// F-144, F-145
#[tokio::test(flavor = "multi_thread")]
async fn mariadb_makes_every_transition() {
    let database = database::on_mariadb("transitions").await;
    compare_rows_with_model(&database, None).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn sqlite_makes_every_transition() {
    let scratch = Scratch::new();
    let database = database::sqlite_file_database(&scratch, "transitions").await;
    compare_rows_with_model(&database, None).await.unwrap();
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
    let pass_tick = async |tick: Duration, _: Instant| {
        clock.advance(tick);
        Instant::now()
    };
    let compared = compare_with_model(store, None, DAY, pass_tick).await;
    compared.unwrap();
}

/// A model that lacks a rule differs from the store.
#[tokio::test(flavor = "multi_thread")]
async fn extra_store_rule_is_noticed() {
    let scratch = Scratch::new();
    let database = database::sqlite_file_database(&scratch, "transitions").await;
    for mutant in [
        Mutant::NoOwnToken,
        Mutant::UnfencedComplete,
        Mutant::ReleaseByAnyone,
        Mutant::RefuseIsIgnored,
    ] {
        let compared = compare_rows_with_model(&database, Some(mutant)).await;
        let differs = compared.unwrap_err();
        println!("{mutant:?}: {differs}");
    }
}

const AT_ONCE: usize = 16;
/// A tick that the test skips instead of waiting. No test lasts a quarter of it, so real time changes no reply.
const DAY: Duration = Duration::from_secs(24 * 60 * 60);
