//! The components that the described operations share: the header parameter, the problem bodies and the error responses.

use serde_json::{Map, Value, json};

use super::{DescribeError, Version};
use crate::policy::{ErrorPolicy, Policy};

/// Components that are added to a document, by section and preferred name.
pub(super) struct Components {
    version: Version,
    added: Vec<(&'static str, String, Value)>,
}

impl Components {
    pub(super) fn new(version: Version) -> Self {
        Self {
            version,
            added: Vec::new(),
        }
    }

    /// Returns a reference to the component, which is added unless the document has it.
    pub(super) fn refer(
        &mut self,
        document: &Value,
        section: &'static str,
        name: &str,
        component: Value,
    ) -> Value {
        let (name, is_there) = self.name(document, section, name, &component);
        let reference = reference(section, &name);
        if !is_there {
            self.added.push((section, name, component));
        }
        reference
    }

    /// Returns `true` if the value is a reference to the component.
    pub(super) fn is_reference(
        &self,
        document: &Value,
        section: &'static str,
        name: &str,
        component: &Value,
        value: &Value,
    ) -> bool {
        let (name, is_there) = self.name(document, section, name, component);
        is_there && *value == reference(section, &name)
    }

    /// Returns the name of the component, and `true` if there is one of this content. A component of the same name with
    /// another content gets a number.
    fn name(
        &self,
        document: &Value,
        section: &'static str,
        name: &str,
        component: &Value,
    ) -> (String, bool) {
        for number in 1_u32.. {
            let name = match number {
                1 => name.to_owned(),
                number => format!("{name}_{number}"),
            };
            let existing = document
                .get("components")
                .and_then(|all| all.get(section)?.get(&name));
            let mut added = self.added.iter();
            let added = added.find(|(of, added, _)| *of == section && *added == name);
            match existing.or(added.map(|(_, _, component)| component)) {
                Some(found) if found == component => return (name, true),
                Some(_) => {}
                None => return (name, false),
            }
        }
        unreachable!("some number is free")
    }

    /// Adds the components to the document.
    pub(super) fn add_to(self, document: &mut Value) -> Result<(), DescribeError> {
        for (section, name, component) in self.added {
            let malformed = || DescribeError::Malformed(format!("/components/{section}"));
            let root = document.as_object_mut().ok_or_else(malformed)?;
            let components = root.entry("components").or_insert_with(|| json!({}));
            let components = components.as_object_mut().ok_or_else(malformed)?;
            let section = components.entry(section).or_insert_with(|| json!({}));
            section
                .as_object_mut()
                .ok_or_else(malformed)?
                .insert(name, component);
        }
        Ok(())
    }

    /// Returns a schema with one value.
    fn constant(&self, value: &str) -> Value {
        match self.version {
            Version::V3_0 => json!({ "type": "string", "enum": [value] }),
            Version::V3_1 => json!({ "type": "string", "const": value }),
        }
    }

    /// Returns the parameter of the key, or `None` if the service makes the key.
    pub(super) fn parameter(&mut self, policy: &Policy, document: &Value) -> Option<Value> {
        let key = &policy.key;
        let mut schema = json!({ "type": "string" });
        // The lengths are those of the decoded key. Quotes and escapes make the header longer.
        if key.syntax == Some("verbatim") {
            schema["minLength"] = key.min_bytes.into();
            if let Some(max) = key.max_bytes {
                schema["maxLength"] = max.into();
            }
        }
        const EXAMPLE: &str = "8e03978e-40d5-43e8-bc93-6894a57f9324";
        let is_valid = !key.has_check
            && key.min_bytes <= EXAMPLE.len()
            && key.max_bytes.is_none_or(|max| EXAMPLE.len() <= max);
        let length = match key.max_bytes {
            Some(max) => format!("{} to {max} bytes", key.min_bytes),
            None => format!("at least {} bytes", key.min_bytes),
        };
        let retention = policy.retention.as_secs_f64();
        let mut description = format!(
            "Names this operation. A retry with the same key gets the response of the first request, for {retention} seconds. Use a new random key, such as a UUID, for each operation; {length}."
        );
        if let Some(alias) = &key.alias {
            description.push_str(" If this header is absent, the header ");
            description.push_str(alias);
            description.push_str(" is read.");
        }
        if policy.enforced_percent < 100 {
            let percent = policy.enforced_percent.to_string();
            description.push_str(" At the time of this document, this holds for ");
            description.push_str(&percent);
            description.push_str(" % of the callers; for all others, each request executes.");
        }
        let mut component = json!({
            "name": key.header.as_ref()?,
            "in": "header",
            // With the other header alone, a request has a key too.
            "required": key.is_required && key.alias.is_none(),
            "description": description,
            "schema": schema,
        });
        if is_valid {
            component["example"] = match key.syntax {
                Some("strict") => format!("\"{EXAMPLE}\"").into(),
                _ => EXAMPLE.into(),
            };
        }
        Some(self.refer(document, "parameters", "IdempotencyKey", component))
    }

