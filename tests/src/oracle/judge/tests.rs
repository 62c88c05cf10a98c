//! Histories that are told, and what is to be said of them.

use http::{HeaderMap, StatusCode};

use super::*;
use crate::Answer;

const LEASE: Duration = Duration::from_millis(100);
const REQUEST: &str = "POST /slow/40";

/// Two members: process 10 at first and then process 11 is the first of them, process 20 the second.
struct Told(Instant, History);

impl Told {
    fn new() -> Self {
        let history = History {
            effects: Vec::new(),
            attempts: Vec::new(),
            strikes: Vec::new(),
            occasions: Vec::new(),
            processes: BTreeMap::from([(10, 0), (11, 0), (20, 1)]),
            lease: LEASE,
            problems: &[],
        };
        Self(Instant::now(), history)
    }

    fn at(&self, ms: u64) -> Instant {
        self.0 + Duration::from_millis(ms)
    }

    fn effect(mut self, pid: u32, n: u64) -> Self {
        self.1.effects.push(Effect {
            pid,
            n,
            request: REQUEST.to_owned(),
            key: "k".to_owned(),
        });
        self
    }

    fn asked(mut self, member: usize, from: u64, to: u64, outcome: Outcome) -> Self {
        let attempt = Attempt {
            key: "k".to_owned(),
            request: REQUEST.to_owned(),
            member,
            began: self.at(from),
            ended: self.at(to),
            outcome,
        };
        self.1.attempts.push(attempt);
        self
    }

    fn forgot(mut self, from: u64, until: u64) -> Self {
        let (from, until) = (self.at(from), self.at(until));
        self.1.occasions.push(Occasion {
            key: None,
            from,
            until,
        });
        self
    }

    fn struck(mut self, member: usize, pid: u32, at: u64, resumed: Option<u64>) -> Self {
        let strike = Strike {
            member,
            pid,
            ordered: self.at(at),
            down: self.at(at + 1),
            resumed: resumed.map(|at| self.at(at)),
        };
        self.1.strikes.push(strike);
        self
    }
}

fn answer(n: u64) -> Outcome {
    let mut headers = HeaderMap::new();
    headers.insert("x-execution", n.into());
    Outcome::Answered(Answer {
        status: StatusCode::CREATED,
        headers,
        body: format!("execution {n}").into(),
    })
}

fn in_progress() -> Outcome {
    Outcome::NotYet("in-progress".to_owned())
}

fn killed_at_work() -> Told {
    Told::new()
        .effect(10, 1)
        .asked(0, 0, 11, Outcome::Failed)
        .struck(0, 10, 10, None)
        .asked(1, 50, 51, in_progress())
}

#[test]
fn a_second_execution_is_explained_by_the_end_of_the_first() {
    let history = killed_at_work()
        .effect(20, 7)
        .asked(1, 115, 120, answer(7))
        .1;
    assert_eq!(history.doubles().len(), 1);
    assert_eq!(history.unexplained().len(), 0);
    assert_eq!(history.contradictions().len(), 0);
    let sums = history.sums();
    assert_eq!((sums.keys, sums.struck, sums.doubles), (1, 1, 1));
    assert_eq!(sums.longest_wait, Duration::from_millis(109));
    assert_eq!(history.stuck(Duration::from_millis(109)).len(), 0);
    assert_eq!(history.stuck(Duration::from_millis(108)).len(), 1);
}

#[test]
fn a_third_execution_needs_another_explanation() {
    let history = killed_at_work().effect(20, 7).effect(11, 1);
    assert_eq!(
        history.asked(1, 115, 120, answer(7)).1.unexplained().len(),
        1
    );
}

#[test]
fn a_process_that_is_paused_twice_may_be_taken_over_twice() {
    for (strikes, executions, unexplained) in [(2, 2, 0), (1, 2, 1), (2, 1, 0), (3, 1, 1)] {
        let mut history = Told::new();
        for n in 0..strikes {
            let at = 10 + 300 * n;
            history =
                history
                    .asked(0, at - 5, at + 250, in_progress())
                    .struck(0, 10, at, Some(at + 250));
        }
        for n in 0..executions {
            history = history.effect(10, n + 1);
        }
        // And the one that was answered, or that and one more than the pauses of the first explain.
        for n in 0..=u64::from(unexplained == 1 && executions == 1) {
            history = history.effect(20, 7 + n);
        }
        let history = history.asked(1, 1000, 1010, answer(7)).1;
        let found = history.unexplained().len();
        assert_eq!(found, unexplained, "{strikes} strikes, {executions}");
    }
}

