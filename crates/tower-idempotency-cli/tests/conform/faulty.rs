//! A server that has one fault, and the rows that do not hold because of it.

use std::{sync::Arc, time::Instant};

use tests::HANG_GUARD;

use crate::{
    CommandOutput, every_row, run, run_unread,
    service::{Fault, Responses, Service, start},
};

/// Judges a server with the fault.
async fn judge(fault: Fault, responses: Responses) -> CommandOutput {
    judge_service(fault, responses).await.0
}

/// Judges a server with the fault. Returns the service too.
async fn judge_service(fault: Fault, responses: Responses) -> (CommandOutput, Arc<Service>) {
    let (server, service) = start(fault, responses).await;
    let mut args = every_row(server.addr());
    args.push("--json".to_owned());
    let timeout = match fault {
        Fault::KeepsLockAfterDisconnect | Fault::KeepsLockOfDroppedRequest => Some("10s"),
        // Two requests wait for it.
        Fault::WaitsForLostLock => Some("5s"),
        _ => None,
    };
    if let Some(timeout) = timeout {
        args.retain(|arg| !arg.starts_with("--timeout"));
        args.push(format!("--timeout={timeout}"));
    }
    let ran = run(args).await;
    assert_eq!(ran.out.lines().count(), 21, "{}{}", ran.out, ran.err);
    (ran, service)
}

/// Asserts that exactly these rows do not hold, and that the exit code is 1 if one of them is mandatory.
async fn assert_fails(fault: Fault, rows: &[&str], code: i32) {
    let ran = judge(fault, Responses::DifferInBody).await;
    assert_rows(&ran, fault, rows, code);
}

