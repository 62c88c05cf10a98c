//! Lease methods for authors of stores.

use http::{Response, StatusCode};
use serde::{Serialize, de::DeserializeOwned};

use super::{NotRecordable, OpenTransaction, Prepared};
use crate::{
    body::Body,
    lease::{Lease, commits::CommittedResponse},
    record::NeedsAttention,
    response::{
        directives::{Directives, Retention},
        disposition::{Disposition, NotRecordedReason, decide_disposition, encode_readable_value},
    },
    store::LeaseRef,
};

/// Methods of [`Lease`] for stores and drivers that commit a record in the transaction of a handler.
///
/// Handlers do not need them. No other type implements the trait.
pub trait LeaseExt: sealed::Sealed {
    /// Returns the lease in the form of the store contract, for writes that the store itself fences.
    #[must_use]
    fn lease_ref(&self) -> LeaseRef;

    /// Turns a response into the record that the layer would store for it, with the same statuses, headers, limits and
    /// retention.
    ///
    /// Reads and removes control headers, [`Retention`](crate::Retention) and [`NeedsAttention`](crate::NeedsAttention). A
    /// response that is too large or streamed becomes a tombstone, and its body continues where the layer stopped reading.
    ///
    /// For HTTP handlers only. Under a lease of [`run_once`](crate::IdempotencyLayer::run_once) or of an item, the commit of a
    /// response fails before it is sent.
    ///
    /// # Errors
    ///
    /// [`NotRecordable`], with the response, if the layer would store nothing. Roll the transaction back, since a retry
    /// would repeat it.
    ///
    /// # Cancellation
    ///
    /// Dropping the future drops the response and has no other effect.
    fn prepare<B: http_body::Body>(
        &self,
        res: Response<B>,
    ) -> impl Future<Output = Result<Prepared<Response<Body<B>>>, NotRecordable<Response<Body<B>>>>>;

    /// Turns a value into the record that [`run_once`](crate::IdempotencyLayer::run_once) would store for it.
    ///
    /// A value that is too large, or cannot be serialized or read back, becomes a tombstone. `Some` of a nil value, such as
    /// `Some(())`, is replayed as `None`.
    ///
    /// For work of `run_once` and of items only. Under the lease of a request, the commit of a value fails before it is sent.
    fn prepare_value<T: Serialize + DeserializeOwned>(&self, of: T) -> Prepared<T>;

    /// Registers a transaction that the handler has begun. Call [`OpenTransaction::end`] after its commit or its rollback.
    ///
    /// The layer does not record a success (1xx to 3xx, or a value of [`run_once`](crate::IdempotencyLayer::run_once))
    /// while a transaction is open when the handler returns. It logs an error, responds with 500 `unfinished-transaction`,
    /// and releases the key. If the handler has dropped the [`OpenTransaction`], that applies to a success that is not recorded,
    /// too, except for gRPC. If a commit has succeeded under the lease, its record is the outcome.
    #[must_use = "the transaction counts as open until it is ended"]
    fn open_transaction(&self) -> OpenTransaction;

    /// Registers that a transaction failed before its commit was sent, for example because it could not begin.
    ///
    /// The failure may be temporary. So the layer does not record a 4xx of the handler. If `is_lost` is set, another execution
    /// holds the lease or has the outcome. In place of a response that is not recorded, the layer then returns the recorded one,
    /// or 409 `outcome-unknown`. After the response of the handler, a call with `is_lost` has no effect.
    ///
    /// [`Prepared::commit`] and [`Prepared::begin_commit`] register their own failures.
    fn fail_transaction(&self, is_lost: bool);

    /// Registers that the last commit stored nothing and never will: the database rejected it, or it was never sent.
    ///
    /// Call it before the handler returns, and only if one of these is certain. It comes after
    /// [`Prepared::commit`] has returned [`StoreError::Backend`](crate::store::StoreError::Backend), or after the transaction of a
    /// [`BegunCommit`](super::BegunCommit) has failed. A lost connection during the commit is not certain. Call it once for each
    /// attempt, and not if `Prepared::commit` refused the record without polling its future.
    ///
    /// Without this call, the outcome of the commit can stay unknown. The client then gets 409 `outcome-unknown` in place of the
    /// response of the handler. After a wrong call, the client can get that response although the commit succeeds.
    fn reject_commit(&self);

