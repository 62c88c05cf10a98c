//! Documents of OpenAPI with the policy of a layer.

use http::{HeaderName, Method};
use serde_json::{Value, json};
use tower_idempotency::{
    Enforcement, IdempotencyLayer, KeyScope, MemoryStore, MissingKey, Policy, Preset, Rollout, Ttl,
    policy::DescribeError,
};

fn policy() -> Policy {
    IdempotencyLayer::new(MemoryStore::new()).policy()
}

fn document(version: &str, paths: Value) -> Value {
    let info = json!({ "title": "t", "version": "1" });
    let mut document = json!({ "openapi": version, "info": info });
    document["paths"] = paths;
    document
}

fn described(policy: &Policy, mut document: Value) -> Value {
    policy
        .describe(&mut document, |_, _| true)
        .expect("describable");
    let once = document.clone();
    policy
        .describe(&mut document, |_, _| true)
        .expect("describable");
    assert_eq!(document, once, "twice is once");
    document
}

/// Follows references within the document.
fn resolve<'a>(document: &'a Value, value: &'a Value) -> &'a Value {
    match value["$ref"].as_str() {
        Some(reference) => resolve(
            document,
            document.pointer(&reference[1..]).expect("a target"),
        ),
        None => value,
    }
}

#[test]
fn operation_gets_parameter_responses_and_marker() {
    let paths = json!({ "/pay": {
        "post": { "responses": { "201": { "description": "Paid" }, "400": { "description": "Bad" } } },
        "get": { "responses": { "200": { "description": "All" } } },
    } });
    for version in ["3.0.3", "3.1.0"] {
        let document = described(&policy(), document(version, paths.clone()));
        let post = &document["paths"]["/pay"]["post"];
        let parameter = resolve(&document, &post["parameters"][0]);
        assert_eq!(parameter["name"], "idempotency-key");
        assert_eq!(
            (&parameter["in"], &parameter["required"]),
            (&json!("header"), &json!(false))
        );
        let statuses: Vec<_> = post["responses"]
            .as_object()
            .expect("an object")
            .keys()
            .collect();
        assert_eq!(
            statuses,
            ["201", "400", "408", "409", "413", "422", "429", "503"]
        );
        let conflict = resolve(&document, &post["responses"]["409"]);
        let examples = &conflict["content"]["application/problem+json"]["examples"];
        let codes: Vec<_> = examples.as_object().expect("an object").keys().collect();
        assert_eq!(
            codes,
            ["in-progress", "outcome-unknown", "response-not-retained"]
        );
        assert_eq!(examples["in-progress"]["value"]["retryable"], true);
        assert!(conflict["headers"]["retry-after"].is_object());
        let marker = &post["responses"]["201"]["headers"]["idempotent-replayed"]["schema"];
        let expected = match version {
            "3.0.3" => json!({ "type": "string", "enum": ["true"] }),
            _ => json!({ "type": "string", "const": "true" }),
        };
        assert_eq!(*marker, expected);
        assert_eq!(post["responses"]["400"]["description"], "Bad");
        assert_eq!(post["x-idempotency"]["retention"], 86_400);
        // A method that the layer does not cover is unchanged.
        assert_eq!(document["paths"]["/pay"]["get"], paths["/pay"]["get"]);
    }
}

