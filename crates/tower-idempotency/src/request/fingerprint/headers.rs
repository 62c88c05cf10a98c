//! Request headers that are part of a fingerprint.

use std::{borrow::Cow, iter, sync::LazyLock};

use http::{HeaderMap, HeaderName, header};
use smallvec::SmallVec;

use crate::{digest::FieldDigest, request::credentials::add_header};

/// Request headers that name the account, tenant or user on whose behalf a shared token acts. Part of every fingerprint
/// unless [`FingerprintBy::with_headers`](crate::FingerprintBy::with_headers) replaces the list.
///
/// A `_` in the name of a request header counts as `-`: servers may read `x_tenant_id` as `X-Tenant-Id`.
///
/// The list has generic headers and those of public APIs: Stripe, OpenAI, Xero, PayPal, Box, Dropbox, SendGrid, Google,
/// Grafana, GitLab, Kubernetes and others.
pub static ACTING_HEADERS: &[HeaderName] = &ACTING;

static ACTING: [HeaderName; 32] = [
    HeaderName::from_static("as-user"),
    HeaderName::from_static("callerobjectid"),
    HeaderName::from_static("dropbox-api-select-admin"),
    HeaderName::from_static("dropbox-api-select-user"),
    HeaderName::from_static("impersonate-user"),
    HeaderName::from_static("login-customer-id"),
    HeaderName::from_static("mscrmcallerid"),
    HeaderName::from_static("on-behalf-of"),
    HeaderName::from_static("openai-organization"),
    HeaderName::from_static("openai-project"),
    HeaderName::from_static("paypal-auth-assertion"),
    HeaderName::from_static("stripe-account"),
    HeaderName::from_static("stripe-context"),
    HeaderName::from_static("sudo"),
    HeaderName::from_static("tenant-id"),
    HeaderName::from_static("x-account-id"),
    HeaderName::from_static("x-customer-id"),
    HeaderName::from_static("x-goog-user-project"),
    HeaderName::from_static("x-grafana-org-id"),
    HeaderName::from_static("x-impersonate-user"),
    HeaderName::from_static("x-merchant-id"),
    HeaderName::from_static("x-on-behalf-of"),
    HeaderName::from_static("x-org-id"),
    HeaderName::from_static("x-organization"),
    HeaderName::from_static("x-organization-id"),
    HeaderName::from_static("x-project-id"),
    HeaderName::from_static("x-scope-orgid"),
    HeaderName::from_static("x-tenant"),
    HeaderName::from_static("x-tenant-id"),
    HeaderName::from_static("x-workspace-id"),
    HeaderName::from_static("xero-tenant-id"),
    HeaderName::from_static("zuora-entity-ids"),
];

/// Request headers that select the part of a resource, the source or target of a copy or an upload, the method or the
/// operation. Without them, two parts with equal bytes would be one request under
/// [`MissingKey::Derive`](crate::MissingKey::Derive).
///
/// The list has headers of HTTP, WebDAV, tus, AtomPub, SOAP and Next.js, and of AWS, Azure, Google Cloud Storage and Dropbox. It
/// has no `Range`, since a client may continue the download of a response.
const SELECTING_HEADERS: [HeaderName; 26] = [
    HeaderName::from_static("content-disposition"),
    HeaderName::from_static("content-range"),
    HeaderName::from_static("depth"),
    HeaderName::from_static("destination"),
    HeaderName::from_static("dropbox-api-arg"),
    HeaderName::from_static("lock-token"),
    HeaderName::from_static("next-action"),
    HeaderName::from_static("overwrite"),
    HeaderName::from_static("slug"),
    HeaderName::from_static("soapaction"),
    HeaderName::from_static("upload-concat"),
    HeaderName::from_static("upload-length"),
    HeaderName::from_static("upload-metadata"),
    HeaderName::from_static("upload-offset"),
    HeaderName::from_static("x-amz-copy-source"),
    HeaderName::from_static("x-amz-target"),
    HeaderName::from_static("x-goog-copy-source"),
    HeaderName::from_static("x-goog-upload-command"),
    HeaderName::from_static("x-goog-upload-offset"),
    HeaderName::from_static("x-http-method"),
    HeaderName::from_static("x-http-method-override"),
    HeaderName::from_static("x-method-override"),
    HeaderName::from_static("x-ms-copy-source"),
    HeaderName::from_static("x-ms-range"),
    HeaderName::from_static("x-ms-rename-source"),
    HeaderName::from_static("x-ms-source-range"),
];