fn assert_rows(ran: &CommandOutput, fault: Fault, rows: &[&str], code: i32) {
    assert_eq!(
        (ran.rows("does not hold"), ran.code),
        (rows.iter().map(|row| (*row).to_owned()).collect(), code),
        "{fault:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn server_without_fault_conforms() {
    assert_fails(Fault::None, &[], 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_idempotency() {
    let rows = [
        "retry",
        "retry-headers",
        "marked",
        "other-body",
        "other-path",
        "other-method",
        "missing-key",
        "key-empty",
        "key-long",
        "key-list",
        "concurrent",
        "many",
        "disconnect",
    ];
    assert_fails(Fault::NoIdempotency, &rows, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_replays() {
    assert_fails(
        Fault::ReplaysForEveryKey,
        &[
            "fresh",
            "other-body",
            "other-path",
            "other-method",
            "other-caller",
            "case",
        ],
        1,
    )
    .await;
    // Whether `disconnect` compares the execution with a replay depends on the request that was abandoned.
    let rows = ["retry", "concurrent", "many", "disconnect"];
    let ran = judge(Fault::ChangesBodies, Responses::DifferInBody).await;
    assert_eq!(ran.code, 1);
    let failed = ran.rows("does not hold");
    assert!(
        failed.iter().all(|row| rows.contains(&row.as_str())),
        "{failed:?}"
    );
    assert!(
        ["retry", "concurrent", "many"]
            .iter()
            .all(|row| failed.iter().any(|it| it == row)),
        "{failed:?}"
    );
    assert_fails(Fault::DropsHeaders, &["retry-headers"], 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ignored_parts_of_requests() {
    assert_fails(Fault::IgnoresBody, &["other-body"], 1).await;
    assert_fails(Fault::IgnoresPath, &["other-path"], 1).await;
    assert_fails(Fault::IgnoresMethod, &["other-method"], 1).await;
    assert_fails(Fault::IgnoresCaller, &["other-caller"], 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn separate_keys_of_bodies() {
    assert_fails(Fault::SeparatesBodies, &["other-body"], 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_refusals() {
    assert_fails(Fault::ReportsConflict, &["other-body-422"], 0).await;
    assert_fails(Fault::RespondsWithText, &["problem"], 0).await;
    assert_fails(Fault::RefusesWith429, &["concurrent-409"], 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn accepted_malformed_keys() {
    assert_fails(Fault::AcceptsMissingKeys, &["missing-key"], 1).await;
    assert_fails(Fault::AcceptsEmptyKeys, &["key-empty"], 0).await;
    assert_fails(Fault::AcceptsLongKeys, &["key-long"], 0).await;
    assert_fails(Fault::AcceptsLists, &["key-list"], 0).await;
    assert_fails(Fault::IgnoresCase, &["case"], 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn duplicates_that_execute() {
    let (fault, rows) = (Fault::ExecutesDuplicates, &["concurrent", "many"]);
    assert_fails(fault, rows, 1).await;
    // The marker alone distinguishes an execution from a replay.
    let ran = judge(fault, Responses::Equal).await;
    assert_rows(&ran, fault, rows, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn shared_response_without_marker_conforms() {
    assert_fails(Fault::SharesWithoutMarker, &[], 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn retries_without_response() {
    let rows = [
        "retry",
        "other-body",
        "other-path",
        "other-method",
        "concurrent",
        "many",
        "disconnect",
    ];
    assert_fails(Fault::BreaksOffRetries, &rows, 1).await;
    assert_fails(Fault::WaitsForLostLock, &["disconnect"], 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn response_forgotten_after_disconnect() {
    let began = Instant::now();
    // If this process stalls, the tool disconnects before the response.
    loop {
        let ran = judge(Fault::ForgetsUnreadResponse, Responses::DifferInBody).await;
        if !ran.rows("not judged").contains(&"disconnect".to_owned()) {
            assert_rows(&ran, Fault::ForgetsUnreadResponse, &["disconnect"], 1);
            break;
        }
        assert!(began.elapsed() < HANG_GUARD, "{}", ran.out);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lock_that_outlives_its_client() {
    for fault in [
        Fault::KeepsLockAfterDisconnect,
        Fault::KeepsLockOfDroppedRequest,
    ] {
        let began = Instant::now();
        // If this process stalls, the tool disconnects before the handler runs. Then there is no lock to keep.
        loop {
            let (ran, service) = judge_service(fault, Responses::DifferInBody).await;
            if service.has_executed_abandoned() {
                assert_rows(&ran, fault, &["disconnect"], 1);
                break;
            }
            assert!(began.elapsed() < HANG_GUARD, "{fault:?}: {}", ran.out);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn equal_bodies_are_judged_by_location() {
    for (fault, failed, unjudged) in [
        (Fault::None, &["marked"][..], &["concurrent-409"][..]),
        (
            Fault::ExecutesDuplicates,
            &["marked", "concurrent", "many"],
            &["concurrent-409"],
        ),
        (
            Fault::IgnoresBody,
            &["marked", "other-body"],
            &["other-body-422", "quoting", "concurrent-409"],
        ),
        (
            Fault::IgnoresCaller,
            &["marked", "other-caller"],
            &["concurrent-409"],
        ),
    ] {
        let ran = judge(fault, Responses::DifferInLocation).await;
        assert_eq!(ran.rows("does not hold"), failed, "{fault:?} {}", ran.out);
        assert_eq!(ran.rows("not judged"), unjudged, "{fault:?} {}", ran.out);
    }
}

/// No row claims that a replay was seen.
#[tokio::test(flavor = "multi_thread")]
async fn executions_with_equal_bodies_do_not_hold() {
    let ran = judge(Fault::NoIdempotency, Responses::DifferInLocation).await;
    assert_eq!(ran.code, 1);
    let held = ran.rows("holds");
    for row in ["retry", "retry-headers", "concurrent", "many", "disconnect"] {
        assert!(!held.iter().any(|it| it == row), "{row}: {}", ran.out);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn closed_output_keeps_verdict() {
    for (fault, code) in [(Fault::None, 0), (Fault::IgnoresBody, 1)] {
        for form in [None, Some("--json".to_owned())] {
            let (server, _) = start(fault, Responses::DifferInBody).await;
            let mut args = every_row(server.addr());
            args.extend(form);
            assert_eq!(run_unread(args).await, code, "{fault:?}");
        }
    }
}
