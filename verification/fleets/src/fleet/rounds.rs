//! Rounds of a campaign that strikes at random, until each required case was seen.

use std::fmt::Display;

/// A case that must be seen, and a function that counts it in the result of a round.
pub type Case<T> = (&'static str, fn(&T) -> usize);

/// Runs rounds until each case was seen, and prints the result of each round. `round` receives the number of the round,
/// from 0.
///
/// Random strikes produce a case only by chance, and seldom on a machine that stalls. `round` must check for violations
/// itself. This function checks only that the required cases occurred.
///
/// # Panics
///
/// Panics if a case was not seen in 20 rounds.
pub async fn until_seen<T: Display>(cases: &[Case<T>], mut round: impl AsyncFnMut(u64) -> T) {
    let mut missing = cases.to_vec();
    for n in 0..MOST_ROUNDS {
        let found = round(n).await;
        println!("round {n}: {found}");
        missing.retain(|(_, count)| count(&found) == 0);
        if missing.is_empty() {
            return;
        }
    }
    let missing: Vec<_> = missing.iter().map(|(name, _)| *name).collect();
    panic!("not seen in {MOST_ROUNDS} rounds: {}", missing.join(", "));
}

const MOST_ROUNDS: u64 = 20;

#[cfg(test)]
mod tests {
    use super::*;

    const ODD: Case<u64> = ("odd", |n| (n % 2) as usize);
    const LATE: Case<u64> = ("late", |n| usize::from(*n == 3));
    const NEVER: Case<u64> = ("never", |_| 0);

    #[tokio::test]
    async fn rounds_end_when_each_case_was_seen() {
        let mut played = 0;
        until_seen(&[ODD, LATE], async |n| {
            played += 1;
            n
        })
        .await;
        assert_eq!(played, 4);
    }

    #[tokio::test]
    #[should_panic(expected = "not seen in 20 rounds: never")]
    async fn case_that_is_never_seen_panics() {
        until_seen(&[ODD, NEVER], async |n| n).await;
    }
}
