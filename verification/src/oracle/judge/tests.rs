//! Tests with constructed histories, and the expected judgments.

use super::*;
use crate::oracle::builder::{HistoryBuilder, in_progress, response};

fn killed_during_execution() -> HistoryBuilder {
    HistoryBuilder::new()
        .effect(10, 1)
        .attempt(0, 0, 11, Outcome::Failed)
        .strike(0, 10, 10, None)
        .attempt(1, 50, 51, in_progress())
}

#[test]
fn kill_explains_second_execution() {
    let history = killed_during_execution()
        .effect(20, 7)
        .attempt(1, 115, 120, response(7))
        .1;
    assert_eq!(history.excess_effects().len(), 1);
    assert_eq!(history.unexplained_effects().len(), 0);
    assert_eq!(history.contradictions().len(), 0);
    let sums = history.sums();
    assert_eq!((sums.keys, sums.struck, sums.executed_twice), (1, 1, 1));
    assert_eq!(sums.longest_wait, Duration::from_millis(109));
    assert_eq!(history.stuck(Duration::from_millis(109)).len(), 0);
    assert_eq!(history.stuck(Duration::from_millis(108)).len(), 1);
}

#[test]
fn kill_does_not_explain_third_execution() {
    let history = killed_during_execution().effect(20, 7).effect(11, 1);
    assert_eq!(
        history
            .attempt(1, 115, 120, response(7))
            .1
            .unexplained_effects()
            .len(),
        1
    );
}

#[test]
fn two_pauses_explain_two_takeovers() {
    for (strikes, executions, unexplained) in [(2, 2, 0), (1, 2, 1), (2, 1, 0), (3, 1, 1)] {
        let mut history = HistoryBuilder::new();
        for n in 0..strikes {
            let at = 10 + 300 * n;
            history = history.attempt(0, at - 5, at + 250, in_progress()).strike(
                0,
                10,
                at,
                Some(at + 250),
            );
        }
        for n in 0..executions {
            history = history.effect(10, n + 1);
        }
        // Adds the execution whose response was sent, and one more if the pauses must not explain an effect.
        for n in 0..=u64::from(unexplained == 1 && executions == 1) {
            history = history.effect(20, 7 + n);
        }
        let history = history.attempt(1, 1000, 1010, response(7)).1;
        let found = history.unexplained_effects().len();
        assert_eq!(found, unexplained, "{strikes} strikes, {executions}");
    }
}

#[test]
fn second_execution_without_strike_is_unexplained() {
    let history = HistoryBuilder::new().effect(10, 1).effect(20, 7);
    let history = history
        .attempt(0, 0, 5, response(1))
        .attempt(1, 6, 9, response(7))
        .1;
    assert_eq!(history.unexplained_effects().len(), 1);
    assert_eq!(history.contradictions().len(), 1);
}

#[test]
fn slowness_after_hangup_explains_execution() {
    for (member, answered, unexplained) in [(0, 99, 1), (0, 100, 0), (2, 100, 1)] {
        let history = HistoryBuilder::new()
            .effect(10, 1)
            .attempt(member, 0, 20, Outcome::HungUp)
            .effect(20, 7)
            .attempt(1, 30, answered, response(7));
        let found = history.1.unexplained_effects().len();
        assert_eq!(found, unexplained, "{member}, {answered}");
    }
}

#[test]
fn execution_explains_one_more_effect() {
    // Four clients wait for a lease or longer. The process may be killed after it lost its lease.
    for (is_killed, own, others, unexplained) in [
        (false, 1, 1, 0),
        (false, 1, 2, 1),
        (false, 1, 4, 1),
        (false, 2, 1, 0),
        (true, 1, 1, 0),
        (true, 1, 2, 1),
    ] {
        let mut history = HistoryBuilder::new();
        for began in 0..4 {
            history = history.attempt(0, began, began + 120, in_progress());
        }
        if is_killed {
            history = history.strike(0, 10, 115, None);
        }
        for n in 0..own {
            history = history.effect(10, n + 1);
        }
        for n in 0..others {
            history = history.effect(20, n + 7);
        }
        let history = history.attempt(1, 130, 140, response(7)).1;
        let found = history.unexplained_effects().len();
        assert_eq!(found, unexplained, "{is_killed}, {own} and {others}");
    }
}