#[test]
fn a_second_execution_without_a_strike_is_unexplained() {
    let history = Told::new().effect(10, 1).effect(20, 7);
    let history = history
        .asked(0, 0, 5, answer(1))
        .asked(1, 6, 9, answer(7))
        .1;
    assert_eq!(history.unexplained().len(), 1);
    assert_eq!(history.contradictions().len(), 1);
}

#[test]
fn a_strike_after_the_answer_or_before_the_request_explains_nothing() {
    for (at, unexplained) in [(2, 1), (10, 0), (120, 1)] {
        let history = Told::new()
            .struck(0, 10, at, None)
            .effect(10, 1)
            .asked(0, 5, 11, Outcome::Failed)
            .effect(20, 7)
            .asked(1, 20, 100, answer(7));
        assert_eq!(history.1.unexplained().len(), unexplained, "{at}");
    }
}

#[test]
fn a_pause_explains_only_if_the_lease_may_have_run_out() {
    for (resumed, unexplained) in [(40, 1), (300, 0)] {
        let history = Told::new()
            .effect(10, 1)
            .asked(0, 0, resumed + 5, answer(7))
            .struck(0, 10, 10, Some(resumed))
            .effect(20, 7)
            .asked(1, 20, 30, answer(7));
        assert_eq!(history.1.unexplained().len(), unexplained, "{resumed}");
        let late = usize::from(unexplained == 0);
        let sums = history.1.sums();
        assert_eq!((sums.late, sums.late_and_outrun), (late, late));
    }
}

#[test]
fn whoever_is_told_of_no_execution_or_of_an_error_is_contradicted() {
    for (outcome, contradictions) in [
        (answer(1), 0),
        (answer(2), 1),
        (in_progress(), 0),
        (Outcome::Refused, 0),
        (Outcome::NotYet("store-unavailable".to_owned()), 0),
        (Outcome::NotYet("500".to_owned()), 1),
    ] {
        let history = Told::new().effect(10, 1).asked(0, 0, 5, outcome.clone());
        let found = history.1.contradictions().len();
        assert_eq!(found, contradictions, "{outcome:?}");
    }
}

#[test]
fn who_is_refused_is_counted_by_what_had_happened() {
    let with = killed_at_work().asked(1, 115, 120, Outcome::Refused).1;
    let mut without = with.clone();
    without.effects.clear();
    let counted = |history: &History| {
        let sums = history.sums();
        (sums.refused_with_effect, sums.refused_without_effect)
    };
    assert_eq!((counted(&with), counted(&without)), ((1, 0), (0, 1)));
}

#[test]
fn an_answer_that_its_process_could_not_give_is_told_by_another() {
    let history = killed_at_work().asked(1, 60, 62, answer(1)).1;
    assert_eq!(history.sums().lost_replies, 1);
    assert_eq!(history.doubles().len(), 0);
}

#[test]
fn who_never_had_an_answer_is_stuck() {
    let history = Told::new().asked(0, 0, 5, in_progress()).1;
    assert_eq!(history.stuck(Duration::from_secs(3600)).len(), 1);
}

#[test]
fn a_wait_begins_anew_only_when_the_one_who_may_have_had_the_lease_is_struck() {
    // The lease of the first is over at 77 at the earliest.
    for (at, waited) in [(30, 190), (100, 100)] {
        let history = killed_at_work()
            .asked(1, 29, 101, Outcome::Failed)
            .struck(1, 20, at, None)
            .asked(0, 195, 200, Outcome::Refused);
        let longest = history.1.sums().longest_wait;
        assert_eq!(longest, Duration::from_millis(waited - 1), "{at}");
    }
}

