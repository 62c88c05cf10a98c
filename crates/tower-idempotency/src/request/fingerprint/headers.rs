//! Request headers that are part of each fingerprint by default.

use std::sync::LazyLock;

use http::HeaderName;

/// Request headers that name the account, tenant or user on whose behalf a shared token acts. Part of every fingerprint
/// unless [`FingerprintBy::with_headers`](crate::FingerprintBy::with_headers) replaces the list.
///
/// The list has generic headers and those of public APIs: Stripe, OpenAI, Xero, PayPal, Box, Dropbox, SendGrid, Google,
/// Grafana, GitLab, Kubernetes and others.
pub const ACTING_HEADERS: [HeaderName; 32] = [
    HeaderName::from_static("as-user"),
    HeaderName::from_static("callerobjectid"),
    HeaderName::from_static("dropbox-api-select-admin"),
    HeaderName::from_static("dropbox-api-select-user"),
    HeaderName::from_static("impersonate-user"),
    HeaderName::from_static("login-customer-id"),
    HeaderName::from_static("mscrmcallerid"),
    HeaderName::from_static("on-behalf-of"),
    HeaderName::from_static("openai-organization"),
    HeaderName::from_static("openai-project"),
    HeaderName::from_static("paypal-auth-assertion"),
    HeaderName::from_static("stripe-account"),
    HeaderName::from_static("stripe-context"),
    HeaderName::from_static("sudo"),
    HeaderName::from_static("tenant-id"),
    HeaderName::from_static("x-account-id"),
    HeaderName::from_static("x-customer-id"),
    HeaderName::from_static("x-goog-user-project"),
    HeaderName::from_static("x-grafana-org-id"),
    HeaderName::from_static("x-impersonate-user"),
    HeaderName::from_static("x-merchant-id"),
    HeaderName::from_static("x-on-behalf-of"),
    HeaderName::from_static("x-org-id"),
    HeaderName::from_static("x-organization"),
    HeaderName::from_static("x-organization-id"),
    HeaderName::from_static("x-project-id"),
    HeaderName::from_static("x-scope-orgid"),
    HeaderName::from_static("x-tenant"),
    HeaderName::from_static("x-tenant-id"),
    HeaderName::from_static("x-workspace-id"),
    HeaderName::from_static("xero-tenant-id"),
    HeaderName::from_static("zuora-entity-ids"),
];

/// Request headers that select the part of a resource, the source or target of a copy or an upload, or the method. Without
/// them, two parts with equal bytes would be one request under [`MissingKey::Derive`](crate::MissingKey::Derive).
///
/// The list has headers of HTTP, WebDAV, tus and AtomPub, and of S3, Azure, Google Cloud Storage and Dropbox.
const SELECTING_HEADERS: [HeaderName; 14] = [
    HeaderName::from_static("content-range"),
    HeaderName::from_static("destination"),
    HeaderName::from_static("dropbox-api-arg"),
    HeaderName::from_static("slug"),
    HeaderName::from_static("upload-concat"),
    HeaderName::from_static("upload-length"),
    HeaderName::from_static("upload-metadata"),
    HeaderName::from_static("upload-offset"),
    HeaderName::from_static("x-amz-copy-source"),
    HeaderName::from_static("x-goog-copy-source"),
    HeaderName::from_static("x-http-method"),
    HeaderName::from_static("x-http-method-override"),
    HeaderName::from_static("x-method-override"),
    HeaderName::from_static("x-ms-copy-source"),
];

pub(super) static DEFAULT_HEADERS: LazyLock<Vec<HeaderName>> = LazyLock::new(|| {
    let headers = ACTING_HEADERS.into_iter().chain(SELECTING_HEADERS);
    headers.collect()
});
