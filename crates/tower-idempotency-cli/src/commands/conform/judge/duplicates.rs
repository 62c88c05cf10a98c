//! The rows of concurrent duplicates, and of a client that disconnects.

use futures_util::future::join_all;
use http::StatusCode;
use tokio::time::{Duration, Instant, sleep};

use super::{Judge, fails, holds, unjudged};
use crate::{
    commands::conform::{
        client::{ServerResponse, to_bytes},
        compare::is_marked,
        plan::{MANY, fresh_key},
        row::Verdict,
    },
    failure::Failure,
};

/// Delay before a retry of a refused duplicate.
const RETRY_DELAY: Duration = Duration::from_millis(50);

impl Judge<'_> {
    pub(super) async fn judge_concurrency(&mut self) -> Result<(), Failure> {
        for (row, count) in [("concurrent", 2), ("many", MANY)] {
            let key = fresh_key()?;
            let verdict = self.send_duplicates(row, &key, count).await;
            let verdict = self.judge_error(row, &key, verdict).await?;
            self.set_verdict(row, verdict);
        }
        let others = self.duplicates.iter();
        let other = others.copied().find(|it| *it != StatusCode::CONFLICT);
        let verdict = match (self.duplicates.len(), other) {
            (0, _) => unjudged("no duplicate was refused"),
            (_, Some(status)) => fails(format!("refused with {}", status.as_u16())),
            (count, None) => holds(format!("{count} refused with 409")),
        };
        self.set_verdict("concurrent-409", verdict);
        Ok(())
    }

    /// Sends duplicates at the same time, and then a retry.
    async fn send_duplicates(
        &mut self,
        row: &'static str,
        key: &str,
        count: usize,
    ) -> Result<Verdict, String> {
        let shape = &self.plan.shape;
        // The connections are open before the first request is sent.
        let opened = join_all((0..count).map(|_| self.client.connect())).await;
        let mut sent = Vec::new();
        for connection in opened {
            let call = shape.call(row, Some(self.plan.header(key)));
            sent.push(self.client.send_on(connection?, call));
        }
        let received: Result<Vec<_>, _> = join_all(sent).await.into_iter().collect();
        let (succeeded, refused): (Vec<_>, Vec<_>) =
            received?.into_iter().partition(|it| it.status.is_success());
        let refusals = refused.len();
        self.duplicates.extend(refused.iter().map(|it| it.status));
        let conflicts = refused.into_iter();
        self.refusals
            .extend(conflicts.filter(|it| it.status == StatusCode::CONFLICT));
        let last = self.send_until_accepted(row, key).await?;
        if !last.status.is_success() {
            return fails(format!("the retry got {}", last.status.as_u16()));
        }
        if let Some(difference) = succeeded
            .iter()
            .find_map(|response| self.difference(response, &last))
        {
            return fails(format!("duplicates differ: {difference}"));
        }
        // If executions differ, the responses above are those of one execution. A duplicate that waited for it may have no marker.
        let executed = succeeded.iter().chain([&last]).filter(|it| !is_marked(it));
        if !self.is_distinct() && self.marks_replays && executed.count() > 1 {
            return fails("several duplicates executed");
        }
        let replies = succeeded.len();
        self.holds_if_visible(format!(
            "one response: {replies} of {count} got it, {refusals} refused"
        ))
    }

    /// Sends a request until it is no longer refused because another one runs.
    async fn send_until_accepted(&self, row: &str, key: &str) -> Result<ServerResponse, String> {
        let began = Instant::now();
        loop {
            let response = self.send(row, &self.plan.shape, key).await?;
            let is_refused = matches!(response.status.as_u16(), 409 | 425 | 429 | 503);
            if !is_refused || began.elapsed() > self.timeout {
                return Ok(response);
            }
            sleep(RETRY_DELAY).await;
        }
    }

    pub(super) async fn judge_disconnect(&mut self) -> Result<(), Failure> {
        let key = fresh_key()?;
        let verdict = self.retry_after_disconnect(&key).await;
        let verdict = self.judge_error("disconnect", &key, verdict).await?;
        self.set_verdict("disconnect", verdict);
        Ok(())
    }

    async fn retry_after_disconnect(&self, key: &str) -> Result<Verdict, String> {
        let shape = &self.plan.shape;
        let call = shape.call("disconnect", Some(self.plan.header(key)));
        let bytes = to_bytes(&call, &shape.body, None);
        let abandoned = self.client.abandon(bytes).await?;
        let retry = self.send_until_accepted("disconnect", key).await?;
        if !retry.status.is_success() {
            return fails(format!("the retry got {}", retry.status.as_u16()));
        }
        let again = self.send("disconnect", shape, key).await?;
        if let Some(difference) = self.difference(&retry, &again) {
            return fails(format!("retries differ: {difference}"));
        }
        if self.marks_replays && !is_marked(&retry) {
            match abandoned {
                Some(status) if status.is_success() => return fails("the retry executed again"),
                Some(_) => {}
                None => {
                    return unjudged(
                        "the retry executed; the first request may not have reached its handler",
                    );
                }
            }
        }
        self.holds_if_visible("retries got one response")
    }

    /// Returns the verdict. If a request of the row got no response, judges that, with
    /// [`judge_unanswered`](Self::judge_unanswered).
    async fn judge_error(
        &self,
        row: &str,
        key: &str,
        verdict: Result<Verdict, String>,
    ) -> Result<Result<Verdict, String>, Failure> {
        match verdict {
            Ok(verdict) => Ok(Ok(verdict)),
            Err(error) => {
                let shape = &self.plan.shape;
                self.judge_unanswered(row, shape, key, error).await
            }
        }
    }
}