/// Preconditions of a change (RFC 9110, section 13.1, and for WebDAV RFC 4918, section 10.4). They count only if the fingerprint
/// is the key: a request with another precondition is then another request. Under a key of the client, a retry may correct its
/// preconditions.
static PRECONDITIONS: [HeaderName; 4] = [
    header::IF_MATCH,
    header::IF_NONE_MATCH,
    header::IF_UNMODIFIED_SINCE,
    HeaderName::from_static("if"),
];

static DEFAULT_HEADERS: LazyLock<Vec<HeaderName>> = LazyLock::new(|| {
    let headers = ACTING_HEADERS.iter().cloned().chain(SELECTING_HEADERS);
    headers.collect()
});

/// The headers that count in a fingerprint.
#[derive(Clone)]
pub(super) struct HeaderList {
    names: Cow<'static, [HeaderName]>,
    filter: NameFilter,
    /// `true` if preconditions count in a fingerprint that is the key.
    has_preconditions: bool,
}

impl HeaderList {
    /// Returns the default list.
    pub(super) fn new() -> Self {
        Self::with_names(Cow::Borrowed(&DEFAULT_HEADERS), true)
    }

    /// Returns a list that has only these names.
    pub(super) fn only(names: impl IntoIterator<Item = HeaderName>) -> Self {
        Self::with_names(names.into_iter().collect(), false)
    }

    fn with_names(names: Cow<'static, [HeaderName]>, has_preconditions: bool) -> Self {
        let mut filter = NameFilter::default();
        names.iter().for_each(|name| filter.add(name));
        Self {
            names,
            filter,
            has_preconditions,
        }
    }

    /// Adds a name, unless the list has it.
    pub(super) fn add(&mut self, name: HeaderName) {
        if !self.names.contains(&name) {
            self.filter.add(&name);
            self.names.to_mut().push(name);
        }
    }

    /// Returns the names.
    pub(super) fn names(&self) -> &[HeaderName] {
        &self.names
    }

    /// Adds the headers of the list that the request has, in the order of the list. Other spellings of their names follow, in the
    /// order of these.
    pub(super) fn add_listed(&self, headers: &HeaderMap, hash: &mut FieldDigest) {
        // Most requests have none. The filter is far cheaper than one lookup for each header of the list.
        let mut listed = headers
            .keys()
            .filter(|name| self.filter.may_contain(name))
            .filter_map(|name| Some((self.place_of(name)?, name)));
        let Some(first) = listed.next() else {
            return;
        };
        let mut listed: SmallVec<[_; 4]> = iter::once(first).chain(listed).collect();
        listed.sort_unstable_by_key(|&(place, name)| (place, name.as_str()));
        for (_, name) in listed {
            add_header(headers, name, hash);
        }
    }

    /// Returns the place of a name in the list, or the length of the list for another spelling of a name in it.
    fn place_of(&self, name: &HeaderName) -> Option<usize> {
        let place = self.names.iter().position(|listed| listed == name);
        place.or_else(|| {
            let is_other_spelling = self.names.iter().any(|listed| is_spelling(listed, name));
            is_other_spelling.then_some(self.names.len())
        })
    }

