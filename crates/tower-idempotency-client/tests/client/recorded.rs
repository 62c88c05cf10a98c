//! Responses that a server of `tower-idempotency` records. An effect may precede them, and a retry gets them again.

use tower_idempotency::{GrpcCode, IdempotencyLayer, MemoryStore, Preset};
use tower_idempotency_client::{IdempotencyKeyLayer, Outcome, Protocol, RetryLayer};

use crate::harness::{Call, Server, reply, send, status};

#[tokio::test(start_paused = true)]
async fn recorded_status_is_not_unexecuted() {
    for (preset, protocol) in [
        (Preset::Recommended, Protocol::TowerIdempotency),
        (Preset::Ietf, Protocol::Ietf),
        (Preset::Stripe, Protocol::Stripe),
        (Preset::Idempo, Protocol::Idempo),
        (Preset::Acp, Protocol::Acp),
    ] {
        let policy = IdempotencyLayer::with_preset(MemoryStore::new(), preset).policy();
        let keys = IdempotencyKeyLayer::new().with_protocol(protocol);
        let layer = RetryLayer::new().with_keys(keys).with_max_attempts(1);
        let ranges = policy.recorded_statuses.iter();
        let recorded: Vec<u16> = ranges
            .flat_map(|range| range.first..=range.last)
            // Servers of the draft reject a key of another request by this status. It has no code.
            .filter(|code| (protocol, *code) != (Protocol::Ietf, 422))
            .collect();
        assert!(recorded.contains(&201), "{preset:?}");
        for code in recorded {
            let call = send(&layer, &Server::new([status(code)])).await;
            assert_ne!(call.outcome(), Outcome::NotExecuted, "{preset:?}, {code}");
        }
    }
}

/// Returns the outcome of a first attempt with a status by which most servers reject a request. Some presets record it.
pub(crate) fn outcome_of_rejection(protocol: Protocol, status: u16) -> Outcome {
    let is_recorded = match protocol {
        Protocol::Ietf => matches!(status, 403 | 424),
        Protocol::Stripe => status == 424,
        Protocol::Idempo => status > 400,
        _ => false,
    };
    match is_recorded {
        true => Outcome::Unknown,
        false => Outcome::NotExecuted,
    }
}

/// Sends a call of gRPC. Asserts that it is not retried.
async fn send_grpc(status: u16, headers: &[(&'static str, &str)]) -> Call {
    let headers = [&[("content-type", "application/grpc")], headers].concat();
    let server = Server::new([reply(status, &headers, "")]);
    let call = send(&RetryLayer::new(), &server).await;
    assert_eq!(server.take_log().len(), 1, "{headers:?}");
    call
}

#[tokio::test(start_paused = true)]
async fn recorded_grpc_code_is_not_unexecuted() {
    let codes = (0..=16_i32).filter(|code| GrpcCode::from(*code).is_outcome());
    for code in codes {
        let number = code.to_string();
        let call = send_grpc(200, &[("grpc-status", number.as_str())]).await;
        assert_ne!(call.outcome(), Outcome::NotExecuted, "{code}");
    }
    // Without a status of gRPC, the layer records a 403 like `PERMISSION_DENIED`. It does not record a 401.
    assert_eq!(send_grpc(403, &[]).await.outcome(), Outcome::Unknown);
    assert_eq!(send_grpc(401, &[]).await.outcome(), Outcome::NotExecuted);
}
