//! Sockets that systemd hands over (socket activation).

use std::env;

use listenfd::ListenFd;
use tower_idempotency_proxy::Sockets;

/// Name of the socket of `[admin]`: `FileDescriptorName` of its unit.
const ADMIN: &str = "admin";
/// Names of the socket of `[listen]`. By default it has the name of its unit. systemd uses `unknown` for a socket without a name.
const LISTEN: [&str; 4] = ["listen", "idempotency-proxy.socket", "unknown", ""];

/// Takes the sockets that systemd hands over to this process. Call it before the first thread starts: it removes `LISTEN_PID`
/// and `LISTEN_FDS`, so that no other process takes the sockets too.
pub(super) fn take() -> Result<Sockets, String> {
    let names = env::var("LISTEN_FDNAMES").unwrap_or_default();
    let mut names = names.split(':');
    let mut descriptors = ListenFd::from_env();
    let (mut listen, mut admin) = (None, None);
    for index in 0..descriptors.len() {
        let (slot, table) = match names.next() {
            Some(ADMIN) => (&mut admin, "admin"),
            None => (&mut listen, "listen"),
            Some(name) if LISTEN.contains(&name) => (&mut listen, "listen"),
            Some(name) => {
                return Err(format!(
                    "a socket of systemd has the name {name:?}, expected FileDescriptorName=listen or admin, and Accept=no"
                ));
            }
        };
        let taken = descriptors.take_tcp_listener(index);
        let taken = taken.map_err(|error| format!("cannot use a socket of systemd: {error}"))?;
        if slot.is_some() {
            return Err(format!(
                "expected one socket of systemd for [{table}], found two; FileDescriptorName=admin names that of [admin]"
            ));
        }
        *slot = taken;
    }
    let mut sockets = Sockets::new();
    if let Some(socket) = listen {
        sockets = sockets.with_listen(socket);
    }
    if let Some(socket) = admin {
        sockets = sockets.with_admin(socket);
    }
    Ok(sockets)
}
