//! Verdict of an observed request, and its store calls.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use http::StatusCode;
use tokio::runtime::Handle;

use super::{
    observer::{CallPermit, HeldBytes},
    outcome::{Earlier, EndKind, ExecutionEnd, Seen},
};
use crate::{
    digest::{OBSERVED_SCOPE, ScopedKey, observed_id},
    execution::{rules::ExecutionFailure, shared::Context},
    layer_name::LayerName,
    request::{fingerprint::observed::ObservedFingerprint, key::RequestKey},
    response::rules::Unrecordable,
    store::{Acquired, Claim, KeyId, LeaseRef, OrphanPolicy, StoreError, Ttl},
    store_client::{AcquireReply, CompleteOutcome},
    telemetry::{self, Observed, catch_setting_panic},
};

/// The longest lease of an observation. Its entry remains for this time if no call ends it, and then as long as an orphan.
const MAX_OBSERVATION: Duration = Duration::from_secs(24 * 60 * 60);

/// A request whose body is not complete yet.
pub(super) struct Pending {
    pub(super) key: RequestKey,
    pub(super) scoped: ScopedKey,
    pub(super) fingerprint: ObservedFingerprint,
    pub(super) operation: Box<str>,
    pub(super) bytes: HeldBytes,
}

/// A request that passes through and is judged. The request side and the response side share it.
pub(crate) struct Observation {
    pub(super) context: Arc<Context>,
    state: Mutex<ObservationState>,
}

#[derive(Default)]
struct ObservationState {
    verdict: Option<Verdict>,
    ended: Option<ExecutionEnd>,
}

/// The result of an acquire that concerns the response.
enum Verdict {
    /// The request would be executed.
    Fresh(LeaseRef),
    /// The request would get this response.
    Replay(KeyId, Seen),
}

impl Observation {
    pub(super) fn new(context: &Arc<Context>) -> Arc<Self> {
        Arc::new(Self {
            context: Arc::clone(context),
            state: Mutex::default(),
        })
    }

    /// Reports the treatment of a request that has no entry.
    pub(super) fn report(&self, outcome: Observed) {
        telemetry::observed(self.layer(), outcome);
    }

    /// Judges a request whose body is complete: at once if that needs no wait, or else in a task.
    pub(super) fn judge(self: &Arc<Self>, pending: Pending) {
        let shared = &self.context.shared;
        if shared.store.replies_at_once() && !pending.fingerprint.is_buffered() {
            let Some(claim) = self.claim(pending) else {
                return self.report(Observed::NotJudged);
            };
            if let Some(reply) = shared.store.acquire_now(&claim, self.layer()) {
                self.decide(&claim, reply.acquired);
                return self.end_if_known();
            }
            return self.report(Observed::NotJudged);
        }
        let (Some(permit), Ok(runtime)) = (shared.observer.permit_acquire(), Handle::try_current())
        else {
            return self.report(Observed::NotJudged);
        };
        let observation = Arc::clone(self);
        runtime.spawn(async move { observation.judge_in_task(pending, permit).await });
    }

    async fn judge_in_task(self: Arc<Self>, pending: Pending, permit: CallPermit) {
        let Some(claim) = self.claim(pending) else {
            return self.report(Observed::NotJudged);
        };
        let (store, timeout) = (&self.context.shared.store, self.timeout());
        let warnings = self.context.config.warnings();
        match store.acquire(&claim, timeout, warnings).await {
            Ok(AcquireReply { acquired, .. }) => {
                self.decide(&claim, acquired);
                if let Some((lease, ended)) = self.take_end() {
                    self.end(&lease, &ended).await;
                }
            }
            Err(_reported) => {
                self.report(Observed::NotJudged);
                // The store may have granted the lease. Later retries would be judged as conflicts.
                let reference = claim.lease_ref_unknown();
                store.release(&reference, timeout, warnings).await;
            }
        }
        drop(permit);
    }

    /// Builds the claim under an ID of its own. Returns `None` if a setting panics or the system has no randomness.
    fn claim(&self, pending: Pending) -> Option<Claim> {
        let (config, shared) = (&self.context.config, &self.context.shared);
        let Pending {
            key,
            scoped,
            fingerprint,
            operation,
            bytes,
        } = pending;
        let fingerprint =
            catch_setting_panic(self.layer(), "with_fingerprint", || fingerprint.finish())?;
        drop(bytes);
        let token: Result<_, StoreError> = shared.store.new_token();
        let overdue_after = config.execution.overdue_after().min(MAX_OBSERVATION);
        let lease = Ttl::try_from(overdue_after).unwrap_or(Ttl::MIN);
        let claim = Claim {
            id: observed_id(&scoped.id.of(&fingerprint)),
            fingerprint,
            token: token.ok()?,
            // The lease is not renewed.
            lease,
            orphans: OrphanPolicy::TakeOver,
            orphan_retention: lease,
            owner: shared.owner,
            operation,
            scope: Some(OBSERVED_SCOPE),
        };
        if let RequestKey::Sent(key) = &key
            && shared
                .recent_requests
                .has_other_principal(key, &fingerprint, &scoped.principal)
        {
            config.warnings().principal_changed(&claim.id);
        }
        Some(claim)
    }

