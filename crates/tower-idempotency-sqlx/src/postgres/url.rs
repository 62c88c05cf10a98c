//! The parameters of a URL of PostgreSQL.

use crate::url::parameter_names;

/// Returns `true` if the driver knows each parameter of the URL.
///
/// The driver ignores other parameters, and logs their names and values. A value may be a secret, for example that of
/// `sslpassword`.
pub(super) fn has_only_known_parameters(url: &str) -> bool {
    parameter_names(url).all(is_known)
}

/// Returns `true` for a parameter of the driver, sqlx 0.9. Any other name with an escape counts as unknown, because only the
/// brackets of `options[..]` need escapes.
fn is_known(name: &str) -> bool {
    let prefixes = ["options[", "options%5B", "options%5b"];
    KNOWN.contains(&name) || prefixes.iter().any(|prefix| name.starts_with(prefix))
}

/// The parameters of the driver, except for settings of the server such as `options[search_path]`.
const KNOWN: [&str; 18] = [
    "sslmode",
    "ssl-mode",
    "sslrootcert",
    "ssl-root-cert",
    "ssl-ca",
    "sslcert",
    "ssl-cert",
    "sslkey",
    "ssl-key",
    "statement-cache-capacity",
    "host",
    "hostaddr",
    "port",
    "dbname",
    "user",
    "password",
    "application_name",
    "options",
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PostgresStore;

    #[test]
    fn unknown_parameters_are_detected() {
        for (query, expected) in [
            ("", true),
            ("?", true),
            ("?sslmode=require", true),
            ("?&sslmode=require&&port=1&", true),
            ("?host=/run/postgresql&password=a=b?c", true),
            ("?options[search_path]=a&options%5Bsearch_path%5D=a", true),
            ("?sslmode=require#sslpassword=hush", true),
            ("?sslpassword=hush", false),
            ("?sslmode=require&sslpassword=hush", false),
            ("?hush", false),
            ("?=hush", false),
            ("?SSLMODE=require", false),
            ("?ssl_mode=require", false),
            ("?ssl%70assword=hush", false),
            ("?sslmode+=hush", false),
            ("?ssl\nmode=hush", false),
            ("?a;sslmode=hush", false),
            ("?option[search_path]=hush", false),
        ] {
            let url = format!("postgres://app@host/app{query}");
            assert_eq!(has_only_known_parameters(&url), expected, "{url}");
        }
    }

    #[test]
    fn ipv6_host_has_no_brackets() {
        for (url, host) in [
            ("postgres://app@[2001:db8::1]:5433/app", "2001:db8::1"),
            ("postgres://app@host/app", "host"),
            ("postgres://app@[::1]/app?host=other", "other"),
        ] {
            let store = PostgresStore::from_url(url).unwrap();
            assert_eq!(store.inner.settings.options.get_host(), host, "{url}");
        }
    }
}
