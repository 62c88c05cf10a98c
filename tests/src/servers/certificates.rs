//! Certificates for servers with TLS on this machine.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::tool;
use crate::playground::run;

/// A certificate authority, and a certificate that it has signed for `localhost` and `127.0.0.1`. The files are in PEM,
/// and valid for a day.
#[derive(Clone, Debug)]
pub struct Certificates {
    ca: PathBuf,
    certificate: PathBuf,
    key: PathBuf,
}

impl Certificates {
    /// Creates the certificates in a directory.
    ///
    /// # Panics
    ///
    /// Panics if `openssl` is not installed or fails.
    #[must_use]
    pub fn make(directory: &Path) -> Self {
        let _ = tool("openssl", "openssl", &[]);
        let at = |name: &str| directory.join(name);
        let made = Self {
            ca: at("ca.pem"),
            certificate: at("server.pem"),
            key: at("server.key"),
        };
        let names = "subjectAltName=DNS:localhost,IP:127.0.0.1";
        fs::write(at("names"), names).expect("a directory that can be written");
        let ca_key = at("ca.key");
        let request = at("server.csr");
        let file = |path: &Path| path.display().to_string();
        let new_key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
        for (what, files) in [
            (
                format!("req -x509 {new_key} -days 1 -subj /CN=authority"),
                [("-keyout", &ca_key), ("-out", &made.ca)].as_slice(),
            ),
            (
                format!("req {new_key} -subj /CN=localhost"),
                &[("-keyout", &made.key), ("-out", &request)],
            ),
            (
                "x509 -req -days 1 -set_serial 1".to_owned(),
                &[
                    ("-in", &request),
                    ("-CA", &made.ca),
                    ("-CAkey", &ca_key),
                    ("-extfile", &at("names")),
                    ("-out", &made.certificate),
                ],
            ),
        ] {
            let words = what.split(' ').map(str::to_owned);
            let files = files
                .iter()
                .flat_map(|(flag, path)| [(*flag).to_owned(), file(path)]);
            let made = run("openssl", words.chain(files));
            assert!(made.is_ok(), "{made:?}");
        }
        made
    }

    /// Returns the certificate of the authority, for clients.
    #[must_use]
    pub fn ca(&self) -> &Path {
        &self.ca
    }

    /// Returns the certificate of the server.
    #[must_use]
    pub fn certificate(&self) -> &Path {
        &self.certificate
    }

    /// Returns the private key of the server.
    #[must_use]
    pub fn key(&self) -> &Path {
        &self.key
    }
}
