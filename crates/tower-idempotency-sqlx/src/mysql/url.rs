//! The parameters of a URL of MySQL.

use crate::url::parameter_names;

/// Returns `true` if the driver, sqlx 0.9, knows each parameter of the URL.
///
/// The driver ignores other parameters. With a wrong name of `ssl-mode`, for example, it would verify no certificate.
pub(super) fn has_only_known_parameters(url: &str) -> bool {
    parameter_names(url).all(|name| KNOWN.contains(&name))
}

const KNOWN: [&str; 14] = [
    "sslmode",
    "ssl-mode",
    "sslca",
    "ssl-ca",
    "sslcert",
    "ssl-cert",
    "sslkey",
    "ssl-key",
    "charset",
    "collation",
    "statement-cache-capacity",
    "socket",
    "timezone",
    "time-zone",
];

#[cfg(test)]
mod tests {
    use crate::MySqlStore;

    #[test]
    fn unknown_parameters_are_refused() {
        for (query, is_known) in [
            ("", true),
            ("?", true),
            ("?ssl-mode=VERIFY_IDENTITY&ssl-ca=/ca.pem", true),
            ("?sslmode=VERIFY_CA&&charset=utf8mb4&", true),
            ("?socket=/run/mysqld.sock&statement-cache-capacity=1", true),
            ("?timezone=%2B00:00", true),
            ("?sslMode=VERIFY_IDENTITY", false),
            ("?ssl_mode=VERIFY_IDENTITY", false),
            ("?ssl%2Dmode=VERIFY_IDENTITY", false),
            ("?ssl=true", false),
            ("?charset=utf8mb4&tls=hush", false),
            ("?hush", false),
        ] {
            let url = format!("mysql://app@host/app{query}");
            let refused = MySqlStore::from_url(&url).err();
            assert_eq!(refused.is_none(), is_known, "{url}");
            if let Some(error) = refused {
                let text = error.to_string();
                let expected = "expected only parameters of the driver";
                assert!(text.starts_with(expected), "{text}");
                assert!(!text.contains("hush"), "{text}");
            }
        }
    }

    #[test]
    fn ipv6_host_has_no_brackets() {
        for (url, host) in [
            ("mysql://app@[2001:db8::1]:3307/app", "2001:db8::1"),
            ("mysql://app@host/app", "host"),
        ] {
            let store = MySqlStore::from_url(url).unwrap();
            assert_eq!(store.inner.settings.options.get_host(), host, "{url}");
        }
    }
}
