//! The clock of the service, which its replies show in the header `Date`.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, SystemTime},
};

use aws_sdk_dynamodb::{
    config::{ConfigBag, Intercept, RuntimeComponents},
    primitives::{DateTime, DateTimeFormat},
};
use aws_smithy_runtime_api::{
    box_error::BoxError, client::interceptors::context::BeforeDeserializationInterceptorContextRef,
};
use tower_idempotency::store::KeyId;

use crate::{
    clock::Clock,
    error::{DynamoDbError, DynamoDbErrorKind},
    item::{Item, key},
    table_client::TableClient,
};

/// The resolution of the header `Date`.
const SECOND: Duration = Duration::from_secs(1);

impl TableClient {
    /// Reads an item consistently, and compares the clock of the process with that of the service.
    ///
    /// # Errors
    ///
    /// [`ClockSkew`](DynamoDbErrorKind::ClockSkew) if the difference exceeds the allowance for certain. A clock of a test,
    /// and a reply without a date, are not compared.
    pub(crate) async fn read_and_compare_clocks(
        &self,
        id: &KeyId,
    ) -> Result<Option<Item>, DynamoDbError> {
        let clock = &self.options.clock;
        let date = ReplyDate::default();
        let get = self
            .client
            .get_item()
            .table_name(&self.table)
            .key("id", key(id))
            .consistent_read(true)
            .customize()
            .interceptor(date.clone());
        let before = (clock.now)();
        let read = Box::pin(get.send()).await;
        let after = (clock.now)();
        let read = read.map_err(|error| DynamoDbError::from_item_call(&error))?;
        if let Some(date) = date.get().filter(|_| clock.is_system) {
            clock.compare(before, date, after)?;
        }
        Ok(read.item)
    }
}

impl Clock {
    /// Returns an error if this clock differs from that of the service by more than the allowance. `date` is the date of a
    /// reply, rounded down to a second. This clock was read before the request and after the reply.
    fn compare(
        &self,
        before: SystemTime,
        date: SystemTime,
        after: SystemTime,
    ) -> Result<(), DynamoDbError> {
        let ahead = before.duration_since(date + SECOND).unwrap_or_default();
        let behind = date.duration_since(after).unwrap_or_default();
        let (difference, direction) = if ahead > behind {
            (ahead, "ahead of")
        } else {
            (behind, "behind")
        };
        if difference <= self.skew {
            return Ok(());
        }
        let message = format!(
            "the clock of this process is {difference:.1?} {direction} the clock of DynamoDB, and the allowance is {:?}",
            self.skew
        );
        Err(DynamoDbError::new(DynamoDbErrorKind::ClockSkew, message))
    }
}

/// The date of the last reply to a call.
#[derive(Clone, Default)]
struct ReplyDate(Arc<Mutex<Option<SystemTime>>>);

impl ReplyDate {
    fn get(&self) -> Option<SystemTime> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Intercept for ReplyDate {
    fn name(&self) -> &'static str {
        "ReplyDate"
    }

    fn read_before_deserialization(
        &self,
        context: &BeforeDeserializationInterceptorContextRef<'_>,
        _: &RuntimeComponents,
        _: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        let date = context
            .response()
            .headers()
            .get("date")
            .and_then(parse_date);
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = date;
        Ok(())
    }
}

impl fmt::Debug for ReplyDate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ReplyDate").field(&self.get()).finish()
    }
}

/// Returns the time of a header `Date`, or `None` if it is not a date of HTTP.
fn parse_date(text: &str) -> Option<SystemTime> {
    let date = DateTime::from_str(text, DateTimeFormat::HttpDate).ok()?;
    SystemTime::try_from(date).ok()
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;

    #[test]
    fn date_of_http_is_parsed() {
        let date = UNIX_EPOCH + Duration::from_secs(784_111_777);
        assert_eq!(parse_date("Sun, 06 Nov 1994 08:49:37 GMT"), Some(date));
        for text in ["", "now", "1994-11-06T08:49:37Z"] {
            assert_eq!(parse_date(text), None, "{text}");
        }
    }

    #[test]
    fn only_certain_difference_is_refused() {
        let clock = Clock {
            now: Arc::new(SystemTime::now),
            is_system: true,
            skew: Duration::from_millis(500),
        };
        let date = UNIX_EPOCH + Duration::from_secs(1_000);
        // The true time of the reply is between 1,000 s and 1,001 s. The call takes 300 ms.
        for (before, problem) in [
            (999_199, Some("501.0ms behind")),
            (999_200, None),
            (1_000_000, None),
            (1_001_500, None),
            (1_001_501, Some("501.0ms ahead of")),
            (1_061_000, Some("60.0s ahead of")),
            (0, Some("999.7s behind")),
        ] {
            let before = UNIX_EPOCH + Duration::from_millis(before);
            let compared = clock.compare(before, date, before + Duration::from_millis(300));
            let message = compared.err().map(|error| error.to_string());
            let expected = problem.map(|problem| {
                format!(
                    "the clock of this process is {problem} the clock of DynamoDB, and the allowance is 500ms"
                )
            });
            assert_eq!(message, expected);
        }
    }
}
