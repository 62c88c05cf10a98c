//! The policy in an operation of a document.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::{
    DescribeError,
    components::{Components, merge_schema},
    object,
    reference::resolve,
};
use crate::policy::{ErrorPolicy, Policy};

/// Adds the policy to an operation. `shared` contains the parameters of its path.
pub(super) fn describe_operation(
    policy: &Policy,
    document: &Value,
    components: &mut Components,
    shared: Option<&Value>,
    operation: &mut Map<String, Value>,
    at: &str,
) -> Result<(), DescribeError> {
    if let Some(parameter) = components.parameter(policy, document) {
        let own = operation.get("parameters");
        let name = policy.key.header.as_deref().unwrap_or_default();
        let is_there = has_header(document, own, name)? || has_header(document, shared, name)?;
        if !is_there {
            let parameters = operation.entry("parameters").or_insert_with(|| json!([]));
            let malformed = || DescribeError::Malformed(format!("{at}/parameters"));
            parameters
                .as_array_mut()
                .ok_or_else(malformed)?
                .push(parameter);
        }
    }
    let malformed = || DescribeError::Malformed(format!("{at}/responses"));
    let responses = operation.entry("responses").or_insert_with(|| json!({}));
    let responses = responses.as_object_mut().ok_or_else(malformed)?;
    add_headers(policy, document, components, responses, at)?;
    add_errors(policy, document, components, responses, at)?;
    operation.insert("x-idempotency".to_owned(), summary(policy));
    Ok(())
}

/// Returns `true` if the list has a header parameter of this name.
fn has_header(
    document: &Value,
    parameters: Option<&Value>,
    name: &str,
) -> Result<bool, DescribeError> {
    for parameter in parameters.and_then(Value::as_array).into_iter().flatten() {
        let parameter = resolve(document, parameter)?;
        let text = |member: &str| {
            parameter
                .get(member)
                .and_then(Value::as_str)
                .unwrap_or_default()
        };
        if text("in") == "header" && text("name").eq_ignore_ascii_case(name) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Adds the headers of replays to the successful responses.
fn add_headers(
    policy: &Policy,
    document: &Value,
    components: &Components,
    responses: &mut Map<String, Value>,
    at: &str,
) -> Result<(), DescribeError> {
    let headers = components.response_headers(policy);
    if headers.is_empty() {
        return Ok(());
    }
    for (status, response) in responses.iter_mut() {
        let is_recorded =
            status == "2XX" || status.parse().is_ok_and(|status| policy.records(status));
        if !status.starts_with('2') || !is_recorded {
            continue;
        }
        let at = format!("{at}/responses/{status}");
        let mut described = object(resolve(document, response)?, &at)?.clone();
        merge_headers(&mut described, &headers, &at)?;
        // A response by reference stays a reference if it already has the headers.
        if described != *object(resolve(document, response)?, &at)? {
            *response = Value::Object(described);
        }
    }
    Ok(())
}

fn merge_headers(
    response: &mut Map<String, Value>,
    headers: &Map<String, Value>,
    at: &str,
) -> Result<(), DescribeError> {
    if headers.is_empty() {
        return Ok(());
    }
    let malformed = || DescribeError::Malformed(format!("{at}/headers"));
    let existing = response.entry("headers").or_insert_with(|| json!({}));
    let existing = existing.as_object_mut().ok_or_else(malformed)?;
    for (name, header) in headers {
        if !existing
            .keys()
            .any(|other| other.eq_ignore_ascii_case(name))
        {
            existing.insert(name.clone(), header.clone());
        }
    }
    Ok(())
}

/// Adds a response for each status of the layer's errors.
fn add_errors(
    policy: &Policy,
    document: &Value,
    components: &mut Components,
    responses: &mut Map<String, Value>,
    at: &str,
) -> Result<(), DescribeError> {
    let mut by_status: BTreeMap<u16, Vec<&ErrorPolicy>> = BTreeMap::new();
    for error in &policy.errors {
        by_status.entry(error.status).or_default().push(error);
    }
    for (status, errors) in by_status {
        let response = components.error_response(policy, document, &errors);
        let (status, range) = (status.to_string(), format!("{}XX", status / 100));
        let existing = [&*status, &*range, "default"]
            .into_iter()
            .find_map(|name| responses.get(name));
        let name = format!("Idempotency{status}");
        let described = match existing {
            None => components.refer(document, "responses", &name, response),
            Some(existing)
                if components.is_reference(document, "responses", &name, &response, existing) =>
            {
                continue;
            }
            Some(existing) => {
                let at = format!("{at}/responses/{status}");
                let existing = object(resolve(document, existing)?, &at)?;
                Value::Object(merge_response(existing, &response, &at)?)
            }
        };
        responses.insert(status, described);
    }
    Ok(())
}

/// Adds headers and bodies to a response of the document. Its existing headers and bodies stay.
fn merge_response(
    existing: &Map<String, Value>,
    response: &Value,
    at: &str,
) -> Result<Map<String, Value>, DescribeError> {
    let mut merged = existing.clone();
    let none = Map::new();
    let members = |name: &str| {
        response
            .get(name)
            .and_then(Value::as_object)
            .unwrap_or(&none)
    };
    merge_headers(&mut merged, members("headers"), at)?;
    if members("content").is_empty() {
        return Ok(merged);
    }
    let malformed = || DescribeError::Malformed(format!("{at}/content"));
    let content = merged.entry("content").or_insert_with(|| json!({}));
    let content = content.as_object_mut().ok_or_else(malformed)?;
    for (media_type, body) in members("content") {
        let Some(existing) = content.get_mut(media_type) else {
            content.insert(media_type.clone(), body.clone());
            continue;
        };
        let existing = existing.as_object_mut().ok_or_else(malformed)?;
        // Without a schema, every body is valid.
        if let Some(schema) = existing.get_mut("schema") {
            let alternatives = body["schema"].get("anyOf").and_then(Value::as_array);
            let alternatives = alternatives
                .cloned()
                .unwrap_or_else(|| vec![body["schema"].clone()]);
            alternatives
                .iter()
                .for_each(|other| merge_schema(schema, other));
        }
        // `example` and `examples` exclude each other.
        if !existing.contains_key("example") {
            let examples = existing.entry("examples").or_insert_with(|| json!({}));
            let examples = examples.as_object_mut().ok_or_else(malformed)?;
            for (name, example) in body["examples"].as_object().unwrap_or(&none) {
                examples
                    .entry(name.as_str())
                    .or_insert_with(|| example.clone());
            }
        }
    }
    Ok(merged)
}

/// Returns the settings that a client of the operation needs.
fn summary(policy: &Policy) -> Value {
    let value = serde_json::to_value(policy).expect("a policy has names and plain values");
    let members = [
        "key",
        "enforced_percent",
        "scope",
        "key_reuse",
        "concurrent_requests",
        "retention",
        "recorded_statuses",
        "replay_marker",
        "orphans",
    ];
    let mut summary: Map<_, _> = members
        .into_iter()
        .map(|name| (name.to_owned(), value[name].clone()))
        .collect();
    summary.insert("body".to_owned(), policy.fingerprint.body.into());
    Value::Object(summary)
}
