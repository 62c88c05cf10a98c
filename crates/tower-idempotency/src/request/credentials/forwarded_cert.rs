//! The header `X-Forwarded-Client-Cert`, in which a proxy describes the certificate of the previous hop.

use http::HeaderName;

use super::name_and_value;
use crate::digest::FieldDigest;

/// Returns `true` if this is the header. The previous hop may be a gateway, which all callers share.
pub(super) fn is_forwarded_cert(name: &HeaderName) -> bool {
    name.as_str() == "x-forwarded-client-cert"
}

/// Adds the names in the certificates of a value in Envoy's form. Returns `false` if the value names no certificate, and then
/// adds nothing.
///
/// In this form a comma separates hops, and a semicolon the pairs of one hop. The hash, the certificate and its chain differ
/// between the pods of a gateway, and change with each rotation. `By` is the name of the proxy itself. These pairs do not
/// count, unless they contain a comma. All other pairs count, and a hop without a name counts as a whole.
pub(super) fn add_certificate_names(value: &[u8], hash: &mut FieldDigest) -> bool {
    let hops = split(value, b',');
    if !hops.clone().any(has_name) {
        return false;
    }
    hash.field(b"certificates").number(hops.clone().count());
    for hop in hops {
        if has_name(hop) {
            let pairs = stable_pairs(hop);
            hash.number(pairs.clone().count());
            for (name, value) in pairs {
                hash.field(name).field(value);
            }
        } else {
            hash.number(0).field(hop.trim_ascii());
        }
    }
    true
}

/// Returns `true` if the certificate of this hop has a name.
fn has_name(hop: &[u8]) -> bool {
    stable_pairs(hop).any(|(name, _)| is_one_of(name, &["uri", "dns", "subject"]))
}

/// Returns the pairs of a hop that stay the same when its certificate is rotated. A certificate without a subject has
/// `Subject=""`.
///
/// Any value with a comma counts. Otherwise a client could leave a quote open in a `Hash`, which would then hide the
/// certificate that the proxy appends after a comma.
fn stable_pairs(hop: &[u8]) -> impl Iterator<Item = (&[u8], &[u8])> + Clone {
    split(hop, b';')
        .map(name_and_value)
        .filter(|(name, value)| {
            !value.is_empty()
                && *value != b"\"\""
                && (value.contains(&b',') || !is_one_of(name, &["by", "hash", "cert", "chain"]))
        })
}

fn is_one_of(name: &[u8], names: &[&str]) -> bool {
    names
        .iter()
        .any(|listed| name.eq_ignore_ascii_case(listed.as_bytes()))
}

/// Splits at each separator outside quotes. A backslash escapes the next byte in quotes.
fn split(value: &[u8], separator: u8) -> impl Iterator<Item = &[u8]> + Clone {
    let (mut is_quoted, mut is_escaped) = (false, false);
    value.split(move |byte| {
        if is_escaped {
            is_escaped = false;
        } else if *byte == b'"' {
            is_quoted = !is_quoted;
        } else {
            is_escaped = is_quoted && *byte == b'\\';
        }
        *byte == separator && !is_quoted
    })
}
