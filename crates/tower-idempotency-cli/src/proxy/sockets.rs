//! Sockets that systemd hands over (socket activation).

use std::env;

use listenfd::ListenFd;
use tower_idempotency_proxy::Sockets;

/// Name of the socket of `[admin]`: `FileDescriptorName` of its unit. A socket with any other name is that of `[listen]`.
const ADMIN: &str = "admin";

/// Takes the sockets that systemd hands over to this process. Call it before the first thread starts: it removes the
/// variables, so that no other process takes the sockets too.
pub(super) fn take() -> Result<Sockets, String> {
    let names = env::var("LISTEN_FDNAMES").unwrap_or_default();
    let mut names = names.split(':');
    let mut descriptors = ListenFd::from_env();
    let (mut listen, mut admin) = (None, None);
    for index in 0..descriptors.len() {
        let (slot, table) = match names.next() {
            Some(ADMIN) => (&mut admin, "admin"),
            Some(_) | None => (&mut listen, "listen"),
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
