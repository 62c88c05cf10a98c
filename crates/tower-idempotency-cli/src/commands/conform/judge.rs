//! Sends the requests of each row, and judges the responses.

use std::{collections::BTreeMap, fmt::Display};

use futures_util::future::join_all;
use http::{HeaderValue, StatusCode, header};
use tokio::time::{Duration, Instant, sleep};

use super::{
    client::{Client, ServerResponse, to_bytes},
    plan::{MANY, Plan, Shape, fresh_key, spell},
    row::Verdict,
};
use crate::failure::Failure;

/// The headers that describe the representation (RFC 9110, section 8), and the place of what was created.
const REPRESENTATION: [&str; 7] = [
    "content-type",
    "content-encoding",
    "content-language",
    "content-location",
    "location",
    "etag",
    "last-modified",
];
/// The pause before a retry of a refused duplicate.
const PAUSE: Duration = Duration::from_millis(50);

/// The verdicts, by the name of their row.
pub(super) type Verdicts = BTreeMap<&'static str, Verdict>;

/// Sends requests, and keeps the facts about the server that later rows need.
pub(super) struct Judge<'a> {
    client: &'a Client,
    plan: &'a Plan,
    timeout: Duration,
    /// The key of the first request, and its response.
    key: String,
    first: ServerResponse,
    /// Two executions have different bodies.
    has_distinct_bodies: bool,
    /// Two executions differ in a header, and a replay does not change the headers.
    has_distinct_headers: bool,
    marks_replays: bool,
    /// The status with which another body was refused.
    mismatch: Option<StatusCode>,
    /// Error responses of the idempotency itself.
    refusals: Vec<ServerResponse>,
    /// The statuses of refused duplicates.
    duplicates: Vec<StatusCode>,
    verdicts: Verdicts,
}

/// Judges all rows. Fails if no response can be had, or no request succeeds.
pub(super) async fn judge(
    client: &Client,
    plan: &Plan,
    timeout: Duration,
) -> Result<Verdicts, Failure> {
    let key = fresh_key()?;
    let call = plan.shape.call("fresh", Some(plan.header(&key)));
    let first = client.send(call).await.map_err(Failure::usage)?;
    if !first.status.is_success() {
        return Err(Failure::usage(format!(
            "a request with a new key got {}: conform needs a request that succeeds",
            first.status
        )));
    }
    let mut judge = Judge {
        client,
        plan,
        timeout,
        key,
        first,
        has_distinct_bodies: false,
        has_distinct_headers: false,
        marks_replays: false,
        mismatch: None,
        refusals: Vec::new(),
        duplicates: Vec::new(),
        verdicts: Verdicts::new(),
    };
    judge.fresh_and_retry().await?;
    judge.other_requests().await?;
    judge.spellings().await?;
    judge.malformed_keys().await?;
    judge.concurrent_duplicates().await?;
    judge.disconnect().await?;
    let verdict = problem(&judge.refusals);
    judge.note("problem", verdict);
    Ok(judge.verdicts)
}

