//! The callers that the limits remember.

use super::*;

fn admit(limits: &Limits, n: u32) -> InFlightPermit {
    let admitted = limits.caller(scope(n)).admit(1000, &LayerName::default());
    admitted.unwrap()
}

fn scope(n: u32) -> ScopeDigest {
    let mut bytes = [0; 16];
    bytes[1..5].copy_from_slice(&n.to_le_bytes());
    ScopeDigest::from_bytes(bytes)
}

#[test]
fn idle_callers_are_removed() {
    let limits = Limits::default();
    let known = || limits.callers[0].lock().unwrap().by_scope.len();
    let permits: Vec<_> = (0..200).map(|n| admit(&limits, n)).collect();
    for n in 200..100_000 {
        drop(admit(&limits, n));
        assert!(known() <= 2 * (200 + FULL_AT_LEAST));
    }
    let first = limits.caller(scope(0));
    assert!(Arc::ptr_eq(&first, permits[0].caller()), "it is in use");
    drop(permits);
    assert_eq!(limits.in_flight(), 0);
}