#[test]
fn responses_of_service_are_not_overwritten() {
    let own = json!({ "type": "object", "required": ["field"] });
    let problem = "application/problem+json";
    let paths = json!({ "/pay": { "post": { "responses": {
        "422": { "description": "Invalid", "headers": { "Retry-After": { "schema": { "type": "integer" } } },
                 "content": { problem: { "schema": own, "example": {"field": "a"} }, "text/plain": {} } },
        "409": { "$ref": "#/components/responses/Taken" },
        "4XX": { "description": "Client error", "content": { problem: { "schema": own } } },
        "default": { "description": "Any error", "content": { "application/json": { "schema": own } } },
    } } } });
    let mut original = document("3.1.0", paths);
    original["components"]["responses"]["Taken"] =
        json!({ "description": "Taken", "content": { problem: { "schema": own } } });
    let document = described(&policy(), original.clone());
    let responses = &document["paths"]["/pay"]["post"]["responses"];
    let reference = json!({ "$ref": "#/components/schemas/IdempotencyProblem" });
    for (status, description) in [
        ("422", "Invalid"),
        ("409", "Taken"),
        ("400", "Client error"),
        ("413", "Client error"),
    ] {
        let response = &responses[status];
        assert_eq!(response["description"], description);
        assert_eq!(
            response["content"][problem]["schema"],
            json!({ "anyOf": [own, reference] }),
            "{status}"
        );
    }
    assert!(responses["422"]["content"]["text/plain"].is_object());
    assert_eq!(
        responses["422"]["content"][problem]["example"],
        json!({ "field": "a" })
    );
    assert_eq!(
        responses["422"]["headers"]
            .as_object()
            .map(serde_json::Map::len),
        Some(2)
    );
    // One of a single status hides `default`.
    assert_eq!(
        responses["503"]["content"]["application/json"]["schema"],
        own
    );
    assert_eq!(responses["503"]["content"][problem]["schema"], reference);
    for unchanged in ["4XX", "default"] {
        assert_eq!(
            responses[unchanged],
            original["paths"]["/pay"]["post"]["responses"][unchanged]
        );
    }
    assert_eq!(
        document["components"]["responses"]["Taken"],
        original["components"]["responses"]["Taken"]
    );
}

#[test]
fn existing_parameter_stays() {
    let parameter =
        json!({ "name": "Idempotency-Key", "in": "header", "required": true, "schema": {} });
    let response = json!({ "200": { "description": "ok" } });
    let paths = json!({
        "/own": { "post": { "parameters": [parameter], "responses": response } },
        "/path": { "parameters": [{ "$ref": "#/components/parameters/Key" }], "post": { "responses": response } },
        "/query": { "post": { "parameters": [{ "name": "idempotency-key", "in": "query" }], "responses": response } },
    });
    let mut original = document("3.0.0", paths);
    original["components"]["parameters"]["Key"] = parameter.clone();
    let document = described(&policy(), original);
    let parameters = |path: &str| document["paths"][path]["post"]["parameters"].clone();
    assert_eq!(parameters("/own"), json!([parameter]));
    assert_eq!(parameters("/path"), Value::Null);
    assert_eq!(parameters("/query").as_array().map(Vec::len), Some(2));
}

#[test]
fn referenced_path_item_is_copied() {
    let item =
        json!({ "post": { "responses": { "200": { "$ref": "#/components/responses/Ok" } } } });
    let mut original = document(
        "3.1.0",
        json!({
            "/a~b/{id}": { "$ref": "#/components/pathItems/Item", "summary": "A" },
            "/b": { "$ref": "#/paths/~1c" },
            "/c": item,
        }),
    );
    original["components"] = json!({
        "pathItems": { "Item": item },
        "responses": { "Ok": { "description": "ok" } },
    });
    let mut document = original.clone();
    policy()
        .describe(&mut document, |path, _| path != "/c")
        .expect("describable");
    for path in ["/a~b/{id}", "/b"] {
        let item = &document["paths"][path];
        assert_eq!(item["$ref"], Value::Null);
        assert!(item["post"]["responses"]["200"]["headers"]["idempotent-replayed"].is_object());
    }
    assert_eq!(document["paths"]["/a~b/{id}"]["summary"], "A");
    assert_eq!(document["paths"]["/c"], item);
    for section in ["pathItems", "responses"] {
        for (name, component) in original["components"][section]
            .as_object()
            .expect("an object")
        {
            assert_eq!(document["components"][section][name], *component);
        }
    }
}

