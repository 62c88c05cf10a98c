//! Codes in the bodies of error responses.

use http::{HeaderMap, StatusCode, header};
use serde_json::{Map, Value};

/// Longest body that is searched for a code.
pub(crate) const MAX_BYTES: usize = 64 * 1024;

/// Result of the search for a code in the body of a response.
#[derive(Debug)]
pub(crate) enum Code {
    /// The body contains no code, or none that counts.
    Missing,
    /// The body may contain a code. It is encoded, too long, late, broken or cut.
    Unreadable,
    /// The body is a JSON object.
    Read(Problem),
}

/// Members of an error body that decide on a retry.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Problem {
    pub(crate) code: Option<String>,
    /// Member `error.type` of Stripe's API.
    pub(crate) error_type: Option<String>,
    /// Member `retryable` of a problem of `tower-idempotency`.
    pub(crate) retryable: Option<bool>,
    /// `true` if the type is one of `tower-idempotency`, or of a protocol that it speaks. If `false`, no code of a 5xx counts.
    pub(crate) has_type_of_layer: bool,
}

/// Form of a body that may contain a code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// `application/problem+json` (RFC 9457).
    Problem,
    /// Any other JSON.
    Json,
}

impl Form {
    /// Returns the form of a body, or `None` if it contains no code that counts.
    pub(crate) fn of(status: StatusCode, headers: &HeaderMap) -> Option<Self> {
        if !status.is_client_error() && !status.is_server_error() {
            return None;
        }
        let media_type = headers.get(header::CONTENT_TYPE)?.to_str().ok()?;
        let essence = media_type.split(';').next().unwrap_or_default().trim();
        if essence.eq_ignore_ascii_case("application/problem+json") {
            Some(Self::Problem)
        } else if essence.eq_ignore_ascii_case("application/json") {
            Some(Self::Json)
        } else {
            None
        }
    }
}

/// Returns `true` if the body has to be decoded before it is read.
pub(crate) fn is_encoded(headers: &HeaderMap) -> bool {
    let mut encodings = headers.get_all(header::CONTENT_ENCODING).iter();
    encodings.any(|encoding| !encoding.as_bytes().eq_ignore_ascii_case(b"identity"))
}

impl Code {
    /// Searches the body of an error response.
    ///
    /// A body without a length ends with its connection, also if that breaks. An object that was cut is JSON that ends early.
    pub(crate) fn parse(form: Form, body: &[u8]) -> Self {
        match serde_json::from_slice(body) {
            Ok(Value::Object(body)) => Self::Read(Problem::of(form, &body)),
            Err(error) if error.is_eof() && !body.trim_ascii().is_empty() => Self::Unreadable,
            Ok(_) | Err(_) => Self::Missing,
        }
    }
}

impl Problem {
    /// Returns the members of a body.
    ///
    /// A gateway may send the problem details of the layer as other JSON. Otherwise a code counts there if it is a member of
    /// `error`, or if the body has a type of the Agentic Commerce Protocol. With that type, the codes of the layer have
    /// underscores. Any other `code` belongs to the application, and its meaning is unknown.
    fn of(form: Form, body: &Map<String, Value>) -> Self {
        let text = |value: Option<&Value>| value?.as_str().map(str::to_owned);
        let body_type = body.get("type").and_then(Value::as_str).unwrap_or_default();
        let is_problem_of_layer = body_type.starts_with("urn:tower-idempotency:problem:");
        if form == Form::Problem || is_problem_of_layer {
            return Self {
                code: text(body.get("code")),
                error_type: None,
                retryable: body
                    .get("retryable")
                    .and_then(Value::as_bool)
                    .filter(|_| is_problem_of_layer),
                has_type_of_layer: is_problem_of_layer,
            };
        }
        if let Some(error) = body.get("error").and_then(Value::as_object) {
            let error_type = text(error.get("type"));
            return Self {
                code: text(error.get("code")),
                has_type_of_layer: error_type.as_deref() == Some("api_error"),
                error_type,
                retryable: None,
            };
        }
        let is_acp = ACP_TYPES.contains(&body_type);
        let code = text(body.get("code")).map(|code| match code.starts_with("idempotency_") {
            true => code,
            false => code.replace('_', "-"),
        });
        Self {
            code: code.filter(|code| is_acp || code.starts_with("idempotency_")),
            has_type_of_layer: is_acp,
            ..Self::default()
        }
    }
}