    /// Returns the headers of a successful response, with lower-case names.
    pub(super) fn response_headers(&self, policy: &Policy) -> Map<String, Value> {
        let mut headers = Map::new();
        if let Some(marker) = &policy.replay_marker {
            let header = json!({
                "description": "Present if this is the recorded response of an earlier request with the same key.",
                "schema": self.constant(&marker.value),
            });
            headers.insert(marker.name.clone(), header);
        }
        headers.extend(repeated_key(policy));
        headers
    }

    /// Returns the response for the errors of one status: a description, headers, and a body for each media type.
    pub(super) fn error_response(
        &mut self,
        policy: &Policy,
        document: &Value,
        errors: &[&ErrorPolicy],
    ) -> Value {
        let mut titles: Vec<&str> = errors.iter().map(|error| error.title).collect();
        titles.dedup();
        let mut response = json!({ "description": titles.join("; ") });
        for error in errors {
            let media_type = match error.media_type.split(';').next() {
                Some("") | None => continue,
                Some(_) => &error.media_type,
            };
            let example = serde_json::from_str(&error.body);
            let example: Value = example.unwrap_or_else(|_| error.body.clone().into());
            let schema = if error.is_problem {
                self.problem_schema(document)
            } else {
                inferred(&example)
            };
            let content = &mut response["content"][media_type];
            merge_schema(&mut content["schema"], &schema);
            content["examples"][error.code] = json!({ "summary": error.title, "value": example });
        }
        let mut header = |name: &str, description: &str, schema: Value| {
            response["headers"][name] = json!({ "description": description, "schema": schema });
        };
        if errors.iter().any(|error| error.has_retry_after) {
            header(
                "retry-after",
                "Seconds to wait before a retry.",
                json!({ "type": "integer", "minimum": 0 }),
            );
        }
        if errors.iter().any(|error| error.has_link) {
            header(
                "link",
                "The documentation, as `describedby`.",
                json!({ "type": "string" }),
            );
        }
        if let Some((name, header)) = repeated_key(policy) {
            response["headers"][name] = header;
        }
        response
    }

    fn problem_schema(&mut self, document: &Value) -> Value {
        let text = || json!({ "type": "string" });
        let schema = json!({
            "type": "object",
            "description": "Problem details (RFC 9457).",
            "required": ["type", "title", "status", "detail", "code", "retryable"],
            "properties": {
                "type": { "type": "string", "format": "uri" },
                "title": text(),
                "status": { "type": "integer" },
                "detail": text(),
                "code": { "type": "string", "description": "The kind of the error, which stays the same between versions." },
                "retryable": { "type": "boolean", "description": "The same request with the same key can succeed later." },
                "entry": { "type": "string", "description": "Name the entry to the operator of the service." },
                "reason": { "type": "string", "description": "The code of the failure that an operator has to resolve." },
            },
        });
        self.refer(document, "schemas", "IdempotencyProblem", schema)
    }
}

/// Returns the header that repeats the key, if responses have it. An error about the key itself lacks it.
fn repeated_key(policy: &Policy) -> Option<(String, Value)> {
    let name = policy.key.header.as_ref()?;
    let header = json!({
        "description": "The key of the request.",
        "schema": { "type": "string" },
    });
    policy.key.is_repeated.then(|| (name.clone(), header))
}

fn reference(section: &str, name: &str) -> Value {
    json!({ "$ref": format!("#/components/{section}/{name}") })
}

/// Adds an alternative to a schema, unless it is there.
pub(super) fn merge_schema(schema: &mut Value, other: &Value) {
    if schema.is_null() {
        *schema = other.clone();
        return;
    }
    if schema == other {
        return;
    }
    // Not `oneOf`: a body may match both, such as an open schema of the service.
    let is_own = schema.as_object().is_some_and(|schema| schema.len() == 1);
    match schema.get_mut("anyOf").and_then(Value::as_array_mut) {
        Some(alternatives) if is_own => {
            if !alternatives.contains(other) {
                alternatives.push(other.clone());
            }
        }
        _ => *schema = json!({ "anyOf": [schema.clone(), other] }),
    }
}

/// Returns the schema of an example, whose members are optional: other errors may lack some of them.
fn inferred(example: &Value) -> Value {
    match example {
        Value::Object(members) => {
            let members = members.iter();
            let properties: Map<_, _> = members
                .map(|(name, value)| (name.clone(), inferred(value)))
                .collect();
            json!({ "type": "object", "properties": properties })
        }
        Value::Array(_) => json!({ "type": "array", "items": {} }),
        Value::String(_) => json!({ "type": "string" }),
        Value::Bool(_) => json!({ "type": "boolean" }),
        Value::Number(_) => json!({ "type": "number" }),
        Value::Null => json!({}),
    }
}