#[test]
fn strike_outside_request_explains_nothing() {
    for (at, unexplained) in [(2, 1), (10, 0), (120, 1)] {
        let history = HistoryBuilder::new()
            .strike(0, 10, at, None)
            .effect(10, 1)
            .attempt(0, 5, 11, Outcome::Failed)
            .effect(20, 7)
            .attempt(1, 20, 100, response(7));
        assert_eq!(history.1.unexplained_effects().len(), unexplained, "{at}");
    }
}

#[test]
fn pause_explains_only_expired_lease() {
    for (resumed, unexplained) in [(40, 1), (300, 0)] {
        let history = HistoryBuilder::new()
            .effect(10, 1)
            .attempt(0, 0, resumed + 5, response(7))
            .strike(0, 10, 10, Some(resumed))
            .effect(20, 7)
            .attempt(1, 20, 30, response(7));
        assert_eq!(
            history.1.unexplained_effects().len(),
            unexplained,
            "{resumed}"
        );
        let late = usize::from(unexplained == 0);
        let sums = history.1.sums();
        assert_eq!((sums.late, sums.late_and_outrun), (late, late));
    }
}

/// While a process is stopped, a second effect of other processes needs its own reason.
#[test]
fn pause_explains_only_keys_of_its_process() {
    for (member, pid, at, unexplained) in [
        (0, 10, 5, 0),
        // The process had no effect of the key.
        (2, 30, 5, 1),
        // The key had its response.
        (0, 10, 70, 1),
    ] {
        let history = HistoryBuilder::new()
            .effect(10, 1)
            .attempt(0, 0, 20, Outcome::HungUp)
            .effect(20, 7)
            .attempt(1, 30, 60, response(7))
            .strike(member, pid, at, Some(at + 150))
            .1;
        let found = history.unexplained_effects().len();
        assert_eq!(found, unexplained, "{pid} at {at}");
    }
}

#[test]
fn fault_without_request_is_not_counted() {
    let request = || HistoryBuilder::new().attempt(0, 10, 20, Outcome::Failed);
    // A kill takes a millisecond here.
    for (member, at, counted) in [(0, 8, 0), (0, 9, 1), (0, 20, 1), (0, 21, 0), (1, 15, 0)] {
        let history = request().strike(member, 10, at, None).1;
        let found = history.count_strikes_with_request();
        assert_eq!(found, counted, "member {member} at {at}");
    }
    let HistoryBuilder(start, history) = request();
    for (from, until, counts) in [(5, 9, false), (5, 10, true), (21, 25, false)] {
        let [from, until] = [from, until].map(|at| start + Duration::from_millis(at));
        assert_eq!(history.has_request_between(from, until), counts);
    }
}

#[test]
fn response_without_effect_is_contradiction() {
    for (outcome, contradictions) in [
        (response(1), 0),
        (response(2), 1),
        (in_progress(), 0),
        (Outcome::Refused, 0),
        (Outcome::NotYet("store-unavailable".to_owned()), 0),
        (Outcome::NotYet("500".to_owned()), 1),
    ] {
        let history = HistoryBuilder::new()
            .effect(10, 1)
            .attempt(0, 0, 5, outcome.clone());
        let found = history.1.contradictions().len();
        assert_eq!(found, contradictions, "{outcome:?}");
    }
}

#[test]
fn refusals_are_counted_by_effect() {
    let with = killed_during_execution()
        .attempt(1, 115, 120, Outcome::Refused)
        .1;
    let mut without = with.clone();
    without.effects.clear();
    let counted = |history: &History| {
        let sums = history.sums();
        (sums.refused_with_effect, sums.refused_without_effect)
    };
    assert_eq!((counted(&with), counted(&without)), ((1, 0), (0, 1)));
}

#[test]
fn response_of_killed_process_counts_as_lost_reply() {
    let history = killed_during_execution().attempt(1, 60, 62, response(1)).1;
    assert_eq!(history.sums().lost_replies, 1);
    assert_eq!(history.excess_effects().len(), 0);
}

