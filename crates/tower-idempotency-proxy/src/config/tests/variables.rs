//! Environment variables.

use std::{ffi::OsString, fs};

use ::tests::scratch::Scratch;
use serde_json::json;

use super::{Config, ConfigError, GOOD, Variable, known_names};

/// Reads a file and variables. The names lack `IDEMPOTENCY_PROXY__`.
fn read(text: &str, variables: &[(&str, &str)]) -> Result<Config, ConfigError> {
    let variables = variables.iter().map(|(name, value)| {
        let name = format!("IDEMPOTENCY_PROXY__{name}");
        (OsString::from(name), OsString::from(value))
    });
    Config::read(text, None, &Variable::select(variables)?)
}

#[test]
fn each_setting_has_variable() {
    let scratch = Scratch::new();
    let file = scratch.file("secret");
    fs::write(&file, "0123456789abcdef\n").unwrap();
    let file = file.to_str().unwrap();
    let settings = [
        ("LISTEN__ADDRESS", "127.0.0.2:1", json!("127.0.0.2:1")),
        ("LISTEN__TLS__CERTIFICATE", file, json!(file)),
        ("LISTEN__TLS__KEY", file, json!(file)),
        ("LISTEN__FORWARDED", "append", json!("append")),
        ("LISTEN__IDLE_TIMEOUT", "7s", json!("7s")),
        ("LISTEN__MAX_CONNECTIONS", "11", json!(11)),
        ("ADMIN__ADDRESS", "127.0.0.3:1", json!("127.0.0.3:1")),
        ("ADMIN__CONSOLE", "resolve", json!("resolve")),
        ("ADMIN__TOKEN_FILE", file, json!(file)),
        ("ADMIN__AUDIT_FILE", "log", json!("log")),
        ("ADMIN__AUDIT_TABLE", "true", json!(true)),
        ("STORE__URL", "redis://:hush@host", json!("(secret)")),
        ("STORE__TIMEOUT", "3s", json!("3s")),
        ("IDENTITY__NAMESPACE", "12", json!("12")),
        ("IDENTITY__SECRET_FILE", file, json!(file)),
        ("LIMITS__MAX_IN_FLIGHT", "13", json!(13)),
        ("LIMITS__MAX_REQUEST_BYTES", "3MiB", json!("3MiB")),
        ("LIMITS__MAX_RESPONSE_BYTES", "4MiB", json!("4MiB")),
        ("DRAIN__DELAY", "5s", json!("5s")),
        ("DRAIN__TIMEOUT", "6s", json!("6s")),
        ("ROLLOUT__MODE", "observe", json!("observe")),
        ("ROLLOUT__SHARE", "50%", json!("50%")),
        (
            "UPSTREAM__APP__URL",
            "https://host:1",
            json!("https://host:1"),
        ),
        ("UPSTREAM__APP__HTTP2", "true", json!(true)),
        ("UPSTREAM__APP__HOST", "upstream", json!("upstream")),
        ("UPSTREAM__APP__CA_FILE", file, json!(file)),
        ("UPSTREAM__APP__CONNECT_TIMEOUT", "8s", json!("8s")),
        ("UPSTREAM__APP__TIMEOUT", "9s", json!("9s")),
        ("UPSTREAM__APP__KEEP_ALIVE", "10s", json!("10s")),
        ("UPSTREAM__APP__MAX_IDLE", "14", json!(14)),
    ];
    let variables: Vec<_> = settings
        .iter()
        .map(|(name, value, _)| (*name, *value))
        .collect();
    let config = read(GOOD, &variables).unwrap();
    assert_eq!(config.store_url(), "redis://:hush@host");
    let config = config.to_json();
    for (name, _, expected) in &settings {
        let pointer = format!("/{}", name.to_ascii_lowercase().replace("__", "/"));
        assert_eq!(config.pointer(&pointer), Some(expected), "{name}");
    }
    for (section, table) in [
        ("[listen]", "LISTEN"),
        ("[listen.tls]", "LISTEN__TLS"),
        ("[admin]", "ADMIN"),
        ("[store]", "STORE"),
        ("[identity]", "IDENTITY"),
        ("[limits]", "LIMITS"),
        ("[drain]", "DRAIN"),
        ("[rollout]", "ROLLOUT"),
        ("[upstream.a]", "UPSTREAM__APP"),
    ] {
        for setting in known_names(section) {
            let name = format!("{table}__{}", setting.to_ascii_uppercase());
            let is_tested = settings.iter().any(|(tested, ..)| *tested == name);
            // A table, and a setting that excludes another one.
            let is_other = ["LISTEN__TLS", "STORE__URL_FILE"].contains(&name.as_str());
            assert!(is_tested || is_other, "{name}");
        }
    }
}

