//! Tests with constructed histories, some of which have too many effects.

use super::*;
use crate::oracle::builder::{HistoryBuilder, in_progress, response};

#[test]
fn data_loss_allows_one_more_effect() {
    let once = HistoryBuilder::new()
        .effect(10, 1)
        .attempt(0, 10, 15, response(1))
        .effect(20, 7)
        .attempt(1, 40, 45, response(7));
    let again = |from, until| {
        HistoryBuilder(once.0, once.1.clone())
            .data_loss(from, until)
            .1
    };
    for (from, until, excess, contradictions) in [
        (20, 25, 0, 0),
        // Before the first request for the key.
        (5, 8, 1, 1),
        // During the second effect, whose client may have received the earlier state.
        (42, 43, 0, 0),
        // After both effects.
        (50, 55, 1, 1),
    ] {
        let history = again(from, until);
        assert_eq!(history.excess_effects().len(), excess, "from {from}");
        assert_eq!(
            history.contradictions().len(),
            contradictions,
            "from {from}"
        );
    }
    let twice = again(20, 25);
    let thrice = HistoryBuilder(once.0, twice).effect(10, 2).1;
    assert_eq!(thrice.excess_effects().len(), 1);
}

/// An effect that belongs before the loss of data or after it, by the attempts of its process.
#[test]
fn data_loss_separates_effects_before_and_after() {
    let first = || {
        HistoryBuilder::new()
            .effect(10, 1)
            .attempt(0, 10, 15, response(1))
    };
    let second =
        |history: HistoryBuilder, at| history.effect(20, 7).attempt(1, at, at + 5, response(7));
    let third =
        |history: HistoryBuilder, at| history.effect(10, 2).attempt(0, at, at + 5, response(2));

    // Two occasions lie between the first two effects, and none between the others.
    let history = third(second(first(), 60), 90)
        .data_loss(30, 31)
        .data_loss(40, 41);
    assert_eq!(history.1.excess_effects().len(), 1);
    // One occasion lies between each two effects.
    let history = third(second(first(), 60), 90)
        .data_loss(30, 31)
        .data_loss(80, 81);
    assert_eq!(history.1.excess_effects().len(), 0);
    // The process of the first effect receives another request at the end.
    let history = second(first(), 60).data_loss(70, 71);
    assert_eq!(
        history
            .attempt(0, 80, 85, response(7))
            .1
            .excess_effects()
            .len(),
        1
    );
}

#[test]
fn first_request_after_loss_bounds_effect() {
    // Process 20 receives its first request at 60: both effects came after the loss.
    let both = || {
        HistoryBuilder::new()
            .attempt(1, 5, 6, Outcome::Failed)
            .effect(10, 1)
            .attempt(0, 50, 55, response(1))
            .effect(20, 7)
    };
    let history = both().attempt(1, 60, 65, response(7)).data_loss(20, 21);
    // The process received the request before the loss, and may have executed it since.
    assert_eq!(history.1.excess_effects().len(), 0);
    let mut history = history;
    history.1.attempts.remove(0);
    history = history.attempt(2, 5, 6, Outcome::Failed);
    assert_eq!(history.1.excess_effects().len(), 1);
}

#[test]
fn later_effect_bounds_grant_of_abandoned_request() {
    let left = || {
        let history = HistoryBuilder::new()
            .effect(10, 1)
            .attempt(0, 0, 5, Outcome::HungUp);
        history.attempt(1, 8, 12, in_progress())
    };
    // The process may have executed the request until then.
    let history = left().effect(20, 7).attempt(1, 40, 45, response(7));
    assert_eq!(history.data_loss(30, 31).1.excess_effects().len(), 0);
    // The second effect came after the first, and its response was sent before the loss.
    let history = left().effect(20, 7).attempt(1, 20, 25, response(7));
    assert_eq!(history.data_loss(30, 31).1.excess_effects().len(), 1);
    // The second effect was granted before the first, and came later.
    let history = left().effect(20, 7).attempt(1, 40, 45, response(7));
    assert_eq!(history.data_loss(6, 7).1.excess_effects().len(), 0);
}

/// Each process numbers its executions from 1, so two processes use the same numbers.
#[test]
fn ambiguous_response_bounds_only_first_execution() {
    let history = HistoryBuilder::new()
        .effect(10, 1)
        .attempt(0, 10, 15, Outcome::HungUp)
        .effect(20, 1)
        .attempt(1, 40, 45, response(1))
        .data_loss(30, 31);
    assert_eq!(history.1.excess_effects().len(), 0);
    // The later effect may have been granted after the response of the earlier effect was sent.
    let history = HistoryBuilder::new()
        .effect(10, 1)
        .attempt(0, 0, 5, response(1))
        .effect(20, 1)
        .attempt(1, 0, 8, Outcome::HungUp)
        .data_loss(30, 31);
    assert_eq!(history.1.excess_effects().len(), 0);
}

#[test]
fn occasion_applies_to_its_key_only() {
    for (key, excess) in [(Some("k"), 0), (Some("another"), 1), (None, 0)] {
        let history = HistoryBuilder::new()
            .effect(10, 1)
            .attempt(0, 0, 5, response(1))
            .effect(20, 7)
            .attempt(1, 10, 30, response(7))
            .occasion(20, 20, key, false);
        assert_eq!(history.1.excess_effects().len(), excess, "{key:?}");
    }
}

#[test]
fn killed_process_gets_no_later_grant() {
    for (killed, excess) in [(10, 1), (22, 0)] {
        let history = HistoryBuilder::new()
            .effect(20, 7)
            .attempt(1, 0, 8, response(7))
            .effect(10, 1)
            .attempt(0, 0, 30, Outcome::Failed)
            .strike(0, 10, killed, None)
            .takeover(20);
        assert_eq!(history.1.excess_effects().len(), excess, "{killed}");
    }
}

#[test]
fn effects_move_to_free_places() {
    let place = |possible: &[&[usize]]| {
        let possible: Vec<_> = possible.iter().map(|it| it.to_vec()).collect();
        has_matching(&possible, 3)
    };
    assert!(place(&[&[0, 1], &[0]]));
    assert!(place(&[&[0, 1], &[0, 2], &[0]]));
    assert!(!place(&[&[0, 1], &[0, 1], &[0, 1]]));
    assert!(!place(&[&[]]));
}
