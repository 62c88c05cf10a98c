//! The methods that need no key.

use http::Method;

/// Returns `true` if the IANA registry lists the method as safe. `Method::is_safe` does not know those of WebDAV, and QUERY only
/// in newer versions of `http`.
pub(crate) fn is_safe(method: &Method) -> bool {
    method.is_safe() || ["QUERY", "PROPFIND", "REPORT", "SEARCH"].contains(&method.as_str())
}