#[test]
fn flag_replaces_variable_and_variable_replaces_file() {
    let scratch = Scratch::new();
    let file = scratch.file("proxy.toml");
    assert!(Config::load(&file, None, []).is_err());
    fs::write(&file, GOOD).unwrap();
    let url = |store: Option<&str>, variables: &[(&str, &str)]| {
        let variables = variables.iter();
        let variables =
            variables.map(|(name, value)| (OsString::from(name), OsString::from(value)));
        let config = Config::load(&file, store, variables).unwrap();
        config.store_url().to_owned()
    };
    let variable = ("IDEMPOTENCY_PROXY__STORE__URL", "sqlite:variable.db");
    // Kubernetes sets such variables.
    let others = [
        ("IDEMPOTENCY_PROXY_PORT", "tcp://10.0.0.1:80"),
        ("HOME", "/"),
    ];
    assert_eq!(url(None, &others), "memory");
    assert_eq!(url(None, &[variable]), "sqlite:variable.db");
    assert_eq!(url(Some("sqlite:flag.db"), &[variable]), "sqlite:flag.db");
}

#[test]
fn url_and_file_of_url_replace_each_other() {
    let scratch = Scratch::new();
    let file = scratch.file("url");
    fs::write(&file, "sqlite:file.db\n").unwrap();
    let file = file.to_str().unwrap();
    let with_file = GOOD.replacen("url = \"memory\"", &format!("url_file = \"{file}\""), 1);
    let (url, url_file) = (("STORE__URL", "sqlite:x.db"), ("STORE__URL_FILE", file));
    for (text, variable, expected) in [
        (with_file.as_str(), url, "sqlite:x.db"),
        (GOOD, url_file, "sqlite:file.db"),
    ] {
        let config = read(text, &[variable]).unwrap();
        assert_eq!(config.store_url(), expected);
    }
    let error = read(GOOD, &[url, url_file]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "IDEMPOTENCY_PROXY__STORE__URL: expected either url or url_file, found both"
    );
}

#[test]
fn variable_has_name_of_upstream() {
    let with_names = |first: &str, second: &str| {
        let second = format!("[upstream.{second}]\nurl = \"http://127.0.0.1:3001\"\n[[route]]");
        let text = GOOD.replacen("[[route]]", &second, 1);
        let text = text.replacen("[upstream.app]", &format!("[upstream.{first}]"), 1);
        text.replace("\"app\"", &format!("\"{first}\""))
    };
    let variable = [("UPSTREAM__PAY_API__TIMEOUT", "7s")];
    let config = read(&with_names("Pay-API", "app"), &variable).unwrap();
    let config = config.to_json();
    assert_eq!(config["upstream"]["Pay-API"]["timeout"], "7s");
    assert_eq!(config["upstream"]["app"]["timeout"], "30s");
    let error = read(&with_names("Pay-API", "pay_api"), &variable).unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains("Pay-API") && error.contains("pay_api"),
        "{error}"
    );
    // The URL may be in the variable alone.
    let without_url = GOOD.replacen("url = \"http://127.0.0.1:3000\"\n", "", 1);
    let url = [("UPSTREAM__APP__URL", "http://127.0.0.1:3000")];
    assert!(read(&without_url, &url).is_ok());
}

/// An error about the file would quote the key.
#[test]
fn wrong_variable_is_named_without_key() {
    let tls = "[listen]\ntls = { certificate = \"chain.pem\", key = \"key.pem\" }\n";
    let text = GOOD.replacen("[listen]\n", tls, 1);
    assert_ne!(text, GOOD);
    assert!(read(&text, &[]).is_ok());
    let error = read(&text, &[("LISTEN__TLS__KEY", "MIIhush")]).unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains("IDEMPOTENCY_PROXY__LISTEN__TLS__KEY"),
        "{error}"
    );
    assert!(error.contains("cannot read the file of key"), "{error}");
    assert!(!error.contains("hush"), "{error}");
}

