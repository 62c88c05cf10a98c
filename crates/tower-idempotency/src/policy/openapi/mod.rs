//! The policy in an OpenAPI document.

mod components;
mod operation;
mod reference;

use std::fmt;

use http::Method;
use serde_json::{Map, Value};

use self::{components::Components, operation::describe_operation, reference::resolve};
use super::Policy;

/// The reason why a document cannot be described. The document is unchanged.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DescribeError {
    /// The document is not of OpenAPI 3.0 or 3.1. Contains the version that was found, or nothing.
    Version(String),
    /// A value has another type than OpenAPI demands. Contains the JSON pointer to it.
    Malformed(String),
    /// A reference leads out of the document, to nothing or in a circle. Contains the reference. Bundle the document first.
    Reference(String),
}

/// The version of the document. The two write some schemas differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Version {
    V3_0,
    V3_1,
}

/// The operations of a path item.
const METHODS: [(&str, Method); 8] = [
    ("delete", Method::DELETE),
    ("get", Method::GET),
    ("head", Method::HEAD),
    ("options", Method::OPTIONS),
    ("patch", Method::PATCH),
    ("post", Method::POST),
    ("put", Method::PUT),
    ("trace", Method::TRACE),
];

impl Policy {
    /// Adds this policy to the operations of an OpenAPI document (3.0 or 3.1) for which `is_covered` returns `true`.
    /// Operations whose method the policy does not cover are left out.
    ///
    /// `is_covered` gets the path as the document has it, such as `/payments/{id}`. If parts of the service have layers with
    /// other settings, call this once for the policy of each layer.
    ///
    /// Each operation gets:
    ///
    /// - a parameter for the header of the key, unless it has one of this name;
    /// - a response for each status of the layer's errors, with an example for each code;
    /// - the marker of replays, and the repeated key, in the headers of its 2xx responses;
    /// - `x-idempotency`, the settings that a client needs.
    ///
    /// A response that the document has is not overwritten: its body becomes `anyOf` the old schema and that of the layer.
    /// A response for `4XX`, `5XX` or `default` is copied in the same way, because a response for a single status hides it.
    /// References are followed within the document, and their targets stay as they are. A second call changes nothing.
    ///
    /// The document states the [`enforced_percent`](Self::enforced_percent) of this policy. After a switch of the
    /// [`Enforcement`](crate::Enforcement), derive the policy again and describe the original document: the parameter of a
    /// described one stays.
    ///
    /// ```
    /// use serde_json::json;
    /// use tower_idempotency::{IdempotencyLayer, MemoryStore};
    ///
    /// let mut document = json!({
    ///     "openapi": "3.1.0",
    ///     "info": { "title": "Payments", "version": "1" },
    ///     "paths": { "/payments": { "post": { "responses": { "201": { "description": "Paid" } } } } },
    /// });
    /// let policy = IdempotencyLayer::new(MemoryStore::new()).policy();
    /// policy.describe(&mut document, |path, _| path.starts_with("/payments"))?;
    ///
    /// let post = &document["paths"]["/payments"]["post"];
    /// assert_eq!(post["parameters"][0]["$ref"], "#/components/parameters/IdempotencyKey");
    /// assert_eq!(post["responses"]["422"]["$ref"], "#/components/responses/Idempotency422");
    /// assert!(post["responses"]["201"]["headers"]["idempotent-replayed"].is_object());
    /// # Ok::<(), tower_idempotency::policy::DescribeError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`DescribeError`] if the document is of another version. Also if the document is malformed, or has a reference that
    /// cannot be followed, where the policy has to be added. The document is then unchanged.
    pub fn describe(
        &self,
        document: &mut Value,
        is_covered: impl Fn(&str, &Method) -> bool,
    ) -> Result<(), DescribeError> {
        let version = version(document)?;
        let mut described = document.clone();
        let mut components = Components::new(version);
        let paths = match described.get("paths") {
            Some(paths) => object(paths, "/paths")?.clone(),
            None => Map::new(),
        };
        for (path, item) in &paths {
            if !path.starts_with('/') {
                continue;
            }
            let covered = |method: &Method| self.covers(method) && is_covered(path, method);
            if let Some(item) =
                self.describe_path(document, path, item, &mut components, covered)?
            {
                described["paths"][path] = item;
            }
        }
        components.add_to(&mut described)?;
        *document = described;
        Ok(())
    }

    /// Returns the path item with its covered operations described, or `None` if none is covered.
    fn describe_path(
        &self,
        document: &Value,
        path: &str,
        item: &Value,
        components: &mut Components,
        is_covered: impl Fn(&Method) -> bool,
    ) -> Result<Option<Value>, DescribeError> {
        let at = format!("/paths/{}", path.replace('~', "~0").replace('/', "~1"));
        let own = object(item, &at)?;
        // Other paths may have a reference to the same item.
        let mut item = match own.get("$ref") {
            Some(_) if METHODS.iter().any(|(_, method)| is_covered(method)) => {
                let mut target = object(resolve(document, item)?, &at)?.clone();
                let siblings = own.iter().filter(|(name, _)| *name != "$ref");
                target.extend(siblings.map(|(name, value)| (name.clone(), value.clone())));
                target
            }
            _ => own.clone(),
        };
        let shared = item.get("parameters").cloned();
        let mut is_changed = false;
        for (name, method) in METHODS {
            let Some(operation) = item.get_mut(name).filter(|_| is_covered(&method)) else {
                continue;
            };
            let at = format!("{at}/{name}");
            let operation = operation.as_object_mut();
            let operation = operation.ok_or_else(|| DescribeError::Malformed(at.clone()))?;
            describe_operation(self, document, components, shared.as_ref(), operation, &at)?;
            is_changed = true;
        }
        Ok(is_changed.then_some(Value::Object(item)))
    }
}

fn version(document: &Value) -> Result<Version, DescribeError> {
    let version = document
        .get("openapi")
        .and_then(Value::as_str)
        .unwrap_or_default();
    let minor = version.split('.').take(2).collect::<Vec<_>>().join(".");
    match &*minor {
        "3.0" => Ok(Version::V3_0),
        "3.1" => Ok(Version::V3_1),
        _ => Err(DescribeError::Version(version.to_owned())),
    }
}

/// Returns the value as an object.
fn object<'a>(value: &'a Value, at: &str) -> Result<&'a Map<String, Value>, DescribeError> {
    value
        .as_object()
        .ok_or_else(|| DescribeError::Malformed(at.to_owned()))
}

impl fmt::Display for DescribeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version(found) if found.is_empty() => {
                write!(f, "expected an OpenAPI document with `openapi`, found none")
            }
            Self::Version(found) => write!(f, "expected OpenAPI 3.0 or 3.1, found {found}"),
            Self::Malformed(at) => write!(f, "the document is malformed at {at}"),
            Self::Reference(reference) => {
                write!(
                    f,
                    "the reference {reference} leads to nothing in this document"
                )
            }
        }
    }
}

impl std::error::Error for DescribeError {}
