//! Policies in the OpenAPI documents that utoipa and aide generate.

use aide::axum::{ApiRouter, routing::post};
use http::StatusCode;
use serde_json::Value;
use tower_idempotency::{IdempotencyLayer, MemoryStore};
use utoipa::OpenApi as _;

#[utoipa::path(post, path = "/payments", responses((status = 201, description = "Paid")))]
async fn pay() -> StatusCode {
    StatusCode::CREATED
}

#[utoipa::path(post, path = "/drafts", responses((status = 201, description = "Saved")))]
async fn save_draft() -> StatusCode {
    StatusCode::CREATED
}

/// Adds the policy of a layer to a generated document.
fn assert_is_describable(mut document: Value) {
    let policy = IdempotencyLayer::new(MemoryStore::new()).policy();
    policy
        .describe(&mut document, |path, _method| path == "/payments")
        .expect("a document that can be described");
    let operation = |path: &str| document["paths"][path]["post"].clone();
    let payment = operation("/payments");
    assert!(payment["responses"]["201"].is_object(), "{payment}");
    assert_eq!(
        payment["responses"]["409"]["$ref"], "#/components/responses/Idempotency409",
        "{payment}"
    );
    let components = &document["components"];
    let conflict = &components["responses"]["Idempotency409"]["content"];
    assert!(
        conflict["application/problem+json"].is_object(),
        "{conflict}"
    );
    let parameters = payment["parameters"].as_array().expect("parameters");
    let name = |parameter: &Value| match parameter["$ref"].as_str() {
        Some(path) => document.pointer(&path[1..]).expect("a component")["name"].clone(),
        None => parameter["name"].clone(),
    };
    let is_key = |name: Value| {
        name.as_str()
            .is_some_and(|name| name.eq_ignore_ascii_case("idempotency-key"))
    };
    assert!(parameters.iter().map(name).any(is_key), "{payment}");
    assert!(operation("/drafts")["responses"]["409"].is_null());
}

#[test]
fn utoipa_document_gets_policy() {
    #[derive(utoipa::OpenApi)]
    #[openapi(paths(pay, save_draft))]
    struct Api;

    assert_is_describable(serde_json::to_value(Api::openapi()).expect("JSON"));
}

#[test]
fn aide_document_gets_policy() {
    let mut api = aide::openapi::OpenApi::default();
    let routes = ApiRouter::<()>::new()
        .api_route("/payments", post(pay))
        .api_route("/drafts", post(save_draft));
    drop(routes.finish_api(&mut api));
    // The generator does not know the statuses of a handler that returns a `StatusCode`.
    let mut generated = serde_json::to_value(&api).expect("JSON");
    for path in ["/payments", "/drafts"] {
        generated["paths"][path]["post"]["responses"]["201"]["description"] = "Done".into();
    }
    assert_is_describable(generated);
}
