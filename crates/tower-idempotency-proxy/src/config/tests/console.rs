//! The settings of the console.

use std::fs;

use ::tests::scratch::Scratch;

use super::{Config, GOOD, message, reload::accepts};

/// Returns a configuration with an admin port. The lines begin in line 16.
fn with_admin(address: &str, lines: &str) -> String {
    format!("{GOOD}[admin]\naddress = \"{address}\"\n{lines}\n")
}

/// Creates a file with a token of 16 bytes. Returns its line.
fn token_line(scratch: &Scratch) -> String {
    let file = scratch.file("token");
    fs::write(&file, " 0123456789abcdef \n").unwrap();
    format!("token_file = \"{}\"", file.display())
}

#[test]
fn console_is_off_by_default() {
    for text in [GOOD.to_owned(), with_admin("0.0.0.0:9090", "")] {
        assert!(Config::from_toml(&text).unwrap().console().is_none());
    }
}

#[test]
fn loopback_may_read_without_token() {
    for address in ["127.0.0.1:9090", "[::1]:9090"] {
        let config = Config::from_toml(&with_admin(address, "console = \"read-only\""));
        let console = config.unwrap().console().unwrap();
        assert!(!console.can_resolve() && console.token().is_none());
        assert!(console.audit_file().is_none() && !console.has_audit_table());
        assert_eq!(console.title(), "Idempotency");
    }
}

#[test]
fn resolving_has_token_and_audit_log() {
    let scratch = Scratch::new();
    let token = token_line(&scratch);
    for (lines, has_file, has_table) in [
        ("audit_file = \"log\"", true, false),
        ("audit_table = true", false, true),
        ("audit_file = \"log\"\naudit_table = true", true, true),
    ] {
        let lines = format!("console = \"resolve\"\n{token}\n{lines}");
        let text = with_admin("0.0.0.0:9090", &lines) + "[identity]\nnamespace = \"orders\"\n";
        let config = Config::from_toml(&text).unwrap();
        let console = config.console().unwrap();
        assert!(console.can_resolve());
        assert_eq!(console.token(), Some("0123456789abcdef"));
        assert_eq!(console.title(), "orders");
        let log = (console.audit_file().is_some(), console.has_audit_table());
        assert_eq!(log, (has_file, has_table));
        for shown in [
            format!("{config:?} {console:?}"),
            config.to_json().to_string(),
        ] {
            assert!(!shown.contains("0123456789abcdef"), "{shown}");
        }
    }
}

#[test]
fn unsafe_console_is_rejected() {
    let scratch = Scratch::new();
    let token = token_line(&scratch);
    let short = scratch.file("short");
    fs::write(&short, "  0123456789  \n").unwrap();
    let short = format!("token_file = \"{}\"", short.display());
    let (loopback, network) = ("127.0.0.1:9090", "0.0.0.0:9090");
    for (address, lines, expected) in [
        (
            loopback,
            "console = \"on\"".to_owned(),
            "line 16: unknown value `on`, expected off, read-only, resolve",
        ),
        (
            loopback,
            token.clone(),
            "line 16: token_file has no effect without a console",
        ),
        (
            loopback,
            "console = \"off\"\naudit_file = \"log\"".to_owned(),
            "line 17: audit_file has no effect without a console",
        ),
        (
            loopback,
            "audit_table = true".to_owned(),
            "line 16: audit_table has no effect without a console",
        ),
        (
            loopback,
            format!("{token}\nconsole = \"resolve\"\naudit_table = false"),
            "line 17: console = \"resolve\" needs audit_file or audit_table, because each change needs an audit line",
        ),
        (
            loopback,
            "console = \"resolve\"\naudit_file = \"log\"".to_owned(),
            "line 16: console = \"resolve\" needs token_file: operators log in with their names",
        ),
        (
            network,
            "console = \"read-only\"".to_owned(),
            "line 16: the console needs token_file, because 0.0.0.0:9090 is not loopback",
        ),
        (
            network,
            format!("console = \"read-only\"\n{short}"),
            "line 17: the token is shorter than 16 bytes",
        ),
        (
            network,
            "console = \"read-only\"\ntoken_file = \"/nowhere/token\"".to_owned(),
            "line 17: cannot read token_file /nowhere/token: No such file or directory (os error 2)",
        ),
    ] {
        assert_eq!(message(&with_admin(address, &lines)), expected);
    }
}

#[test]
fn reload_rejects_changes_of_console() {
    let scratch = Scratch::new();
    let lines = format!("console = \"read-only\"\n{}", token_line(&scratch));
    let read = |lines: &str| Config::from_toml(&with_admin("127.0.0.1:9090", lines)).unwrap();
    let old = read(&lines);
    assert_eq!(accepts(&old, &old), Ok(()));
    let expected = "[admin] has changed, which needs a restart";
    assert_eq!(accepts(&old, &read("")), Err(expected.to_owned()));
    // The same file with another token.
    fs::write(scratch.file("token"), "fedcba9876543210").unwrap();
    let expected = "the token of [admin] has changed, which needs a restart";
    assert_eq!(accepts(&old, &read(&lines)), Err(expected.to_owned()));
}