    /// Registers that a checkpoint is about to be committed: a phase of the request, and not its outcome.
    ///
    /// Call it before the commit is sent, because its reply may be lost. A later release then leaves an orphan. So the layer records
    /// a 4xx also for a request without a key under [`MissingKey::Derive`](crate::MissingKey::Derive). Otherwise a completer would
    /// continue the request after its client got the 4xx.
    ///
    /// The checkpoint is then unresolved until [`resolve_checkpoint`](Self::resolve_checkpoint), also if the future of the commit is
    /// dropped.
    fn register_checkpoint(&self);

    /// Registers that the outcome of the last checkpoint is known.
    ///
    /// Call it after the database has acknowledged or rejected the commit. After a lost reply, call it when the handler has read the
    /// stored checkpoint. That read must first wait for the end of the transaction.
    fn resolve_checkpoint(&self);

    /// Returns `true` if the outcome of the last checkpoint is unknown.
    ///
    /// Do not write another checkpoint then. The handler may be repeating a phase that is committed, and its token still holds the
    /// lease.
    #[must_use]
    fn has_unresolved_checkpoint(&self) -> bool;
}

impl LeaseExt for Lease {
    fn lease_ref(&self) -> LeaseRef {
        self.0.reference
    }

    async fn prepare<B: http_body::Body>(
        &self,
        res: Response<B>,
    ) -> Result<Prepared<Response<Body<B>>>, NotRecordable<Response<Body<B>>>> {
        let state = &*self.0;
        let incomplete = state.request_body_incomplete();
        // An outer layer follows the same instructions of the handler.
        let directives = state.grant.is_nested.then(|| Directives::of(&res));
        let (mut res, mut disposition) = decide_disposition(
            &state.config().response,
            state.response_bytes(),
            state.origin(),
            res,
            incomplete,
        )
        .await;
        // Clients cannot choose another key for the corrected request.
        if let Disposition::Record { class, record, .. } = &disposition
            && state.is_released_by_client_error()
            && class.is_client_error()
            && NeedsAttention::in_record(record).is_none()
        {
            disposition = Disposition::Release(NotRecordedReason::NoStore);
        }
        if let Disposition::Release(
            NotRecordedReason::NoStore
            | NotRecordedReason::Unrecordable
            | NotRecordedReason::BrokenBody,
        ) = disposition
        {
            // The layer cannot detect these reasons again. The header was removed, the body is partly read, or its rest no
            // longer has the announced length.
            res.extensions_mut().insert(Retention::NoStore);
        }
        if let (Some(directives), Disposition::Record { .. }) = (directives, &disposition) {
            directives.restore(&mut res);
        }
        let status = res.status();
        Prepared::new(self, disposition, status, res, Some(mark_committed))
    }

    fn prepare_value<T: Serialize + DeserializeOwned>(&self, of: T) -> Prepared<T> {
        let rules = &self.0.config().response;
        Prepared {
            lease: self.clone(),
            record: encode_readable_value(rules, self.0.id(), &of),
            retention: rules.retention,
            status: StatusCode::OK,
            output: of,
            // The layer compares a value with the committed one.
            mark: None,
        }
    }

    fn open_transaction(&self) -> OpenTransaction {
        self.0.begin_transaction();
        OpenTransaction(Some(self.clone()))
    }

    fn fail_transaction(&self, is_lost: bool) {
        let state = &*self.0;
        if !is_lost {
            state.commits.fail();
            return;
        }
        if state.commits.is_closed() {
            // The layer may have ended the lease itself. It detects a loss without this report.
            return;
        }
        state.commits.refuse();
        // An earlier commit of the handler may have ended the lease.
        if state.commits.has_begun() {
            state.mark_not_held();
        } else {
            state.mark_lost();
        }
    }

    fn reject_commit(&self) {
        self.0.commits.reject();
    }

    fn register_checkpoint(&self) {
        self.0.set_checkpoint();
    }

    fn resolve_checkpoint(&self) {
        self.0.resolve_checkpoint();
    }

    fn has_unresolved_checkpoint(&self) -> bool {
        self.0.has_unresolved_checkpoint()
    }
}

fn mark_committed<B: http_body::Body>(res: &mut Response<Body<B>>) {
    res.extensions_mut().insert(CommittedResponse);
}

mod sealed {
    pub trait Sealed {}

    impl Sealed for crate::lease::Lease {}
}
