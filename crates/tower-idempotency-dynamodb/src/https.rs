//! HTTPS client for the SDK.

use aws_sdk_dynamodb::config::SharedHttpClient;
use aws_smithy_http_client::{Builder, tls};

/// Returns an HTTPS client that uses rustls, *ring* and the system's certificates. It also connects to `http://` endpoints.
///
/// Pass it to `http_client` of an SDK configuration. Without its default features the SDK has no HTTPS client; with them it
/// builds a second cryptography library.
#[must_use]
pub fn https_client() -> SharedHttpClient {
    let ring = tls::Provider::Rustls(tls::rustls_provider::CryptoMode::Ring);
    Builder::new().tls_provider(ring).build_https()
}