#[test]
fn layers_of_one_service_have_own_components() {
    let response = json!({ "responses": { "200": { "description": "ok" } } });
    let mut document = document(
        "3.1.0",
        json!({ "/a": { "post": response }, "/b": { "post": response } }),
    );
    let required = IdempotencyLayer::new(MemoryStore::new())
        .with_missing_key(MissingKey::Reject)
        .policy();
    for _ in 0..2 {
        policy()
            .describe(&mut document, |path, _| path == "/a")
            .expect("describable");
        required
            .describe(&mut document, |path, _| path == "/b")
            .expect("describable");
    }
    let required = |path: &str| {
        resolve(&document, &document["paths"][path]["post"]["parameters"][0])["required"].clone()
    };
    assert_eq!(
        (required("/a"), required("/b")),
        (json!(false), json!(true))
    );
    let names = |section: &str| {
        document["components"][section]
            .as_object()
            .expect("an object")
            .len()
    };
    assert_eq!((names("parameters"), names("schemas")), (2, 1));
}

#[test]
fn parameter_contradicts_no_setting() {
    let parameter = |layer: IdempotencyLayer| {
        let operation = json!({ "post": { "responses": { "200": { "description": "ok" } } } });
        let mut document = document("3.1.0", json!({ "/a": operation }));
        let described = layer.policy().describe(&mut document, |_, _| true);
        described.expect("describable");
        resolve(&document, &document["paths"]["/a"]["post"]["parameters"][0]).clone()
    };
    let layer = || IdempotencyLayer::new(MemoryStore::new()).with_missing_key(MissingKey::Reject);
    assert_eq!(parameter(layer())["required"], true);
    assert!(parameter(layer())["example"].is_string());
    // A UUID is too long, or may not pass the check.
    for layer in [
        layer().with_key_length(1..=32),
        layer().with_key_check(|_| false),
    ] {
        assert_eq!(parameter(layer)["example"], Value::Null);
    }
    let alias = http::HeaderName::from_static("x-request-key");
    let aliased = parameter(layer().with_header_alias(alias));
    assert_eq!(aliased["required"], false);
    let description = aliased["description"].as_str().expect("text");
    assert!(description.contains("x-request-key"), "{description}");
}

/// A client that relies on replays must know that it gets none.
#[test]
fn share_that_is_enforced_is_described() {
    let paths = json!({ "/a": { "post": { "responses": { "200": { "description": "ok" } } } } });
    let share = Rollout::new(5, Enforcement::Enforce, Enforcement::Observe).expect("a share");
    for (rollout, percent) in [
        (share, 5),
        (Enforcement::Observe.into(), 0),
        (Enforcement::Off.into(), 0),
        (Enforcement::Enforce.into(), 100),
    ] {
        let layer = IdempotencyLayer::new(MemoryStore::new()).with_enforcement(rollout);
        let document = described(&layer.policy(), document("3.1.0", paths.clone()));
        let post = &document["paths"]["/a"]["post"];
        assert_eq!(post["x-idempotency"]["enforced_percent"], percent);
        let parameter = resolve(&document, &post["parameters"][0]);
        let description = parameter["description"].as_str().expect("text");
        let expected = format!("this holds for {percent} % of the callers");
        let is_limited = percent < 100;
        assert_eq!(description.contains(&expected), is_limited, "{description}");
    }
}

#[test]
fn described_retention_is_that_of_policy() {
    let paths = json!({ "/a": { "post": { "responses": { "200": { "description": "ok" } } } } });
    for (millis, seconds) in [(500, "0.5"), (1_500, "1.5"), (86_400_000, "86400")] {
        let layer = IdempotencyLayer::new(MemoryStore::new());
        let policy = layer.with_retention(Ttl::from_millis(millis)).policy();
        let document = described(&policy, document("3.1.0", paths.clone()));
        let post = &document["paths"]["/a"]["post"];
        let parameter = resolve(&document, &post["parameters"][0]);
        let description = parameter["description"].as_str().expect("text");
        let expected = format!(", for {seconds} seconds.");
        assert!(description.contains(&expected), "{description}");
        assert_eq!(post["x-idempotency"]["retention"].to_string(), seconds);
    }
}

