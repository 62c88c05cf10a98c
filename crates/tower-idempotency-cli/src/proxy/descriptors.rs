//! The limit of open file descriptors of the process.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors of the store, of the admin port, and of idle connections to upstreams.
const OTHERS: u64 = 1_000;

/// Raises the limit to the largest number that the system allows. Warns if this is too small for so many connections of clients.
///
/// At the limit, the proxy accepts no connection, and opens none to an upstream or to the store.
pub(super) fn raise_limit(connections: usize) {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: maximum,
        maximum,
    };
    // Some systems refuse it. The old limit then stays.
    let _ = setrlimit(Resource::Nofile, raised);
    // Each client may need a connection to an upstream.
    let needed = (connections as u64)
        .saturating_mul(2)
        .saturating_add(OTHERS);
    if let Some(limit) = getrlimit(Resource::Nofile).current
        && limit < needed
    {
        tracing::warn!(
            limit,
            needed,
            "limit of file descriptors is too low for max_connections"
        );
    }
}
