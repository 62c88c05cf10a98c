//! Tests with constructed histories, and the expected judgments.

use super::*;
use crate::oracle::told::{Told, answer, in_progress};

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
fn who_was_hung_up_on_may_have_been_slower_than_its_lease() {
    for (member, answered, unexplained) in [(0, 99, 1), (0, 100, 0), (2, 100, 1)] {
        let history = Told::new()
            .effect(10, 1)
            .asked(member, 0, 20, Outcome::HungUp)
            .effect(20, 7)
            .asked(1, 30, answered, answer(7));
        let found = history.1.unexplained().len();
        assert_eq!(found, unexplained, "{member}, {answered}");
    }
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
fn taken_over_within_counts_takeovers_in_time() {
    let told = killed_at_work()
        .effect(20, 7)
        .asked(1, 115, 120, answer(7))
        .1;
    let waited = Duration::from_millis(109);
    assert_eq!(told.taken_over_within(waited), 1);
    assert_eq!(told.taken_over_within(waited / 2), 0);
    // Without a second execution, and without a strike.
    let replayed = killed_at_work().asked(1, 60, 62, answer(1)).1;
    assert_eq!(replayed.taken_over_within(waited), 0);
    let mut calm = told;
    calm.strikes.clear();
    assert_eq!(calm.taken_over_within(waited), 0);
}

/// The time in which a process is stopped does not count as a wait for the store.
#[test]
fn answer_that_took_a_lease_is_not_compared() {
    for (ended, resumed, contradictions) in [(99, None, 1), (100, None, 0), (180, Some(150), 1)] {
        let mut history = Told::new()
            .effect(10, 1)
            .asked(0, 0, ended, answer(1))
            .effect(20, 7)
            .asked(1, 200, 210, answer(7));
        if let Some(resumed) = resumed {
            history = history.struck(0, 10, 10, Some(resumed));
        }
        let history = history.1;
        let found = history.contradictions_of_prompt_answers().len();
        assert_eq!(found, contradictions, "{ended}");
        assert_eq!(history.contradictions().len(), 1, "{ended}");
    }
}

/// A process that stalled has lost its lease before it is killed.
#[test]
fn slowness_before_a_strike_explains_an_execution() {
    for (killed, unexplained) in [(99, 1), (150, 0)] {
        let history = Told::new()
            .effect(10, 1)
            .asked(0, 0, 160, Outcome::Failed)
            .effect(20, 7)
            .asked(1, 20, 90, answer(7))
            .struck(0, 10, killed, None);
        assert_eq!(history.1.unexplained().len(), unexplained, "{killed}");
    }
}

#[test]
fn a_wait_begins_anew_only_when_the_one_who_may_have_had_the_lease_is_struck() {
    // The lease of the first execution expires at 77 at the earliest.
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
fn an_answer_needs_an_effect() {
    let history = Told::new().asked(0, 0, 5, answer(1)).1;
    assert_eq!(history.uncaused().len(), 1);
    let refused = Told::new().asked(0, 0, 5, Outcome::Refused).1;
    assert_eq!(refused.uncaused().len(), 0);
    let charged = Told::new().asked(0, 0, 5, answer(1)).effect(10, 1).1;
    assert_eq!(charged.uncaused().len(), 0);
}

#[test]
fn a_takeover_allows_one_more_effect_and_no_other_answer() {
    let told = || Told::new().effect(10, 1).asked(0, 0, 5, answer(1));
    for (other, contradictions) in [(7, 1), (1, 0)] {
        let history = told()
            .taken_over(20)
            .effect(20, 7)
            .asked(1, 10, 30, answer(other));
        assert_eq!(history.1.doubles().len(), 0);
        assert_eq!(history.1.contradictions().len(), contradictions, "{other}");
    }
}

#[test]
fn one_key_executes_one_request_until_it_is_free() {
    let told = |is_free: bool| {
        let told = Told::new().effect(10, 1).asked(0, 0, 5, Outcome::HungUp);
        let told = told.effect(20, 7).asked(1, 10, 30, answer(7));
        told.may_again(20, 20, Some("k"), !is_free)
    };
    assert_eq!(told(false).1.contradictions().len(), 0);
    assert_eq!(
        told(false).of_another_request(7).1.contradictions().len(),
        1
    );
    assert_eq!(told(true).of_another_request(7).1.contradictions().len(), 0);
}

#[test]
fn who_is_answered_with_another_requests_effect_is_contradicted() {
    let history = Told::new().effect(10, 1).asked(0, 0, 5, answer(1));
    let mut history = history.of_another_request(1);
    assert_eq!(history.1.contradictions().len(), 0);
    history = history.asked(0, 6, 8, answer(1));
    assert_eq!(history.1.contradictions().len(), 1);
}

#[test]
fn who_is_told_503_is_told_of_no_effect() {
    for (status, contradictions) in [(503, 0), (500, 1)] {
        let Outcome::Answered(mut told) = answer(1) else {
            unreachable!("it is an answer");
        };
        told.status = http::StatusCode::from_u16(status).unwrap();
        let history = Told::new().asked(0, 0, 5, Outcome::Answered(told));
        assert_eq!(history.1.contradictions().len(), contradictions);
        assert_eq!(history.1.uncaused().len(), contradictions);
    }
}

#[test]
fn a_problem_that_is_expected_is_not_strange() {
    let mut history = Told::new().asked(0, 0, 5, Outcome::NotYet("503".to_owned()));
    assert_eq!(history.1.contradictions().len(), 1);
    history.1.problems = &["503"];
    assert_eq!(history.1.contradictions().len(), 0);
}

#[test]
fn what_is_over_is_not_answered_any_more() {
    for (again, stale) in [(60, 0), (105, 0), (106, 1)] {
        let history = Told::new().effect(10, 1).asked(0, 0, 5, answer(1));
        let mut history = history.asked(1, again, again + 5, answer(1)).1;
        assert_eq!(history.stale().len(), 0);
        history.retention = Some(Duration::from_millis(100));
        assert_eq!(history.stale().len(), stale, "{again}");
    }
}

#[test]
fn who_is_told_nothing_definite_is_unanswered() {
    for (outcome, unanswered) in [
        (answer(1), 0),
        (Outcome::Refused, 0),
        (in_progress(), 1),
        (Outcome::HungUp, 1),
    ] {
        let history = Told::new().asked(0, 0, 5, outcome).1;
        assert_eq!(history.unanswered().len(), unanswered);
    }
}

#[test]
fn who_waits_may_be_told_what_was_so_before() {
    for (hearsay, contradictions) in [(14, 1), (15, 0)] {
        let mut history = Told::new()
            .effect(10, 1)
            .forgot(20, 20)
            .effect(20, 7)
            .asked(0, 35, 45, answer(1))
            .asked(1, 35, 50, answer(7))
            .1;
        history.hearsay = Duration::from_millis(hearsay);
        assert_eq!(history.contradictions().len(), contradictions, "{hearsay}");
    }
}

#[test]
fn what_was_answered_is_not_refused_afterwards() {
    let told = || Told::new().effect(10, 1).asked(0, 0, 5, answer(1));
    for (asked, retracted) in [(5, 0), (6, 1)] {
        let refused = told().asked(1, asked, 10, Outcome::Refused);
        assert_eq!(refused.1.retracted().len(), retracted, "{asked}");
    }
    let refused = || told().asked(1, 10, 20, Outcome::Refused);
    assert_eq!(refused().forgot(15, 15).1.retracted().len(), 0);
    assert_eq!(refused().taken_over(15).1.retracted().len(), 1);
    let another = refused().of_another_request(1);
    assert_eq!(another.1.retracted().len(), 0);
    let mut waits = refused().1;
    waits.hearsay = Duration::from_millis(5);
    assert_eq!(waits.retracted().len(), 0);
    waits.hearsay = Duration::from_millis(4);
    assert_eq!(waits.retracted().len(), 1);
}
