//! TLS of the listener, and to upstreams.

use std::sync::Arc;

use rustls::{ClientConfig, RootCertStore, ServerConfig, crypto::ring};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};

use crate::config::{ConfigError, Tls};

/// Reads the certificate and the key of the listener. HTTP/2 and HTTP/1.1 are offered to clients.
pub(crate) fn server_config(tls: &Tls) -> Result<Arc<ServerConfig>, ConfigError> {
    let (chain_file, key_file) = (tls.certificate.get_ref(), tls.key.get_ref());
    let chain = certificates("certificate", chain_file)?;
    let key = PrivateKeyDer::from_pem_file(key_file)
        .map_err(|error| unreadable("key", key_file, &error))?;
    let builder = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| unreadable("certificate", chain_file, &error))?;
    let mut config = builder
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(|error| unreadable("certificate", chain_file, &error))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// Creates the settings of connections to an upstream. Its certificate must be signed by a CA of `ca_file` or of the
/// system.
pub(crate) fn client_config(ca_file: Option<&String>) -> Result<ClientConfig, ConfigError> {
    let mut roots = RootCertStore::empty();
    match ca_file {
        Some(file) => {
            for certificate in certificates("ca_file", file)? {
                let added = roots.add(certificate);
                added.map_err(|error| unreadable("ca_file", file, &error))?;
            }
        }
        None => {
            let _ = roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| ConfigError::without_line(format!("TLS is not available: {error}")))?;
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}

fn certificates(setting: &str, file: &str) -> Result<Vec<CertificateDer<'static>>, ConfigError> {
    let read = CertificateDer::pem_file_iter(file).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let certificates = read.map_err(|error| unreadable(setting, file, &error))?;
    if certificates.is_empty() {
        return Err(unreadable(setting, file, &"it contains no certificate"));
    }
    Ok(certificates)
}

fn unreadable(setting: &str, file: &str, error: &dyn std::fmt::Display) -> ConfigError {
    ConfigError::without_line(format!("cannot use {setting} {file}: {error}"))
}
