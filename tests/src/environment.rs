//! The environment of the programs that tests start.

use std::{env, ffi::OsStr, process::Command};

/// Removes the settings of the tool, of the proxy, and of their logs. A developer may have set them for other work.
///
/// Call this before the test sets variables of its own.
pub fn remove_settings(command: &mut Command) -> &mut Command {
    for (name, _) in env::vars_os().filter(|(name, _)| is_setting(name)) {
        command.env_remove(name);
    }
    command
}

fn is_setting(name: &OsStr) -> bool {
    let name = name.as_encoded_bytes();
    let prefixes: [&[u8]; 2] = [b"IDEMPOTENCY_", b"LISTEN_"];
    let names: [&[u8]; 3] = [b"NO_COLOR", b"NOTIFY_SOCKET", b"RUST_LOG"];
    prefixes.iter().any(|prefix| name.starts_with(prefix)) || names.contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_developer_are_removed() {
        for name in [
            "IDEMPOTENCY_TABLE",
            "IDEMPOTENCY_PROXY__LISTEN__ADDRESS",
            "LISTEN_FDS",
            "NO_COLOR",
            "NOTIFY_SOCKET",
            "RUST_LOG",
        ] {
            assert!(is_setting(name.as_ref()), "{name}");
        }
        for name in [
            "PATH",
            "HOME",
            "RUST_LOG_STYLE",
            "CARGO_BIN_EXE_idempotency",
        ] {
            assert!(!is_setting(name.as_ref()), "{name}");
        }
    }
}