#[test]
fn wrong_variable_is_named_without_secret() {
    for (name, value, expected) in [
        (
            "LISTENER__ADDRESS",
            "127.0.0.1:1",
            "unknown setting `listener`, did you mean `listen`?",
        ),
        (
            "LISTEN__ADRESS",
            "127.0.0.1:1",
            "unknown setting `adress`, did you mean `address`?",
        ),
        (
            "LISTEN__ADDRESS",
            "localhost:1",
            "invalid socket address syntax",
        ),
        ("LISTEN__ADDRESS__PORT", "1", "`address` is no table"),
        ("LISTEN__TLS", "hush", "expected a table, found a text"),
        (
            "LISTEN__TLS__KEY",
            "key.pem",
            "missing setting `certificate`",
        ),
        (
            "LISTEN__TLS__KEY",
            "-----BEGIN PRIVATE KEY-----\nhush",
            "the value has a line break",
        ),
        ("LISTEN__MAX_CONNECTIONS", "hush", "expected a whole number"),
        ("LISTEN__MAX_CONNECTIONS", "1.5", "expected a whole number"),
        ("LISTEN__MAX_CONNECTIONS", "0", "expected at least 1"),
        ("ADMIN__CONSOLE", "read-only", "missing setting `address`"),
        (
            "STORE",
            "redis://:hush@host",
            "expected a table and a setting, as in IDEMPOTENCY_PROXY__LISTEN__ADDRESS",
        ),
        (
            "STORE__URI",
            "redis://:hush@host",
            "unknown setting `uri`, did you mean `url`?",
        ),
        (
            "STORE__URL_FILE",
            "redis://:hush@host",
            "cannot read the file of url_file: No such file or directory (os error 2)",
        ),
        (
            "IDENTITY__SECRET",
            "hush",
            "unknown setting `secret`, expected namespace, secret_file",
        ),
        (
            "IDENTITY__SECRET_FILE",
            "hush",
            "cannot read the file of secret_file: No such file or directory (os error 2)",
        ),
        (
            "DRAIN__TIMEOUT",
            "30 parsecs",
            "`30 parsecs` is no duration, expected one such as \"30s\"",
        ),
        ("UPSTREAM__APP__HTTP2", "yes", "expected true or false"),
        (
            "UPSTREAM__APP__URL",
            "http://u:hush@127.0.0.1:3000",
            "expected a URL without a user and a password",
        ),
        (
            "UPSTREAM__AP__URL",
            "http://host",
            "unknown upstream `ap`, did you mean `app`?",
        ),
        (
            "UPSTREAM__URL",
            "http://host",
            "expected an upstream and a setting, as in IDEMPOTENCY_PROXY__UPSTREAM__APP__URL",
        ),
        (
            "ROUTE__0__MODE",
            "off",
            "variables cannot set a route, set it in the file",
        ),
        (
            "listen__address",
            "127.0.0.1:1",
            "expected a name in capital letters",
        ),
    ] {
        let error = read(GOOD, &[("DRAIN__DELAY", "1s"), (name, value)]).unwrap_err();
        assert_eq!(error.line(), None);
        assert_eq!(
            error.to_string(),
            format!("IDEMPOTENCY_PROXY__{name}: {expected}")
        );
        assert!(!error.to_string().contains("hush"));
    }
}

#[test]
fn wrong_file_keeps_line_with_variables() {
    let variables = [("ADMIN__ADDRESS", "127.0.0.1:1"), ("DRAIN__DELAY", "1s")];
    for (text, expected) in [
        (
            GOOD.replacen("mode = \"off\"", "mode = \"of\"", 1),
            "line 13: unknown value `of`, did you mean `off`?",
        ),
        (
            GOOD.replacen("http://127.0.0.1:3000", "127.0.0.1:3000", 1),
            "line 6: expected http://HOST:PORT or https://HOST:PORT without a path",
        ),
        (
            GOOD.replacen("\"127.0.0.1:8080\"", "8080", 1),
            "line 2: invalid type: integer `8080`, expected socket address",
        ),
    ] {
        let error = read(&text, &variables).unwrap_err();
        assert_eq!(error.to_string(), expected);
    }
}

#[test]
fn empty_value_is_rejected() {
    let name = OsString::from("IDEMPOTENCY_PROXY__IDENTITY__NAMESPACE");
    let selected = Variable::select([(name, OsString::new())]);
    let error = selected.err().map(|error| error.to_string());
    let expected = "IDEMPOTENCY_PROXY__IDENTITY__NAMESPACE: the value is empty: set a value or remove the variable";
    assert_eq!(error.as_deref(), Some(expected));
}

#[test]
fn value_that_is_not_text_is_rejected() {
    use std::os::unix::ffi::OsStringExt as _;
    let name = OsString::from("IDEMPOTENCY_PROXY__IDENTITY__NAMESPACE");
    let selected = Variable::select([(name, OsString::from_vec(vec![0xff]))]);
    let error = selected.err().map(|error| error.to_string());
    let expected = "IDEMPOTENCY_PROXY__IDENTITY__NAMESPACE: the value is not UTF-8";
    assert_eq!(error.as_deref(), Some(expected));
}
