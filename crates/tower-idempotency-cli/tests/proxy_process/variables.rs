//! Environment variables that replace settings of the file.

use std::{fs, net::SocketAddr};

use tests::scratch::Scratch;

use crate::harness::{Process, Upstream, command, config, post};

#[test]
fn flag_replaces_variable_and_variable_replaces_file() {
    let scratch = Scratch::new();
    let file = scratch.file("proxy.toml");
    let address = "127.0.0.1:1".parse().unwrap();
    fs::write(
        &file,
        config("memory", address, "") + "[drain]\ndelay = \"1s\"\n",
    )
    .unwrap();
    let check = |variables: &[(&str, &str)], arguments: &[&str]| {
        let mut command = command(&file);
        command.arg("--check").args(arguments);
        let output = command.envs(variables.iter().copied()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let settings: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        settings
    };
    let settings = check(&[], &[]);
    assert_eq!(settings["listen"]["address"], "127.0.0.1:0");
    let variables = [
        ("IDEMPOTENCY_PROXY__LISTEN__ADDRESS", "127.0.0.2:0"),
        ("IDEMPOTENCY_PROXY__DRAIN__TIMEOUT", "7s"),
        ("IDEMPOTENCY_PROXY__UPSTREAM__APP__MAX_IDLE", "3"),
        ("IDEMPOTENCY_PROXY__STORE__URL", "redis://:hush@host"),
        // Of a Service in Kubernetes.
        ("IDEMPOTENCY_PROXY_PORT", "tcp://10.0.0.1:80"),
    ];
    let settings = check(&variables, &[]);
    assert_eq!(settings["listen"]["address"], "127.0.0.2:0");
    assert_eq!(settings["drain"]["timeout"], "7s");
    assert_eq!(settings["drain"]["delay"], "1s");
    assert_eq!(settings["upstream"]["app"]["max_idle"], 3);
    assert!(!settings.to_string().contains("hush"), "{settings}");
    let settings = check(&variables, &["--listen", "127.0.0.3:0"]);
    assert_eq!(settings["listen"]["address"], "127.0.0.3:0");
    assert_eq!(settings["drain"]["timeout"], "7s");
}

#[test]
fn wrong_variable_is_rejected_without_secret() {
    let scratch = Scratch::new();
    let file = scratch.file("proxy.toml");
    let address = "127.0.0.1:1".parse().unwrap();
    fs::write(&file, config("memory", address, "")).unwrap();
    for (name, value, expected) in [
        (
            "IDEMPOTENCY_PROXY__STORE__URI",
            "redis://:hush@host",
            "unknown setting `uri`, did you mean `url`?",
        ),
        (
            "IDEMPOTENCY_PROXY__LIMITS__MAX_IN_FLIGHT",
            "hush",
            "expected a whole number",
        ),
    ] {
        for arguments in [Vec::new(), vec!["--check"]] {
            let mut command = command(&file);
            let output = command.args(&arguments).env(name, value).output().unwrap();
            assert_eq!(output.status.code(), Some(2), "{output:?}");
            assert_eq!(
                String::from_utf8_lossy(&output.stderr),
                format!(
                    "idempotency proxy: {}: {name}: {expected}\n",
                    file.display()
                )
            );
        }
    }
}

/// A reload reads the variables again, so they still replace the file.
#[test]
fn reload_keeps_variables() {
    let scratch = Scratch::new();
    let file = scratch.file("proxy.toml");
    let upstream = Upstream::start(|_| true);
    // Nothing listens there.
    let other: SocketAddr = "127.0.0.1:1".parse().unwrap();
    fs::write(&file, config("sqlite:other.db", other, "")).unwrap();
    let mut command = command(&file);
    command.env("IDEMPOTENCY_PROXY__STORE__URL", "memory").env(
        "IDEMPOTENCY_PROXY__UPSTREAM__APP__URL",
        format!("http://{}", upstream.address),
    );
    let mut proxy = Process::spawn(command, &file);
    assert_eq!(post(proxy.address, "/pay", "k", "1").status(), 201);
    fs::write(&file, config("sqlite:new.db", other, "retention = \"1h\"")).unwrap();
    proxy.signal("-HUP");
    proxy.wait_for_log("configuration reloaded");
    assert!(post(proxy.address, "/pay", "k", "1").is_replay());
    assert_eq!(post(proxy.address, "/pay", "k2", "1").status(), 201);
    assert_eq!(upstream.effects(), 2);
}
