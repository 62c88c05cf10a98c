//! Sends the requests of each row, and judges the responses.

mod duplicates;

use std::{collections::BTreeMap, fmt::Display, time::Duration};

use http::{HeaderValue, StatusCode, header};

use super::{
    client::{Client, ServerResponse, to_bytes},
    compare::{body_difference, header_difference, is_marked, marker},
    plan::{Plan, Shape, fresh_key, spell},
    row::Verdict,
};
use crate::failure::Failure;

/// The verdicts, by the name of their row.
pub(super) type Verdicts = BTreeMap<&'static str, Verdict>;

/// Sends requests, and stores the facts about the server that later rows need.
pub(super) struct Judge<'a> {
    client: &'a Client,
    plan: &'a Plan,
    timeout: Duration,
    /// The key of the first request, and its response.
    key: String,
    first: ServerResponse,
    /// `true` if two executions have different bodies.
    has_distinct_bodies: bool,
    /// `true` if two executions differ in a header, and a replay does not change the headers.
    has_distinct_headers: bool,
    marks_replays: bool,
    /// An error with the reason, if the other body does not succeed under a new key.
    other_body: Result<(), String>,
    /// The status with which another body was refused.
    mismatch: Option<StatusCode>,
    /// Error responses that the server sends because of the key.
    refusals: Vec<ServerResponse>,
    /// The statuses of refused duplicates.
    duplicates: Vec<StatusCode>,
    verdicts: Verdicts,
}

/// Judges all rows. Fails if the server does not respond, or if the first request does not succeed.
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
        other_body: Ok(()),
        mismatch: None,
        refusals: Vec::new(),
        duplicates: Vec::new(),
        verdicts: Verdicts::new(),
    };
    judge.judge_fresh_and_retry().await?;
    judge.judge_other_requests().await?;
    judge.judge_spellings().await?;
    judge.judge_malformed_keys().await?;
    judge.judge_concurrency().await?;
    judge.judge_disconnect().await?;
    let verdict = judge_problem_details(&judge.refusals);
    judge.set_verdict("problem", verdict);
    Ok(judge.verdicts)
}

