//! Delays between attempts, on the paused clock.

use std::time::{Duration, SystemTime};

use tower_idempotency_client::{Budget, Outcome, RetryLayer};

use crate::harness::{Reply, Server, reply, send, status};

/// Returns a layer whose delays are those that the server requests.
fn layer() -> RetryLayer {
    RetryLayer::new().with_backoff(Duration::ZERO, Duration::ZERO)
}

/// Returns the delay before the second attempt, if there was one.
async fn delay(layer: &RetryLayer, headers: &[(&'static str, &str)]) -> Option<Duration> {
    let server = Server::new([reply(503, headers, ""), status(200)]);
    let call = send(layer, &server).await;
    let log = server.take_log();
    if log.len() == 1 {
        assert_eq!(
            (call.status(), call.outcome()),
            (Some(503), Outcome::Unknown)
        );
        return None;
    }
    assert_eq!(call.status(), Some(200));
    Some(log[1].at - log[0].at)
}

#[tokio::test(start_paused = true)]
async fn retry_after_is_obeyed() {
    let date = ("date", "Sun, 06 Nov 1994 08:49:37 GMT");
    for (value, expected) in [
        ("7", 7),
        ("Sun, 06 Nov 1994 08:49:44 GMT", 7),
        ("Sunday, 06-Nov-94 08:49:44 GMT", 7),
        ("Sun, 06 Nov 1994 08:49:00 GMT", 0),
        ("soon", 0),
        ("-7", 0),
        ("", 0),
    ] {
        let delay = delay(&layer(), &[date, ("retry-after", value)]).await;
        assert_eq!(delay, Some(Duration::from_secs(expected)), "{value}");
    }
    // Without a date of the response, the clock of the client counts.
    let at = SystemTime::now() + Duration::from_secs(20);
    let delay = delay(&layer(), &[("retry-after", &httpdate::fmt_http_date(at))]).await;
    let range = Duration::from_secs(1)..=Duration::from_secs(20);
    assert!(range.contains(&delay.unwrap()), "{delay:?}");
}

#[tokio::test(start_paused = true)]
async fn long_retry_after_ends_call_or_is_cut() {
    let hour = [("retry-after", "3600")];
    let huge = [("retry-after", "100000000000000000000")];
    assert_eq!(delay(&layer(), &hour).await, None);
    assert_eq!(delay(&layer(), &huge).await, None);
    let patient = layer().with_deadline(Duration::from_secs(3601));
    assert_eq!(delay(&patient, &hour).await, Some(Duration::from_secs(60)));
    assert_eq!(delay(&patient, &huge).await, Some(Duration::from_secs(60)));
    let obedient = patient.with_max_retry_after(Duration::MAX);
    assert_eq!(
        delay(&obedient, &hour).await,
        Some(Duration::from_secs(3600))
    );
    assert_eq!(delay(&obedient, &huge).await, None);
}

/// Returns the delay before each retry of many calls, which fail this often.
async fn delays(layer: &RetryLayer, failure: Reply, retries: usize) -> Vec<Vec<Duration>> {
    let mut all = vec![Vec::new(); retries];
    for _ in 0..1000 {
        let mut script = vec![failure.clone(); retries];
        script.push(status(200));
        let server = Server::new(script);
        assert_eq!(send(layer, &server).await.status(), Some(200));
        let log = server.take_log();
        for (at, delays) in all.iter_mut().enumerate() {
            delays.push(log[at + 1].at - log[at].at);
        }
    }
    all
}

/// Chi-square test with 20 bins, which fails for one of 1,000 seeds if the delays are uniform.
fn assert_uniform(delays: &[Duration], from: Duration, to: Duration) {
    let mut bins = [0_u32; 20];
    for delay in delays {
        let part = (*delay - from).as_secs_f64() / (to - from).as_secs_f64();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "below 20"
        )]
        let bin = (part * 20.0) as usize;
        bins[bin.min(19)] += 1;
    }
    #[expect(clippy::cast_precision_loss, reason = "a few thousand delays")]
    let expected = delays.len() as f64 / 20.0;
    let sum: f64 = bins
        .iter()
        .map(|&count| (f64::from(count) - expected).powi(2) / expected)
        .sum();
    assert!(sum < 43.8, "{sum}: {bins:?}");
}

/// Returns a layer with enough tokens and time for every retry.
fn unlimited(seed: u64) -> RetryLayer {
    RetryLayer::new()
        .with_max_attempts(10)
        .with_deadline(Duration::MAX)
        .with_budget(Budget::new(u32::MAX))
        .with_jitter_seed(seed)
}

#[tokio::test(start_paused = true)]
async fn delays_are_uniform_and_their_range_doubles() {
    let secs = Duration::from_secs;
    for seed in 1..=3 {
        let layer = unlimited(seed).with_backoff(secs(10), secs(40));
        let all = delays(&layer, status(500), 4).await;
        for (delays, to) in all.iter().zip([10, 20, 40, 40]) {
            assert_uniform(delays, Duration::ZERO, secs(to));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn delays_after_limits_have_longer_range() {
    let secs = Duration::from_secs;
    let layer = unlimited(1)
        .with_backoff(secs(1), secs(400))
        .with_throttled_base(secs(100));
    let all = delays(&layer, status(429), 2).await;
    assert_uniform(&all[0], Duration::ZERO, secs(100));
    assert_uniform(&all[1], Duration::ZERO, secs(200));
}

/// All clients get the same `Retry-After`, and still do not come back together.
#[tokio::test(start_paused = true)]
async fn random_part_follows_retry_after() {
    let secs = Duration::from_secs;
    let layer = unlimited(1).with_backoff(secs(10), secs(10));
    let all = delays(&layer, reply(503, &[("retry-after", "30")], ""), 1).await;
    assert_uniform(&all[0], secs(30), secs(40));
}