/// Types of errors of the Agentic Commerce Protocol that the layer sends.
const ACP_TYPES: [&str; 3] = ["invalid_request", "processing_error", "service_unavailable"];

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn problem(form: Form, body: &str) -> Option<Problem> {
        match Code::parse(form, body.as_bytes()) {
            Code::Read(problem) => Some(problem),
            Code::Missing | Code::Unreadable => None,
        }
    }

    fn code(form: Form, body: &str) -> Option<String> {
        problem(form, body)?.code
    }

    #[test]
    fn code_is_found_in_each_form() {
        let problem = r#"{"type":"about:blank","code":"in-progress","retryable":true}"#;
        assert_eq!(code(Form::Problem, problem).as_deref(), Some("in-progress"));
        let stripe = r#"{"error":{"type":"idempotency_error","code":"idempotency_key_in_use"}}"#;
        assert_eq!(
            code(Form::Json, stripe).as_deref(),
            Some("idempotency_key_in_use")
        );
        let acp = r#"{"type":"invalid_request","code":"idempotency_in_flight"}"#;
        assert_eq!(
            code(Form::Json, acp).as_deref(),
            Some("idempotency_in_flight")
        );
    }

    #[test]
    fn codes_of_application_do_not_count() {
        assert_eq!(code(Form::Json, r#"{"code":"in-progress"}"#), None);
        assert_eq!(code(Form::Problem, r#"{"code":7}"#), None);
        for body in ["", "\n", "[]", "null", "\"in-progress\"", "no JSON"] {
            let code = Code::parse(Form::Problem, body.as_bytes());
            assert!(matches!(code, Code::Missing), "{body}");
        }
    }

    #[test]
    fn cut_object_is_unreadable() {
        let body = r#"{"status":409,"x":"\u00e9 é","code":"in-progress","a":[{}],"b":true}"#;
        assert_eq!(code(Form::Problem, body).as_deref(), Some("in-progress"));
        for length in 1..body.len() {
            let code = Code::parse(Form::Problem, &body.as_bytes()[..length]);
            assert!(matches!(code, Code::Unreadable), "cut at {length}");
        }
    }

    #[test]
    fn deep_nesting_is_no_problem() {
        let code = Code::parse(Form::Json, "[".repeat(MAX_BYTES).as_bytes());
        assert!(matches!(code, Code::Missing));
    }

    #[test]
    fn retryable_counts_in_problems_of_layer() {
        let parse = |uri| {
            let body = format!(r#"{{"type":"{uri}","code":"new","retryable":true}}"#);
            problem(Form::Problem, &body).unwrap().retryable
        };
        assert_eq!(parse("urn:tower-idempotency:problem:new"), Some(true));
        assert_eq!(parse("https://example.com/new"), None);
    }

    #[test]
    fn only_errors_in_json_have_form() {
        let form = |status, media_type| {
            let media_type = HeaderValue::from_static(media_type);
            Form::of(
                status,
                &HeaderMap::from_iter([(header::CONTENT_TYPE, media_type)]),
            )
        };
        assert_eq!(
            form(
                StatusCode::CONFLICT,
                "application/problem+json; charset=utf-8"
            ),
            Some(Form::Problem)
        );
        assert_eq!(
            form(StatusCode::CONFLICT, "Application/JSON"),
            Some(Form::Json)
        );
        assert_eq!(form(StatusCode::CONFLICT, "text/html"), None);
        assert_eq!(form(StatusCode::OK, "application/json"), None);
    }
}