impl Judge<'_> {
    fn set_verdict(&mut self, row: &'static str, verdict: Result<Verdict, String>) {
        let verdict = verdict.unwrap_or_else(Verdict::Unjudged);
        self.verdicts.insert(row, verdict);
    }

    async fn send(&self, row: &str, shape: &Shape, key: &str) -> Result<ServerResponse, String> {
        let call = shape.call(row, Some(self.plan.header(key)));
        self.client.send(call).await
    }

    async fn judge_fresh_and_retry(&mut self) -> Result<(), Failure> {
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
        self.set_verdict("fresh", verdict);
        let retry = match self.send("retry", shape, &self.key).await {
            Ok(retry) => retry,
            Err(error) => {
                for row in ["retry-headers", "marked"] {
                    self.set_verdict(row, Err(error.clone()));
                }
                let judged = self.judge_unanswered("retry", shape, &self.key, error);
                let verdict = judged.await?;
                self.set_verdict("retry", verdict);
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
        self.set_verdict("retry", verdict);
        let verdict = if retry.status == self.first.status {
            match header_difference(&self.first, &retry) {
                Some(name) => fails(format!("{name} differs")),
                None => holds("the same headers"),
            }
        } else {
            unjudged("the retry has another status")
        };
        self.set_verdict("retry-headers", verdict);
        let verdict = match marker(&retry) {
            Some(name) => holds(format!("{name}: true")),
            None => fails("no header with \"replay\" in its name"),
        };
        self.set_verdict("marked", verdict);
        Ok(())
    }

    /// Returns `true` if two executions have different responses.
    fn is_distinct(&self) -> bool {
        self.has_distinct_bodies || self.has_distinct_headers
    }

    /// Returns how two responses differ. Headers count only if executions differ in them alone, and replays do not change them.
    fn difference(&self, first: &ServerResponse, other: &ServerResponse) -> Option<String> {
        body_difference(first, other).or_else(|| {
            let do_headers_count = self.has_distinct_headers && !self.has_distinct_bodies;
            let name = header_difference(first, other).filter(|_| do_headers_count)?;
            Some(format!("{name} differs"))
        })
    }

    /// Returns a verdict that holds, if a replay can be distinguished from an execution.
    fn holds_if_visible(&self, reason: impl Display) -> Result<Verdict, String> {
        if self.is_distinct() || self.marks_replays {
            holds(reason)
        } else {
            unjudged("two executions have equal responses")
        }
    }

    async fn judge_other_requests(&mut self) -> Result<(), Failure> {
        let plan = self.plan;
        let other = plan.shape.with_body(&plan.other_body);
        let verdict = self
            .judge_refusal("other-body", "--other-body", &other)
            .await?;
        let status = match (self.mismatch, &verdict) {
            (Some(StatusCode::UNPROCESSABLE_ENTITY), _) => holds("refused with 422"),
            (Some(status), _) => fails(format!("refused with {}", status.as_u16())),
            (None, _) => unjudged("another body is not refused"),
        };
        self.set_verdict("other-body", verdict);
        self.set_verdict("other-body-422", status);
        for (row, option, shape) in [
            ("other-path", "--other-path", &plan.other_path),
            ("other-method", "--other-method", &plan.other_method),
        ] {
            let verdict = match shape {
                Some(shape) => self.judge_refusal(row, option, shape).await?,
                None => unjudged(format!("needs {option}")),
            };
            self.set_verdict(row, verdict);
        }
        let verdict = match &plan.other_caller {
            Some(shape) => {
                let other = shape.with_body(&plan.other_body);
                let option = if self.other_body.is_err() {
                    "--other-body"
                } else {
                    "--other-header"
                };
                match self.send_control("other-caller", option, &other).await? {
                    Ok(_) => {
                        self.judge_separation("other-caller", &other, &self.key)
                            .await
                    }
                    Err(reason) => Err(reason),
                }
            }
            None => unjudged("needs --other-header"),
        };
        self.set_verdict("other-caller", verdict);
        Ok(())
    }

    /// Judges if another request under the first key is refused, although it succeeds under a new key. Another path or method
    /// may also have a key of its own.
    async fn judge_refusal(
        &mut self,
        row: &'static str,
        option: &str,
        shape: &Shape,
    ) -> Result<Result<Verdict, String>, Failure> {
        let control = self.send_control(row, option, shape).await?;
        if row == "other-body" {
            self.other_body = control.clone().map(drop);
        }
        let control = match control {
            Ok(control) => control,
            Err(reason) => return Ok(Err(reason)),
        };
        let response = match self.send(row, shape, &self.key).await {
            Ok(response) => response,
            Err(error) => return self.judge_unanswered(row, shape, &self.key, error).await,
        };
        let status = response.status;
        let verdict = if status.is_client_error() {
            if row == "other-body" {
                self.mismatch = Some(status);
            }
            self.refusals.push(response);
            holds(format!("refused with {}", status.as_u16()))
        } else if row != "other-body" && self.has_own_key(row, shape, &control, &response).await {
            holds("each endpoint has keys of its own")
        } else if self.difference(&self.first, &response).is_none() {
            fails("got the response of the first request")
        } else {
            fails(format!("not refused: {}", status.as_u16()))
        };
        Ok(verdict)
    }

    /// Returns `true` if the request has executed under the first key, and a retry gets its response. `control` is the response
    /// under a new key.
    async fn has_own_key(
        &self,
        row: &str,
        shape: &Shape,
        control: &ServerResponse,
        response: &ServerResponse,
    ) -> bool {
        let is_execution = !is_marked(response)
            && (self.marks_replays || self.difference(&self.first, response).is_some());
        if !response.status.is_success() || !is_execution {
            return false;
        }
        let Ok(retry) = self.send(row, shape, &self.key).await else {
            return false;
        };
        // Without a marker, equal responses of two executions would look like a replay.
        let is_replay = is_marked(&retry)
            || !self.marks_replays && self.difference(control, response).is_some();
        is_replay && self.difference(response, &retry).is_none()
    }

    /// Judges a request under a used key that got no response. The row does not hold if a retry gets none either, and a
    /// request under a new key succeeds.
    async fn judge_unanswered(
        &self,
        row: &str,
        shape: &Shape,
        key: &str,
        error: String,
    ) -> Result<Result<Verdict, String>, Failure> {
        let Err(repeated) = self.send(row, shape, key).await else {
            return Ok(Err(error));
        };
        let control = self.send(row, shape, &fresh_key()?).await;
        Ok(match control {
            Ok(control) if control.status.is_success() => fails(repeated),
            _ => Err(error),
        })
    }

    /// Sends a request under a new key. Returns the reason if it does not succeed.
    async fn send_control(
        &self,
        row: &str,
        option: &str,
        shape: &Shape,
    ) -> Result<Result<ServerResponse, String>, Failure> {
        let sent = self.send(row, shape, &fresh_key()?).await;
        Ok(sent.and_then(|control| {
            let status = control.status.as_u16();
            if control.status.is_success() {
                return Ok(control);
            }
            Err(format!("a new key gets {status}: change {option}"))
        }))
    }

    /// Judges if the first key, in another spelling or of another caller, is another key. The request has the other body, and
    /// succeeds under a new key.
    async fn judge_separation(
        &self,
        row: &str,
        shape: &Shape,
        key: &str,
    ) -> Result<Verdict, String> {
        let response = &self.send(row, shape, key).await?;
        let status = response.status.as_u16();
        if matches!(status, 401 | 403)
            || !(response.status.is_success() || response.status.is_client_error())
        {
            return unjudged(format!("got {status}"));
        }
        if response.status.is_client_error() {
            return fails(format!("one key: refused with {status}"));
        }
        let is_same = self.difference(&self.first, response).is_none();
        if is_marked(response) || is_same && self.is_distinct() {
            return fails("one key: got the first response");
        }
        let has_same_body = body_difference(&self.first, response).is_none();
        if has_same_body && !self.is_distinct() && self.mismatch.is_none() {
            return unjudged("two executions have equal responses");
        }
        holds("two keys")
    }

    async fn judge_spellings(&mut self) -> Result<(), Failure> {
        let plan = self.plan;
        let other = plan.shape.with_body(&plan.other_body);
        let upper = self.key.to_ascii_uppercase();
        let verdict = match self.other_body.clone() {
            Ok(()) => self.judge_separation("case", &other, &upper).await,
            Err(reason) => Err(reason),
        };
        self.set_verdict("case", verdict);
        let key = spell(&self.key, !plan.has_bare_keys);
        let response = self.client.send(other.call("quoting", Some(key))).await;
        let verdict = response.and_then(|response| match self.mismatch {
            None => unjudged("another body is not refused"),
            Some(mismatch) if response.status == mismatch => holds("one key"),
            Some(_) if response.status.is_success() => fails("two keys"),
            Some(_) => fails(format!("refused with {}", response.status.as_u16())),
        });
        self.set_verdict("quoting", verdict);
        Ok(())
    }

    async fn judge_malformed_keys(&mut self) -> Result<(), Failure> {
        let shape = &self.plan.shape;
        let verdict = if self.plan.requires_key {
            let sent = self.client.send(shape.call("missing-key", None)).await;
            self.judge_400(sent)
        } else {
            unjudged("needs --require-key")
        };
        self.set_verdict("missing-key", verdict);
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
            let verdict = self.judge_400(sent);
            self.set_verdict(row, verdict);
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
        self.set_verdict("key-control", verdict);
        Ok(())
    }

    fn judge_400(&mut self, sent: Result<ServerResponse, String>) -> Result<Verdict, String> {
        let response = sent?;
        if response.status != StatusCode::BAD_REQUEST {
            return fails(format!("expected 400, got {}", response.status.as_u16()));
        }
        self.refusals.push(response);
        holds("400")
    }
}

/// Judges the error responses that the server has sent because of the key.
fn judge_problem_details(refusals: &[ServerResponse]) -> Result<Verdict, String> {
    let describes = |response: &&ServerResponse| {
        let contains = |name, text: &str| {
            let mut values = response.headers.get_all(name).iter();
            values.any(|value| String::from_utf8_lossy(value.as_bytes()).contains(text))
        };
        contains(header::CONTENT_TYPE, "application/problem+json")
            || contains(header::LINK, "describedby")
    };
    match refusals.iter().find(|response| !describes(response)) {
        _ if refusals.is_empty() => unjudged("nothing was refused"),
        Some(response) => fails(format!(
            "the {} response has no problem details and no Link",
            response.status.as_u16()
        )),
        None => holds(format!("{} error responses", refusals.len())),
    }
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
