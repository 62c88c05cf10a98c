//! The events and counters of failed requests.

use std::time::Duration;

use ::tests::observed::{observed, total};
use tower_idempotency::IDEMPOTENCY_KEY;

use super::*;
use crate::config::tests::minimal;

fn forwarding(unknown: UnknownOutcome) -> Forwarding {
    let config = minimal("http://127.0.0.1:3000").0;
    Forwarding {
        name: "app".into(),
        is_protected: true,
        pool: Arc::new(Pool::new(&config.upstream["app"]).unwrap()),
        forwarded: Forwarded::default(),
        host: HostHeader::default(),
        unknown,
        unknown_statuses: vec![StatusCode::BAD_GATEWAY],
        forward_key: ForwardKey::default(),
        encoding: Encoding::default(),
        key_header: IDEMPOTENCY_KEY,
        kept: [IDEMPOTENCY_KEY].into(),
        is_key_quoted: false,
        tunnels: Tunnels::default(),
    }
}

/// Returns the values of the field `count` in the lines of an event.
fn counts(log: &str, event: &str) -> Vec<usize> {
    let lines = log.lines().filter(|line| line.contains(event));
    lines
        .map(|line| {
            let (_, count) = line.rsplit_once(" count=").unwrap();
            count.parse().unwrap()
        })
        .collect()
}

/// An upstream that is down fails each request.
#[test]
fn failing_upstream_warns_each_second() {
    const REQUESTS: usize = 60;
    for (unknown, expected) in [
        (UnknownOutcome::Attention, vec![1_usize; REQUESTS]),
        (UnknownOutcome::Orphan, vec![1, 20, 20]),
        (UnknownOutcome::Free, vec![1, 20, 20]),
    ] {
        let (metrics, log) = observed("warn", async {
            let forwarding = forwarding(unknown);
            for _ in 0..REQUESTS {
                drop(forwarding.failed(&SendError::Timeout, true));
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        });
        assert_eq!(counts(&log, "upstream failed"), [1, 20, 20], "{log}");
        assert_eq!(counts(&log, "outcome unknown"), expected, "{log}");
        for metric in ["upstream_failures", "unknown_outcomes"] {
            let metric = format!("idempotency_proxy_{metric}_total");
            assert_eq!(total(&metrics, &metric), REQUESTS as f64, "{metric}");
        }
    }
}

#[test]
fn unreachable_upstream_warns_each_second() {
    let (_, log) = observed("warn", async {
        let forwarding = forwarding(UnknownOutcome::Attention);
        for _ in 0..60 {
            let error = SendError::Unsent("connection refused".into());
            drop(forwarding.failed(&error, true));
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    });
    assert_eq!(counts(&log, "upstream failed"), [1, 20, 20], "{log}");
    assert!(log.contains("cause=\"connection refused\""), "{log}");
}

#[test]
fn warnings_of_reasons_are_limited_separately() {
    let (_, log) = observed("warn", async {
        let forwarding = forwarding(UnknownOutcome::Orphan);
        for _ in 0..10 {
            let unsent = SendError::Unsent("connection refused".into());
            drop(forwarding.failed(&unsent, true));
        }
        drop(forwarding.failed(&SendError::Timeout, true));
    });
    assert_eq!(counts(&log, "upstream failed"), [1, 1], "{log}");
}

#[test]
fn unknown_status_is_logged_each_time_for_attention() {
    for (unknown, expected) in [
        (UnknownOutcome::Attention, vec![1_usize, 1, 1]),
        (UnknownOutcome::Free, vec![1]),
    ] {
        let (_, log) = observed("warn", async {
            let forwarding = forwarding(unknown);
            for _ in 0..3 {
                drop(forwarding.judge(Problem::UpstreamBroken.response(), true));
            }
        });
        assert_eq!(counts(&log, "outcome unknown"), expected, "{log}");
    }
}