impl Judge<'_> {
    fn note(&mut self, row: &'static str, verdict: Result<Verdict, String>) {
        let verdict = verdict.unwrap_or_else(Verdict::Unjudged);
        self.verdicts.insert(row, verdict);
    }

    async fn send(&self, row: &str, shape: &Shape, key: &str) -> Result<ServerResponse, String> {
        let call = shape.call(row, Some(self.plan.header(key)));
        self.client.send(call).await
    }

    async fn fresh_and_retry(&mut self) -> Result<(), Failure> {
        let shape = &self.plan.shape;
        let second = self.send("fresh", shape, &fresh_key()?).await;
        let second = second.map_err(Failure::usage)?;
        self.has_distinct_bodies = body_difference(&self.first, &second).is_some();
        let verdict = if !second.status.is_success() {
            fails(format!("a second new key got {}", second.status.as_u16()))
        } else if is_marked(&second) {
            fails("a new key got a replay")
        } else {
            holds(format!("two new keys got {}", second.status.as_u16()))
        };
        self.note("fresh", verdict);

        let retry = match self.send("retry", shape, &self.key).await {
            Ok(retry) => retry,
            Err(error) => {
                for row in ["retry", "retry-headers", "marked"] {
                    self.note(row, Err(error.clone()));
                }
                return Ok(());
            }
        };
        self.marks_replays = is_marked(&retry) && !is_marked(&self.first);
        self.has_distinct_headers = header_difference(&self.first, &second).is_some()
            && header_difference(&self.first, &retry).is_none();
        let verdict = match body_difference(&self.first, &retry) {
            Some(difference) => fails(difference),
            None => self.holds_if_visible("the same status and body"),
        };
        self.note("retry", verdict);
        let verdict = if retry.status == self.first.status {
            match header_difference(&self.first, &retry) {
                Some(name) => fails(format!("{name} differs")),
                None => holds("the same headers"),
            }
        } else {
            unjudged("the retry has another status")
        };
        self.note("retry-headers", verdict);
        let verdict = match marker(&retry) {
            Some(name) => holds(format!("{name}: true")),
            None => fails("no header with \"replay\" in its name"),
        };
        self.note("marked", verdict);
        Ok(())
    }

    /// Returns `true` if two executions have different responses.
    fn is_distinct(&self) -> bool {
        self.has_distinct_bodies || self.has_distinct_headers
    }

    /// Returns how two responses differ. The headers count only if two executions have equal bodies, and a replay keeps them.
    fn difference(&self, first: &ServerResponse, other: &ServerResponse) -> Option<String> {
        body_difference(first, other).or_else(|| {
            let do_headers_count = self.has_distinct_headers && !self.has_distinct_bodies;
            let name = header_difference(first, other).filter(|_| do_headers_count)?;
            Some(format!("{name} differs"))
        })
    }

    /// Holds if a replay differs from an execution.
    fn holds_if_visible(&self, reason: impl Display) -> Result<Verdict, String> {
        if self.is_distinct() || self.marks_replays {
            holds(reason)
        } else {
            unjudged("two executions have equal responses")
        }
    }

    async fn other_requests(&mut self) -> Result<(), Failure> {
        let plan = self.plan;
        let other = plan.shape.with_body(&plan.other_body);
        let verdict = self.refused("other-body", "--other-body", &other).await?;
        let status = match (self.mismatch, &verdict) {
            (Some(StatusCode::UNPROCESSABLE_ENTITY), _) => holds("refused with 422"),
            (Some(status), _) => fails(format!("refused with {}", status.as_u16())),
            (None, _) => unjudged("another body is not refused"),
        };
        self.note("other-body", verdict);
        self.note("other-body-422", status);
        for (row, option, shape) in [
            ("other-path", "--other-path", &plan.other_path),
            ("other-method", "--other-method", &plan.other_method),
        ] {
            let verdict = match shape {
                Some(shape) => self.refused(row, option, shape).await?,
                None => unjudged(format!("needs {option}")),
            };
            self.note(row, verdict);
        }
        let verdict = match &plan.other_caller {
            Some(shape) => {
                let other = shape.with_body(&plan.other_body);
                let answer = self.send("other-caller", &other, &self.key).await;
                answer.and_then(|answer| self.separate(&answer))
            }
            None => unjudged("needs --other-header"),
        };
        self.note("other-caller", verdict);
        Ok(())
    }

    /// Judges that another request under the first key is refused, although it succeeds under a new key.
    async fn refused(
        &mut self,
        row: &'static str,
        option: &str,
        shape: &Shape,
    ) -> Result<Result<Verdict, String>, Failure> {
        let control = match self.send(row, shape, &fresh_key()?).await {
            Ok(control) => control,
            Err(error) => return Ok(Err(error)),
        };
        if !control.status.is_success() {
            let status = control.status.as_u16();
            return Ok(unjudged(format!(
                "a new key gets {status}: change {option}"
            )));
        }
        let answer = match self.send(row, shape, &self.key).await {
            Ok(answer) => answer,
            Err(error) => return Ok(Err(error)),
        };
        let status = answer.status;
        let verdict = if status.is_client_error() {
            if row == "other-body" {
                self.mismatch = Some(status);
            }
            self.refusals.push(answer);
            holds(format!("refused with {}", status.as_u16()))
        } else if self.difference(&self.first, &answer).is_none() {
            fails("got the response of the first request")
        } else {
            fails(format!("not refused: {}", status.as_u16()))
        };
        Ok(verdict)
    }

    /// Judges that the first key, in another spelling or of another caller, is another key. The request had the other body.
    fn separate(&self, answer: &ServerResponse) -> Result<Verdict, String> {
        let status = answer.status.as_u16();
        if matches!(status, 401 | 403)
            || !(answer.status.is_success() || answer.status.is_client_error())
        {
            return unjudged(format!("got {status}"));
        }
        if answer.status.is_client_error() {
            return fails(format!("one key: refused with {status}"));
        }
        let is_same = self.difference(&self.first, answer).is_none();
        if is_marked(answer) || is_same && self.is_distinct() {
            return fails("one key: got the first response");
        }
        let has_same_body = body_difference(&self.first, answer).is_none();
        if has_same_body && !self.is_distinct() && self.mismatch.is_none() {
            return unjudged("two executions have equal responses");
        }
        holds("two keys")
    }

    async fn spellings(&mut self) -> Result<(), Failure> {
        let plan = self.plan;
        let other = plan.shape.with_body(&plan.other_body);
        let upper = self.key.to_ascii_uppercase();
        let answer = self.send("case", &other, &upper).await;
        let verdict = answer.and_then(|answer| self.separate(&answer));
        self.note("case", verdict);

        let key = spell(&self.key, !plan.has_bare_keys);
        let answer = self.client.send(other.call("quoting", Some(key))).await;
        let verdict = answer.and_then(|answer| match self.mismatch {
            None => unjudged("another body is not refused"),
            Some(mismatch) if answer.status == mismatch => holds("one key"),
            Some(_) if answer.status.is_success() => fails("two keys"),
            Some(_) => fails(format!("refused with {}", answer.status.as_u16())),
        });
        self.note("quoting", verdict);
        Ok(())
    }

    async fn malformed_keys(&mut self) -> Result<(), Failure> {
        let shape = &self.plan.shape;
        let verdict = if self.plan.requires_key {
            let sent = self.client.send(shape.call("missing-key", None)).await;
            self.bad_request(sent)
        } else {
            unjudged("needs --require-key")
        };
        self.note("missing-key", verdict);
        let (one, two) = (
            self.plan.header(&fresh_key()?),
            self.plan.header(&fresh_key()?),
        );
        let list = [one.as_bytes(), b", ", two.as_bytes()].concat();
        let long = self.plan.header(&"k".repeat(1024));
        for (row, key) in [
            ("key-empty", Ok(HeaderValue::from_static(""))),
            ("key-long", Ok(long)),
            ("key-list", HeaderValue::from_bytes(&list)),
        ] {
            // Spaces, quotes and UUIDs are valid in a header.
            let call = shape.call(row, key.ok());
            let sent = self.client.send(call).await;
            let verdict = self.bad_request(sent);
            self.note(row, verdict);
        }
        let key = format!("\"{}\u{1}\"", fresh_key()?);
        let call = shape.call("key-control", None);
        let bytes = to_bytes(&call, &shape.body, Some(key.as_bytes()));
        let verdict = match self.client.send_bytes(bytes).await {
            Ok(Some(StatusCode::BAD_REQUEST)) => holds("400"),
            Ok(Some(status)) => fails(format!("expected 400, got {}", status.as_u16())),
            Ok(None) => holds("the server closed the connection"),
            Err(error) => Err(error),
        };
        self.note("key-control", verdict);
        Ok(())
    }

    fn bad_request(&mut self, sent: Result<ServerResponse, String>) -> Result<Verdict, String> {
        let answer = sent?;
        if answer.status != StatusCode::BAD_REQUEST {
            return fails(format!("expected 400, got {}", answer.status.as_u16()));
        }
        self.refusals.push(answer);
        holds("400")
    }

    async fn concurrent_duplicates(&mut self) -> Result<(), Failure> {
        for (row, count) in [("concurrent", 2), ("many", MANY)] {
            let key = fresh_key()?;
            let verdict = self.duplicates(row, &key, count).await;
            self.note(row, verdict);
        }
        let others = self.duplicates.iter();
        let other = others.copied().find(|it| *it != StatusCode::CONFLICT);
        let verdict = match (self.duplicates.len(), other) {
            (0, _) => unjudged("no duplicate was refused"),
            (_, Some(status)) => fails(format!("refused with {}", status.as_u16())),
            (count, None) => holds(format!("{count} refused with 409")),
        };
        self.note("concurrent-409", verdict);
        Ok(())
    }

    /// Sends duplicates at the same time, and then a retry.
    async fn duplicates(
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
        let answers: Result<Vec<_>, _> = join_all(sent).await.into_iter().collect();
        let (succeeded, refused): (Vec<_>, Vec<_>) =
            answers?.into_iter().partition(|it| it.status.is_success());
        let refusals = refused.len();
        self.duplicates.extend(refused.iter().map(|it| it.status));
        let conflicts = refused.into_iter();
        self.refusals
            .extend(conflicts.filter(|it| it.status == StatusCode::CONFLICT));
        let last = self.settled(row, key).await?;
        if !last.status.is_success() {
            return fails(format!("the retry got {}", last.status.as_u16()));
        }
        if let Some(difference) = succeeded
            .iter()
            .find_map(|answer| self.difference(answer, &last))
        {
            return fails(format!("duplicates differ: {difference}"));
        }
        let executed = succeeded.iter().chain([&last]).filter(|it| !is_marked(it));
        if self.marks_replays && executed.count() > 1 {
            return fails("several duplicates executed");
        }
        let replies = succeeded.len();
        self.holds_if_visible(format!(
            "one response: {replies} of {count} got it, {refusals} refused"
        ))
    }

    /// Sends a request until it is no longer refused because another one runs.
    async fn settled(&self, row: &str, key: &str) -> Result<ServerResponse, String> {
        let began = Instant::now();
        loop {
            let answer = self.send(row, &self.plan.shape, key).await?;
            let is_refused = matches!(answer.status.as_u16(), 409 | 425 | 429 | 503);
            if !is_refused || began.elapsed() > self.timeout {
                return Ok(answer);
            }
            sleep(PAUSE).await;
        }
    }

    async fn disconnect(&mut self) -> Result<(), Failure> {
        let key = fresh_key()?;
        let verdict = self.retry_after_disconnect(&key).await;
        self.note("disconnect", verdict);
        Ok(())
    }

    async fn retry_after_disconnect(&self, key: &str) -> Result<Verdict, String> {
        let shape = &self.plan.shape;
        let call = shape.call("disconnect", Some(self.plan.header(key)));
        let bytes = to_bytes(&call, &shape.body, None);
        self.client.abandon(bytes).await?;
        let retry = self.settled("disconnect", key).await?;
        if !retry.status.is_success() {
            return fails(format!("the retry got {}", retry.status.as_u16()));
        }
        let again = self.send("disconnect", shape, key).await?;
        match self.difference(&retry, &again) {
            Some(difference) => fails(format!("retries differ: {difference}")),
            None => self.holds_if_visible("retries got one response"),
        }
    }
}

