//! Certificates for servers with TLS on this machine.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::tool;
use crate::playground::run;

/// An authority of its own, and a certificate that it has signed for `localhost` and `127.0.0.1`: files in PEM, good for
/// a day.
#[derive(Clone, Debug)]
pub struct Certificates {
    ca: PathBuf,
    certificate: PathBuf,
    key: PathBuf,
}

impl Certificates {
    /// Makes them in a directory.
    ///
    /// # Panics
    ///
    /// Panics if there is no `openssl`, or it fails.
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
        fs::write(at("names"), names).expect("the directory takes files");
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

    /// The certificate of the authority, to trust.
    #[must_use]
    pub fn ca(&self) -> &Path {
        &self.ca
    }

    /// The certificate of the server.
    #[must_use]
    pub fn certificate(&self) -> &Path {
        &self.certificate
    }

    /// Its private key.
    #[must_use]
    pub fn key(&self) -> &Path {
        &self.key
    }
}
