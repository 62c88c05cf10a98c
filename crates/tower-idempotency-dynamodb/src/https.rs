//! A way to reach the service.

use aws_sdk_dynamodb::config::SharedHttpClient;
use aws_smithy_http_client::{Builder, tls};

/// HTTPS by rustls and *ring*, with the certificates of the system; plain HTTP for endpoints that say so.
///
/// For the `http_client` of an SDK configuration: the SDK has none of its own without its default features, and with them
/// it builds another cryptography.
#[must_use]
pub fn https_client() -> SharedHttpClient {
    let ring = tls::Provider::Rustls(tls::rustls_provider::CryptoMode::Ring);
    Builder::new().tls_provider(ring).build_https()
}