#[test]
fn key_without_response_is_stuck() {
    let history = HistoryBuilder::new().attempt(0, 0, 5, in_progress()).1;
    assert_eq!(history.stuck(Duration::from_secs(3600)).len(), 1);
}

#[test]
fn taken_over_within_counts_takeovers_in_time() {
    let history = killed_during_execution()
        .effect(20, 7)
        .attempt(1, 115, 120, response(7))
        .1;
    let waited = Duration::from_millis(109);
    assert_eq!(history.taken_over_within(waited), 1);
    assert_eq!(history.taken_over_within(waited / 2), 0);
    // There is no second execution, or no strike.
    let replayed = killed_during_execution().attempt(1, 60, 62, response(1)).1;
    assert_eq!(replayed.taken_over_within(waited), 0);
    let mut calm = history;
    calm.strikes.clear();
    assert_eq!(calm.taken_over_within(waited), 0);
}

/// The time during which a process is stopped does not count as a wait for the store.
#[test]
fn response_slower_than_lease_is_not_compared() {
    for (ended, resumed, contradictions) in [(99, None, 1), (100, None, 0), (180, Some(150), 1)] {
        let mut history = HistoryBuilder::new()
            .effect(10, 1)
            .attempt(0, 0, ended, response(1))
            .effect(20, 7)
            .attempt(1, 200, 210, response(7));
        if let Some(resumed) = resumed {
            history = history.strike(0, 10, 10, Some(resumed));
        }
        let history = history.1;
        let found = history.contradictions_of_prompt_answers().len();
        assert_eq!(found, contradictions, "{ended}");
        assert_eq!(history.contradictions().len(), 1, "{ended}");
    }
}

/// A process that stalled lost its lease before it was killed.
#[test]
fn slowness_before_strike_explains_execution() {
    for (killed, unexplained) in [(99, 1), (150, 0)] {
        let history = HistoryBuilder::new()
            .effect(10, 1)
            .attempt(0, 0, 160, Outcome::Failed)
            .effect(20, 7)
            .attempt(1, 20, 90, response(7))
            .strike(0, 10, killed, None);
        assert_eq!(
            history.1.unexplained_effects().len(),
            unexplained,
            "{killed}"
        );
    }
}

#[test]
fn wait_restarts_only_if_lease_holder_is_struck() {
    // The lease of the first execution expires at 77 at the earliest.
    for (at, waited) in [(30, 190), (100, 100)] {
        let history = killed_during_execution()
            .attempt(1, 29, 101, Outcome::Failed)
            .strike(1, 20, at, None)
            .attempt(0, 195, 200, Outcome::Refused);
        let longest = history.1.sums().longest_wait;
        assert_eq!(longest, Duration::from_millis(waited - 1), "{at}");
    }
}

#[test]
fn response_without_effect_is_found() {
    let history = HistoryBuilder::new().attempt(0, 0, 5, response(1)).1;
    assert_eq!(history.responses_without_effect().len(), 1);
    let refused = HistoryBuilder::new().attempt(0, 0, 5, Outcome::Refused).1;
    assert_eq!(refused.responses_without_effect().len(), 0);
    let charged = HistoryBuilder::new()
        .attempt(0, 0, 5, response(1))
        .effect(10, 1)
        .1;
    assert_eq!(charged.responses_without_effect().len(), 0);
}

#[test]
fn takeover_allows_second_effect_but_same_response() {
    let answered = || {
        HistoryBuilder::new()
            .effect(10, 1)
            .attempt(0, 0, 5, response(1))
    };
    for (other, contradictions) in [(7, 1), (1, 0)] {
        let history = answered()
            .takeover(20)
            .effect(20, 7)
            .attempt(1, 10, 30, response(other));
        assert_eq!(history.1.excess_effects().len(), 0);
        assert_eq!(history.1.contradictions().len(), contradictions, "{other}");
    }
}