/// Judges the error responses of the idempotency itself.
fn problem(refusals: &[ServerResponse]) -> Result<Verdict, String> {
    let describes = |answer: &&ServerResponse| {
        let contains = |name, text: &str| {
            let mut values = answer.headers.get_all(name).iter();
            values.any(|value| String::from_utf8_lossy(value.as_bytes()).contains(text))
        };
        contains(header::CONTENT_TYPE, "application/problem+json")
            || contains(header::LINK, "describedby")
    };
    match refusals.iter().find(|answer| !describes(answer)) {
        _ if refusals.is_empty() => unjudged("nothing was refused"),
        Some(answer) => fails(format!(
            "the {} response has neither",
            answer.status.as_u16()
        )),
        None => holds(format!("{} error responses", refusals.len())),
    }
}

/// Returns how a response differs in status or body from the first one.
fn body_difference(first: &ServerResponse, retry: &ServerResponse) -> Option<String> {
    if first.status != retry.status {
        let (first, retry) = (first.status.as_u16(), retry.status.as_u16());
        return Some(format!("{first}, then {retry}"));
    }
    (first.body != retry.body).then(|| "the bodies differ".to_owned())
}

/// Returns the name of a header of the representation that differs.
fn header_difference(first: &ServerResponse, retry: &ServerResponse) -> Option<&'static str> {
    let differs = |name: &&str| {
        let values = |answer: &ServerResponse| -> Vec<HeaderValue> {
            answer.headers.get_all(*name).iter().cloned().collect()
        };
        values(first) != values(retry)
    };
    REPRESENTATION.into_iter().find(differs)
}

/// Returns the name of the header that marks a replay, such as `Idempotent-Replayed: true`.
fn marker(answer: &ServerResponse) -> Option<&str> {
    let headers = answer.headers.iter();
    let mut markers = headers.filter(|(name, value)| {
        name.as_str().contains("replay") && value.as_bytes().eq_ignore_ascii_case(b"true")
    });
    markers.next().map(|(name, _)| name.as_str())
}

fn is_marked(answer: &ServerResponse) -> bool {
    marker(answer).is_some()
}

// A transport error is the `Err` of a verdict.
#[expect(clippy::unnecessary_wraps, reason = "the error is a transport error")]
fn holds(reason: impl Display) -> Result<Verdict, String> {
    Ok(Verdict::Holds(reason.to_string()))
}

#[expect(clippy::unnecessary_wraps, reason = "the error is a transport error")]
fn fails(reason: impl Display) -> Result<Verdict, String> {
    Ok(Verdict::Fails(reason.to_string()))
}

#[expect(clippy::unnecessary_wraps, reason = "the error is a transport error")]
fn unjudged(reason: impl Display) -> Result<Verdict, String> {
    Ok(Verdict::Unjudged(reason.to_string()))
}
