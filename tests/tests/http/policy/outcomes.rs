//! The claims about executions, their outcomes and limits.

use std::time::Duration;

use tests::{
    bodies::{Piece, pieces},
    noise, send,
};
use tokio::time::{Instant, advance};
use tower_idempotency::conformance::{Fault, Operation};

use super::claims::{Bench, Claims, JSON, STATUSES};

impl Claims<'_> {
    pub(super) async fn concurrent_requests(&self) {
        let claim = &self.policy.concurrent_requests;
        let bench = self.bench();
        let first = {
            let (app, req) = (bench.app.clone(), self.wish("wait"));
            tokio::spawn(async move { send(&app, req).await })
        };
        bench.barrier.arrival().await;
        let began = Instant::now();
        let second = bench.send(self.wish("wait")).await;
        let waited = began.elapsed();
        assert!(
            waited >= claim.wait && waited < claim.wait + Duration::from_secs(3),
            "{} {waited:?}",
            self.name()
        );
        assert_eq!(second.0.status, claim.status, "{}", self.name());
        self.assert_refused(&second, "in-progress");
        let retry_after = second
            .0
            .header("retry-after")
            .map(|after| after.parse().expect("seconds"));
        assert_eq!(
            retry_after,
            claim.retry_after.map(|after| after.as_secs()),
            "{}",
            self.name()
        );
        bench.barrier.open_for_good();
        assert_eq!(first.await.expect("no panic").status, 201);
    }

    /// Returns a service whose key has an orphan from now on plus the lease.
    pub(super) async fn orphaned(&self) -> Bench {
        let bench = self.bench();
        for operation in [Operation::Complete, Operation::Release, Operation::Renew] {
            bench.store.set_fault(operation, Fault::CallLost);
        }
        bench.send(self.post(JSON)).await;
        bench
    }

    pub(super) async fn orphans(&self) {
        let (began, bench) = (Instant::now(), self.orphaned().await);
        let retry = loop {
            let retry = bench.send(self.post(JSON)).await;
            // Of the errors in question only `in-progress` has it, and own errors have none.
            if retry.1 || retry.0.header("retry-after").is_none() {
                break retry;
            }
            advance(Duration::from_secs(1)).await;
        };
        let late = Duration::from_secs(8) + self.policy.concurrent_requests.wait;
        let after = began.elapsed();
        let has_retry_after = self.policy.concurrent_requests.retry_after.is_some();
        if has_retry_after {
            let lease = self.policy.lease;
            assert!(
                after >= lease && after < lease + late,
                "{} {after:?}",
                self.name()
            );
        } else {
            advance(self.policy.lease + Duration::from_secs(60)).await;
        }
        let retry = if has_retry_after {
            retry
        } else {
            bench.send(self.post(JSON)).await
        };
        if self.policy.orphans == "take-over" {
            assert!(retry.1, "{}", self.name());
            return;
        }
        self.assert_refused(&retry, "outcome-unknown");
        let (lease, kept) = (self.policy.lease, self.policy.orphan_retention);
        for (wait, is_free) in [
            (kept / 2, false),
            (kept + lease * 2 + Duration::from_secs(60), true),
        ] {
            let bench = self.orphaned().await;
            advance(lease + wait).await;
            let retry = bench.send(self.post(JSON)).await;
            assert_eq!(retry.1, is_free, "{} {wait:?}", self.name());
        }
    }

    pub(super) async fn failure(&self) {
        let bench = self.bench();
        let (app, req) = (bench.app.clone(), self.wish("panic"));
        tokio::spawn(async move { send(&app, req).await })
            .await
            .expect_err("a panic");
        advance(Duration::from_millis(50)).await;
        let retry = bench.send(self.post(JSON)).await;
        match (self.policy.failure, self.policy.orphans) {
            ("release", _) | ("orphan", "take-over") => assert!(retry.1, "{}", self.name()),
            _ => self.assert_refused(&retry, "outcome-unknown"),
        }
    }

    pub(super) async fn store_failure(&self) {
        let bench = self.bench();
        bench.store.set_fault_for_all(&Fault::CallLost);
        let first = bench.send(self.post(JSON)).await;
        match self.policy.store_failure {
            "refuse" => self.assert_refused(&first, "store-unavailable"),
            _ => assert!(first.1, "{}", self.name()),
        }
    }

    pub(super) async fn recorded_statuses(&self) {
        for status in STATUSES {
            let bench = self.bench();
            for _ in 0..2 {
                bench.send(self.wish(&format!("status {status}"))).await;
            }
            let recorded = self.policy.records(status);
            assert_eq!(
                bench.effects.count() == 1,
                recorded,
                "{} {status}",
                self.name()
            );
        }
    }

    pub(super) async fn unrecordable(&self) {
        let limit = self.policy.limits.response_bytes;
        let bench = self.bench();
        let largest = self.wish(&format!("bytes {limit}"));
        bench.send(largest).await;
        assert!(!bench.send(self.post(JSON)).await.1, "{}", self.name());
        let bench = self.bench();
        bench.send(self.wish(&format!("bytes {}", limit + 1))).await;
        let retry = bench.send(self.post(JSON)).await;
        match self.policy.unrecordable {
            "refuse" => self.assert_refused(&retry, "response-not-retained"),
            _ => assert!(retry.1, "{}", self.name()),
        }
    }

    pub(super) async fn retention(&self) {
        for (wish, retention) in [
            ("", self.policy.retention),
            ("for 3000000000", self.policy.max_retention),
        ] {
            let bench = self.bench();
            bench.send(self.wish(wish)).await;
            advance(retention - Duration::from_secs(1)).await;
            assert!(
                !bench.send(self.wish(wish)).await.1,
                "{} {wish}",
                self.name()
            );
            advance(Duration::from_secs(2)).await;
            assert!(
                bench.send(self.wish(wish)).await.1,
                "{} {wish}",
                self.name()
            );
        }
    }

    pub(super) async fn limits(&self) {
        let limits = &self.policy.limits;
        let Some(bytes) = limits.request_bytes else {
            assert_eq!(limits.request_time, None);
            assert!(
                self.bench().send(self.post(noise(5_000_000))).await.1,
                "{}",
                self.name()
            );
            return;
        };
        assert!(
            self.bench().send(self.post(noise(bytes))).await.1,
            "{}",
            self.name()
        );
        let larger = self.bench().send(self.post(noise(bytes + 1))).await;
        self.assert_refused(&larger, "body-too-large");
        let time = limits.request_time.expect("a time");
        let began = Instant::now();
        let stalled = std::iter::repeat_with(|| Piece::Stall);
        let slow = self.bench().send(self.post(pieces(stalled))).await;
        self.assert_refused(&slow, "body-timeout");
        assert!(
            began.elapsed() >= time && began.elapsed() < time * 2,
            "{}",
            self.name()
        );
        let broken = self
            .bench()
            .send(self.post(pieces([Piece::Data("1".into()), Piece::Break])))
            .await;
        self.assert_refused(&broken, "body-unreadable");
    }
}