#[test]
fn what_the_store_has_forgotten_may_happen_once_more() {
    let once = Told::new()
        .effect(10, 1)
        .asked(0, 10, 15, answer(1))
        .effect(20, 7)
        .asked(1, 40, 45, answer(7));
    let again = |from, until| Told(once.0, once.1.clone()).forgot(from, until).1;
    for (from, until, doubles, contradictions) in [
        (20, 25, 0, 0),
        // Before it was asked for.
        (5, 8, 1, 1),
        // While the second one was under way, which may have been told what was there before.
        (42, 43, 0, 0),
        // After both.
        (50, 55, 1, 1),
    ] {
        let history = again(from, until);
        assert_eq!(history.doubles().len(), doubles, "from {from}");
        assert_eq!(
            history.contradictions().len(),
            contradictions,
            "from {from}"
        );
    }
    let twice = again(20, 25);
    let thrice = Told(once.0, twice).effect(10, 2).1;
    assert_eq!(thrice.doubles().len(), 1);
}

#[test]
fn an_answer_needs_an_effect() {
    let history = Told::new().asked(0, 0, 5, answer(1)).1;
    assert_eq!(history.uncaused().len(), 1);
    let refused = Told::new().asked(0, 0, 5, Outcome::Refused).1;
    assert_eq!(refused.uncaused().len(), 0);
    let charged = Told::new().asked(0, 0, 5, answer(1)).effect(10, 1).1;
    assert_eq!(charged.uncaused().len(), 0);
}

/// Each of these has no more effects than one, and one for each time that the store forgot.
#[test]
fn what_is_forgotten_explains_one_effect_on_either_side_of_it() {
    let first = || Told::new().effect(10, 1).asked(0, 10, 15, answer(1));
    let second = |told: Told, at| told.effect(20, 7).asked(1, at, at + 5, answer(7));
    let third = |told: Told, at| told.effect(10, 2).asked(0, at, at + 5, answer(2));

    // Twice between the first two, never between the others.
    let history = third(second(first(), 60), 90).forgot(30, 31).forgot(40, 41);
    assert_eq!(history.1.doubles().len(), 1);
    // Once between each.
    let history = third(second(first(), 60), 90).forgot(30, 31).forgot(80, 81);
    assert_eq!(history.1.doubles().len(), 0);
    // Whoever had the first effect is asked again after all of it.
    let history = second(first(), 60).forgot(70, 71);
    assert_eq!(history.asked(0, 80, 85, answer(7)).1.doubles().len(), 1);
}

#[test]
fn a_process_that_is_asked_after_the_loss_had_its_effect_after_it() {
    // Process 20 is asked at 60 first: both came after what was forgotten.
    let both = || {
        Told::new()
            .asked(1, 5, 6, Outcome::Failed)
            .effect(10, 1)
            .asked(0, 50, 55, answer(1))
            .effect(20, 7)
    };
    let history = both().asked(1, 60, 65, answer(7)).forgot(20, 21);
    // It was asked before, and may have been at it since.
    assert_eq!(history.1.doubles().len(), 0);
    let mut history = history;
    history.1.attempts.remove(0);
    history = history.asked(2, 5, 6, Outcome::Failed);
    assert_eq!(history.1.doubles().len(), 1);
}

#[test]
fn a_client_that_left_bounds_nothing_but_the_effects_that_came_later_do() {
    let left = || {
        let told = Told::new().effect(10, 1).asked(0, 0, 5, Outcome::HungUp);
        told.asked(1, 8, 12, in_progress())
    };
    // It may have been at it until then.
    let history = left().effect(20, 7).asked(1, 40, 45, answer(7));
    assert_eq!(history.forgot(30, 31).1.doubles().len(), 0);
    // The second one came after it and was told before that.
    let history = left().effect(20, 7).asked(1, 20, 25, answer(7));
    assert_eq!(history.forgot(30, 31).1.doubles().len(), 1);
    // The second one was at it before the first, and came later.
    let history = left().effect(20, 7).asked(1, 40, 45, answer(7));
    assert_eq!(history.forgot(6, 7).1.doubles().len(), 0);
}

/// Numbers of executions are those of a process: another one has the same.
#[test]
fn an_answer_of_two_possible_executions_is_of_the_earlier_one_or_later() {
    let history = Told::new()
        .effect(10, 1)
        .asked(0, 10, 15, Outcome::HungUp)
        .effect(20, 1)
        .asked(1, 40, 45, answer(1))
        .forgot(30, 31);
    assert_eq!(history.1.doubles().len(), 0);
}
