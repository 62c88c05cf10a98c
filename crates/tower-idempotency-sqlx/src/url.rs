//! URLs of servers.

/// Returns the names of the parameters, as they are written in the URL.
pub(crate) fn parameter_names(url: &str) -> impl Iterator<Item = &str> {
    let (_, query) = url.split_once('?').unwrap_or_default();
    let query = query.split('#').next().unwrap_or_default();
    let parameters = query.split('&').filter(|parameter| !parameter.is_empty());
    parameters.filter_map(|parameter| parameter.split('=').next())
}

/// Returns the host without the brackets of an IPv6 address. sqlx 0.9 takes them from the URL, and would look up a host of that
/// name.
pub(crate) fn without_brackets(host: &str) -> &str {
    let address = host.strip_prefix('[');
    let address = address.and_then(|address| address.strip_suffix(']'));
    address.unwrap_or(host)
}