#[test]
fn operations_are_chosen_by_path_and_method() {
    let response = json!({ "responses": { "200": { "description": "ok" } } });
    let paths = json!({ "/a": { "post": response, "put": response }, "/b": { "post": response }, "x-own": 1 });
    let mut document = document("3.1.0", paths);
    let chosen = |path: &str, method: &Method| path == "/a" && *method == Method::PUT;
    policy()
        .describe(&mut document, chosen)
        .expect("describable");
    let is_described =
        |path: &str, method: &str| !document["paths"][path][method]["x-idempotency"].is_null();
    assert!(
        is_described("/a", "put") && !is_described("/a", "post") && !is_described("/b", "post")
    );
    let unchosen = document.clone();
    policy()
        .describe(&mut document, |_, _| false)
        .expect("describable");
    assert_eq!(document, unchosen);
}

#[test]
fn key_of_service_needs_no_parameter() {
    let layer =
        IdempotencyLayer::new(MemoryStore::new()).with_key_from(KeyScope::EachCaller, |_| None);
    let paths = json!({ "/a": { "post": { "responses": { "200": { "description": "ok" } } } } });
    let document = described(&layer.policy(), document("3.1.0", paths));
    assert_eq!(document["paths"]["/a"]["post"]["parameters"], Value::Null);
}

#[test]
fn preset_describes_its_own_errors() {
    let layer = IdempotencyLayer::with_preset(MemoryStore::new(), Preset::Acp)
        .with_header(HeaderName::from_static("x-key"));
    let paths = json!({ "/a": { "post": { "responses": { "201": { "description": "ok" } } } } });
    let document = described(&layer.policy(), document("3.1.0", paths));
    let post = &document["paths"]["/a"]["post"];
    let parameter = resolve(&document, &post["parameters"][0]);
    assert_eq!(
        (&parameter["name"], &parameter["schema"]["maxLength"]),
        (&json!("x-key"), &json!(255))
    );
    assert!(post["responses"]["201"]["headers"]["x-key"].is_object());
    let example = &resolve(&document, &post["responses"]["409"])["content"]["application/json"]["examples"]
        ["in-progress"];
    assert_eq!(example["value"]["code"], "idempotency_in_flight");
}

#[test]
fn undescribable_documents_stay_unchanged() {
    let external = json!({ "$ref": "https://example.com/responses.json#/Taken" });
    let circle = json!({ "$ref": "#/components/responses/Circle" });
    let with = |responses: Value| {
        document(
            "3.1.0",
            json!({ "/a": { "post": { "responses": responses } } }),
        )
    };
    let mut in_circle = with(json!({ "409": circle }));
    in_circle["components"]["responses"]["Circle"] = circle;
    let cases = [
        (json!({}), "expected an OpenAPI document"),
        (json!([]), "expected an OpenAPI document"),
        (json!({ "swagger": "2.0" }), "expected an OpenAPI document"),
        (
            json!({ "openapi": "4.0.0" }),
            "expected OpenAPI 3.0 or 3.1, found 4.0.0",
        ),
        (document("3.1.0", json!([])), "malformed at /paths"),
        (
            document("3.1.0", json!({ "/a": 1 })),
            "malformed at /paths/~1a",
        ),
        (
            document("3.1.0", json!({ "/a": { "post": [] } })),
            "malformed at /paths/~1a/post",
        ),
        (
            document("3.1.0", json!({ "/a": { "$ref": "other.json" } })),
            "the reference other.json",
        ),
        (with(json!([])), "malformed at /paths/~1a/post/responses"),
        (
            with(json!({ "409": external })),
            "the reference https://example.com",
        ),
        (
            with(json!({ "409": { "$ref": "#/components/responses/None" } })),
            "the reference #/components",
        ),
        (
            with(json!({ "409": { "description": "", "content": 1 } })),
            "malformed at",
        ),
        (in_circle, "back to itself"),
    ];
    for (original, expected) in cases {
        let mut document = original.clone();
        let error: DescribeError = policy()
            .describe(&mut document, |_, _| true)
            .expect_err(expected);
        assert!(error.to_string().contains(expected), "{error}");
        assert_eq!(document, original);
    }
    // A reference that needs no addition does not change.
    described(&policy(), with(json!({ "302": { "$ref": "other.json" } })));
}
