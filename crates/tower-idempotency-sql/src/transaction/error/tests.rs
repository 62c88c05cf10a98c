use std::iter::successors;

use super::*;

#[test]
fn kinds_have_these_texts() {
    let next = |kind: &TransactionErrorKind| {
        Some(match kind {
            TransactionErrorKind::LeaseLost => TransactionErrorKind::NoEntry,
            TransactionErrorKind::NoEntry => TransactionErrorKind::Checkpoint,
            TransactionErrorKind::Checkpoint => TransactionErrorKind::Database,
            TransactionErrorKind::Database => TransactionErrorKind::Ended,
            TransactionErrorKind::Ended => TransactionErrorKind::Unknown,
            TransactionErrorKind::Unknown => return None,
        })
    };
    let texts: Vec<_> = successors(Some(TransactionErrorKind::LeaseLost), next)
        .map(|kind| TransactionError::from(kind).to_string())
        .collect();
    let expected = [
        "the lease is no longer held",
        "expected the entry of the lease in the pool's database, found none",
        "the checkpoint has an invalid name, or data that cannot be stored",
        "the transaction failed, and nothing was written",
        "the transaction had already ended, and nothing was recorded",
        "the outcome of the commit is unknown",
    ];
    assert_eq!(texts, expected);
    let output = Mutex::new(());
    let error = CommitError(Inner::NotRecordable(NotRecordedReason::Status, output));
    assert_eq!(
        error.to_string(),
        "expected an output that the layer records, found another (Status): rolled back"
    );
}

/// Returns the status, and the extensions that the layer reads.
fn directives(res: &Response<Body<String>>) -> (u16, Option<Retention>, Option<String>) {
    let extensions = res.extensions();
    let attention = extensions.get::<NeedsAttention>();
    (
        res.status().as_u16(),
        extensions.get().copied(),
        attention.map(|it| it.code().to_owned()),
    )
}

#[test]
fn only_early_end_needs_attention() {
    let released = (503, Some(Retention::NoStore), None);
    let attention = (500, None, Some("transaction-ended".to_owned()));
    for (kind, expected) in [
        (TransactionErrorKind::LeaseLost, &released),
        (TransactionErrorKind::NoEntry, &released),
        (TransactionErrorKind::Checkpoint, &released),
        (TransactionErrorKind::Database, &released),
        (TransactionErrorKind::Ended, &attention),
        (TransactionErrorKind::Unknown, &released),
    ] {
        let res = TransactionError::from(kind).into_response();
        assert_eq!(directives(&res), *expected, "{kind:?}");
        let error = CommitError::<Response<Body<String>>>::from(TransactionError::from(kind));
        assert_eq!(directives(&error.into_response()), *expected, "{kind:?}");
    }
}

#[test]
fn only_early_end_of_work_needs_attention() {
    type Failure = Box<dyn Error + Send + Sync>;
    for kind in [
        TransactionErrorKind::LeaseLost,
        TransactionErrorKind::NoEntry,
        TransactionErrorKind::Checkpoint,
        TransactionErrorKind::Database,
        TransactionErrorKind::Ended,
        TransactionErrorKind::Unknown,
    ] {
        let error = || TransactionError::from(kind);
        let work_errors: [WorkError<Failure>; 2] = [
            error().into_work_error(),
            CommitError::<()>::from(error()).into_work_error(),
        ];
        for error in work_errors {
            let code = match error {
                WorkError::NeedsAttention(attention, _) => Some(attention.code().to_owned()),
                WorkError::Release(_) => None,
                other => panic!("unexpected error: {other:?}"),
            };
            let has_ended = kind == TransactionErrorKind::Ended;
            let expected = has_ended.then(|| "transaction-ended".to_owned());
            assert_eq!(code, expected, "{kind:?}");
        }
    }
}

/// The effect of an unrecorded success was rolled back.
#[test]
fn unrecorded_success_is_no_success() {
    for (status, expected) in [
        (201, (503, Some(Retention::NoStore), None)),
        (303, (503, Some(Retention::NoStore), None)),
        (422, (422, None, None)),
        (502, (502, None, None)),
    ] {
        let mut res = Response::new(Body::<String>::default());
        *res.status_mut() = StatusCode::from_u16(status).expect("a status");
        let output = Mutex::new(res);
        let error = CommitError(Inner::NotRecordable(NotRecordedReason::NoStore, output));
        assert_eq!(directives(&error.into_response()), expected, "{status}");
    }
}

#[test]
fn display_reveals_only_kind() {
    for kind in [
        TransactionErrorKind::LeaseLost,
        TransactionErrorKind::NoEntry,
        TransactionErrorKind::Checkpoint,
        TransactionErrorKind::Database,
        TransactionErrorKind::Ended,
        TransactionErrorKind::Unknown,
    ] {
        let error = CommitError::<()>::from(TransactionError::from(kind));
        assert_eq!(
            error.to_string(),
            "the transaction of the output failed",
            "{kind:?}"
        );
        let source = error.source().expect("the failure");
        assert_eq!(source.to_string(), TransactionError::from(kind).to_string());
    }
}