    /// Judges the request by the reply of the store.
    fn decide(&self, claim: &Claim, acquired: Acquired) {
        let is_same = |fingerprint| claim.fingerprint == fingerprint;
        let outcome = match acquired {
            // Counted when the execution ends.
            Acquired::Granted { generation, .. } => {
                self.lock().verdict = Some(Verdict::Fresh(claim.lease_ref(generation)));
                return;
            }
            Acquired::InProgress { fingerprint, .. } if is_same(fingerprint) => {
                Observed::WouldConflict
            }
            Acquired::Completed {
                fingerprint,
                record,
                ..
            } if is_same(fingerprint) => self.decide_retry(claim.id, &record),
            Acquired::InProgress { .. }
            | Acquired::Completed { .. }
            | Acquired::Orphaned { .. } => Observed::WouldMismatch,
        };
        telemetry::observed_at(self.layer(), &claim.id, outcome);
    }

    fn decide_retry(&self, id: KeyId, record: &Bytes) -> Observed {
        let codec = self.context.config.response.codec();
        match Earlier::decode(codec, &id, record) {
            Some(Earlier::Recorded(seen)) => {
                self.lock().verdict = Some(Verdict::Replay(id, seen));
                Observed::WouldReplay
            }
            Some(Earlier::Refused) => Observed::WouldRefuseRetry,
            None => Observed::NotJudged,
        }
    }

    /// Records the end of the execution.
    pub(super) fn set_end(self: &Arc<Self>, ended: ExecutionEnd) {
        self.lock().ended = Some(ended);
        self.end_if_known();
    }

    /// Ends the lease if the store has granted it and the execution has ended.
    fn end_if_known(self: &Arc<Self>) {
        let Some((lease, ended)) = self.take_end() else {
            return;
        };
        let shared = &self.context.shared;
        if ended.kind != EndKind::Released {
            let mut record = self.encode(&lease, &ended);
            let (store, retention) = (&shared.store, ended.retention);
            if store.complete_now(&lease, &mut record, retention, self.layer()) {
                return telemetry::observed_at(self.layer(), &lease.id, Observed::Fresh);
            }
        }
        let (Some(permit), Ok(runtime)) = (shared.observer.permit_end(), Handle::try_current())
        else {
            return telemetry::observed_at(self.layer(), &lease.id, Observed::NotJudged);
        };
        let observation = Arc::clone(self);
        runtime.spawn(async move {
            observation.end(&lease, &ended).await;
            drop(permit);
        });
    }

    /// Returns the lease and the end of the execution, once both are known. Compares the response of a retry.
    fn take_end(&self) -> Option<(LeaseRef, ExecutionEnd)> {
        let mut state = self.lock();
        let ended = state.ended?;
        let verdict = state.verdict.take()?;
        drop(state);
        match verdict {
            Verdict::Fresh(lease) => Some((lease, ended)),
            Verdict::Replay(id, first) => {
                if let Some(difference) = first.difference(&ended.seen) {
                    telemetry::observed_difference(self.layer(), &id, difference.name());
                }
                None
            }
        }
    }

    async fn end(&self, lease: &LeaseRef, ended: &ExecutionEnd) {
        let (store, timeout) = (&self.context.shared.store, self.timeout());
        let warnings = self.context.config.warnings();
        let is_ended = if ended.kind == EndKind::Released {
            store.release(lease, timeout, warnings).await
        } else {
            let (record, retention) = (self.encode(lease, ended), ended.retention);
            let completed = store.complete(lease, true, &record, retention, timeout, warnings);
            // The lease is lost if the execution took longer than the lease.
            let completed = completed.await;
            matches!(
                completed,
                CompleteOutcome::Stored | CompleteOutcome::LeaseLost
            )
        };
        let outcome = if is_ended {
            Observed::Fresh
        } else {
            Observed::NotJudged
        };
        telemetry::observed_at(self.layer(), &lease.id, outcome);
    }

    fn encode(&self, lease: &LeaseRef, ended: &ExecutionEnd) -> Bytes {
        ended.encode(self.context.config.response.codec(), &lease.id)
    }

    /// Returns the end of an execution that failed: by a panic, an error or a broken body.
    pub(super) fn failure(&self, status: Option<StatusCode>) -> ExecutionEnd {
        self.end_of(
            status,
            match self.context.config.execution.failure() {
                ExecutionFailure::Release => EndKind::Released,
                ExecutionFailure::Orphan | ExecutionFailure::NeedsAttention => EndKind::Refused,
            },
        )
    }

    /// Returns the end of an execution whose response would not be recorded.
    pub(super) fn unrecordable(&self, status: StatusCode) -> ExecutionEnd {
        self.end_of(
            Some(status),
            match self.context.config.response.unrecordable {
                Unrecordable::Tombstone => EndKind::Refused,
                Unrecordable::Release => EndKind::Released,
            },
        )
    }

    /// Returns the end of an execution without the body of its response.
    pub(super) fn end_of(&self, status: Option<StatusCode>, kind: EndKind) -> ExecutionEnd {
        ExecutionEnd {
            kind,
            seen: Seen { status, body: None },
            retention: self.context.config.response.retention,
        }
    }

    fn layer(&self) -> &LayerName {
        self.context.config.layer()
    }

    fn timeout(&self) -> Duration {
        self.context.config.execution.store_timeout
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, ObservationState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