#[test]
fn one_key_executes_one_request_until_it_is_free() {
    let history = |is_free: bool| {
        let history = HistoryBuilder::new()
            .effect(10, 1)
            .attempt(0, 0, 5, Outcome::HungUp);
        let history = history.effect(20, 7).attempt(1, 10, 30, response(7));
        history.occasion(20, 20, Some("k"), !is_free)
    };
    assert_eq!(history(false).1.contradictions().len(), 0);
    assert_eq!(
        history(false)
            .mark_other_request(7)
            .1
            .contradictions()
            .len(),
        1
    );
    assert_eq!(
        history(true).mark_other_request(7).1.contradictions().len(),
        0
    );
}

#[test]
fn effect_of_other_request_is_contradiction() {
    let history = HistoryBuilder::new()
        .effect(10, 1)
        .attempt(0, 0, 5, response(1));
    let mut history = history.mark_other_request(1);
    assert_eq!(history.1.contradictions().len(), 0);
    history = history.attempt(0, 6, 8, response(1));
    assert_eq!(history.1.contradictions().len(), 1);
}

#[test]
fn response_503_reports_no_effect() {
    for (status, contradictions) in [(503, 0), (500, 1)] {
        let Outcome::Answered(mut response) = response(1) else {
            unreachable!("the outcome is a response");
        };
        response.status = http::StatusCode::from_u16(status).unwrap();
        let history = HistoryBuilder::new().attempt(0, 0, 5, Outcome::Answered(response));
        assert_eq!(history.1.contradictions().len(), contradictions);
        assert_eq!(history.1.responses_without_effect().len(), contradictions);
    }
}

#[test]
fn expected_problem_is_no_contradiction() {
    let mut history = HistoryBuilder::new().attempt(0, 0, 5, Outcome::NotYet("503".to_owned()));
    assert_eq!(history.1.contradictions().len(), 1);
    history.1.problems = &["503"];
    assert_eq!(history.1.contradictions().len(), 0);
}

#[test]
fn response_after_record_expiry_is_stale() {
    for (again, stale) in [(60, 0), (105, 0), (106, 1)] {
        let history = HistoryBuilder::new()
            .effect(10, 1)
            .attempt(0, 0, 5, response(1));
        let mut history = history.attempt(1, again, again + 5, response(1)).1;
        assert_eq!(history.stale().len(), 0);
        history.retention = Some(Duration::from_millis(100));
        assert_eq!(history.stale().len(), stale, "{again}");
    }
}

#[test]
fn key_without_definite_outcome_is_found() {
    for (outcome, without_response) in [
        (response(1), 0),
        (Outcome::Refused, 0),
        (in_progress(), 1),
        (Outcome::HungUp, 1),
    ] {
        let history = HistoryBuilder::new().attempt(0, 0, 5, outcome).1;
        assert_eq!(history.keys_without_response().len(), without_response);
    }
}

#[test]
fn waiter_may_get_older_reply() {
    for (max_reply_age, contradictions) in [(14, 1), (15, 0)] {
        let mut history = HistoryBuilder::new()
            .effect(10, 1)
            .data_loss(20, 20)
            .effect(20, 7)
            .attempt(0, 35, 45, response(1))
            .attempt(1, 35, 50, response(7))
            .1;
        history.max_reply_age = Duration::from_millis(max_reply_age);
        assert_eq!(
            history.contradictions().len(),
            contradictions,
            "{max_reply_age}"
        );
    }
}

#[test]
fn refusal_after_response_is_retraction() {
    let answered = || {
        HistoryBuilder::new()
            .effect(10, 1)
            .attempt(0, 0, 5, response(1))
    };
    for (began, retracted) in [(5, 0), (6, 1)] {
        let refused = answered().attempt(1, began, 10, Outcome::Refused);
        assert_eq!(refused.1.retracted().len(), retracted, "{began}");
    }
    let refused = || answered().attempt(1, 10, 20, Outcome::Refused);
    assert_eq!(refused().data_loss(15, 15).1.retracted().len(), 0);
    assert_eq!(refused().takeover(15).1.retracted().len(), 1);
    let another = refused().mark_other_request(1);
    assert_eq!(another.1.retracted().len(), 0);
    let mut waits = refused().1;
    waits.max_reply_age = Duration::from_millis(5);
    assert_eq!(waits.retracted().len(), 0);
    waits.max_reply_age = Duration::from_millis(4);
    assert_eq!(waits.retracted().len(), 1);
}