    /// Adds the preconditions that the request has, in any spelling, for a fingerprint that is the key.
    pub(super) fn add_preconditions(&self, headers: &HeaderMap, hash: &mut FieldDigest) {
        if !self.has_preconditions {
            return;
        }
        let sent = headers.keys().filter_map(|name| {
            let place = PRECONDITIONS.iter().position(|it| is_spelling(it, name))?;
            // A listed one has been added.
            self.place_of(name).is_none().then_some((place, name))
        });
        let mut sent: SmallVec<[_; 4]> = sent.collect();
        sent.sort_unstable_by_key(|&(place, name)| (place, name.as_str()));
        for (_, name) in sent {
            add_header(headers, name, hash);
        }
    }
}

/// Returns `true` if the names are equal with `-` in place of each `_`.
fn is_spelling(name: &HeaderName, other: &HeaderName) -> bool {
    let (name, other) = (name.as_str().as_bytes(), other.as_str().as_bytes());
    let mut pairs = name.iter().zip(other);
    name.len() == other.len() && pairs.all(|(&one, &other)| dashed(one) == dashed(other))
}

/// Returns `-` for `_`, and each other byte unchanged. CGI and WSGI servers do not distinguish the two.
const fn dashed(byte: u8) -> u8 {
    if byte == b'_' { b'-' } else { byte }
}

/// A Bloom filter of header names: no false negatives, few false positives.
#[derive(Clone, Default)]
struct NameFilter([u64; 4]);

impl NameFilter {
    fn add(&mut self, name: &HeaderName) {
        let (word, bit) = Self::place(name);
        self.0[word] |= bit;
    }

    fn may_contain(&self, name: &HeaderName) -> bool {
        let (word, bit) = Self::place(name);
        self.0[word] & bit != 0
    }

    /// Returns the word and the bit of a name: a hash of its length and of three of its bytes, equal for all spellings. With
    /// these bytes and factors, few usual headers share a bit with a listed one, and `Host` and `X-Request-Id` do not.
    fn place(name: &HeaderName) -> (usize, u64) {
        let name = name.as_str().as_bytes();
        let at = |index: usize| name.get(index).map_or(0, |&byte| usize::from(dashed(byte)));
        let (middle, last) = (at(name.len() / 2), at(name.len() - 1));
        let hash = at(4) * 95 + middle * 63 + last * 10 + name.len() * 84;
        (hash / 64 % 4, 1 << (hash % 64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each request has some of these. To compare them with the whole list takes longer.
    #[test]
    fn usual_headers_are_not_compared_with_list() {
        let list = HeaderList::new();
        for name in [
            "accept",
            "accept-encoding",
            "accept-language",
            "authorization",
            "connection",
            "content-length",
            "content-type",
            "cookie",
            "host",
            "idempotency-key",
            "origin",
            "referer",
            "traceparent",
            "tracestate",
            "user-agent",
            "x-api-key",
            "x-correlation-id",
            "x-forwarded-for",
            "x-forwarded-host",
            "x-forwarded-proto",
            "x-real-ip",
            "x-request-id",
        ] {
            let name = HeaderName::from_static(name);
            assert!(!list.filter.may_contain(&name), "{name}");
        }
    }

    #[test]
    fn each_spelling_of_listed_name_has_place() {
        let list = HeaderList::new();
        for (place, name) in list.names().iter().enumerate() {
            assert_eq!(list.place_of(name), Some(place), "{name}");
            let text = name.as_str();
            for (at, _) in text.match_indices('-') {
                let other = format!("{}_{}", &text[..at], &text[at + 1..]);
                let other = HeaderName::try_from(other).expect("a name");
                assert!(list.filter.may_contain(&other), "{other}");
                assert_eq!(list.place_of(&other), Some(list.names().len()), "{other}");
            }
        }
        for name in ["tenant", "x-tenants", "x-tenant.id"] {
            assert_eq!(
                list.place_of(&HeaderName::from_static(name)),
                None,
                "{name}"
            );
        }
    }
}
