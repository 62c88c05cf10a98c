//! Credentials of a request: the headers and cookies by which callers authenticate.

use std::borrow::Cow;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, header};
use smallvec::SmallVec;

use self::forwarded_cert::{add_certificate_names, is_forwarded_cert};
use crate::{
    digest::FieldDigest,
    error::{Error, ErrorKind},
    header_lines::lines_of,
};

mod forwarded_cert;

/// Result of the sources for one request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Identity {
    /// A source found a principal, which is also the account.
    Principal,
    /// A source found a principal, and the stores and the limits account for the caller by another value. It is the first of
    /// several credentials, or the canonical spelling of a header. All credentials, as they are spelled, separate keys.
    OtherAccount,
    /// No source found a principal, and none is required.
    Anonymous,
    /// No source found a principal, and one is required.
    Missing,
}

impl Identity {
    /// Returns `true` if a source found a principal.
    pub(super) fn is_found(self) -> bool {
        matches!(self, Self::Principal | Self::OtherAccount)
    }

    /// Returns the identity of a caller whose only credential is this line.
    fn of_line(name: &HeaderName, line: &HeaderValue) -> Self {
        if *canonical_value(name, line) == *line.as_bytes() {
            Self::Principal
        } else {
            Self::OtherAccount
        }
    }
}

/// Use of a principal.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Separates the keys of callers. All credentials count, as they are spelled.
    Keys,
    /// Separates the shares of callers. Only the first credential counts, in its canonical spelling.
    Shares,
}

/// Reason why a request has no principal.
pub(crate) enum PrincipalError {
    /// A required source found none.
    Missing(Box<Error>),
    /// A cookie or a credential header occurs twice.
    Ambiguous(Box<Error>),
    /// The closure of the application rejected the request with this response.
    Rejected(Box<Response<Bytes>>),
}

impl PrincipalError {
    /// Returns the error for callers that cannot send the response of the application's closure.
    pub(crate) fn into_error(self) -> Error {
        match self {
            Self::Missing(error) | Self::Ambiguous(error) => *error,
            Self::Rejected(res) => Error::new(
                ErrorKind::PrincipalMissing,
                "the closure of the application rejected the request",
            )
            .with_status(res.status()),
        }
    }

    fn ambiguous(detail: &'static str) -> Self {
        Self::Ambiguous(Box::new(Error::new(ErrorKind::PrincipalAmbiguous, detail)))
    }

    /// Creates the error of a header with two lines. The service might read the other line, and a client that adds an invented
    /// line to its own must not become another caller.
    fn two_lines() -> Self {
        Self::ambiguous("expected each header that identifies the caller once, found one twice")
    }
}

/// Adds all credential headers to `hash`. Adds the cookies too if there is no such header, or only a forwarded certificate.
/// Returns the kind of identity.
pub(super) fn add_credentials(
    headers: &HeaderMap,
    hash: &mut FieldDigest,
) -> Result<Identity, PrincipalError> {
    Ok(match add_credential_headers(headers, hash)? {
        Identity::Anonymous if add_cookies(headers, hash) => Identity::Principal,
        identity => identity,
    })
}

/// Adds the first credential to `hash`: `Authorization` if the request has it, else the first header by name. A forwarded
/// certificate comes after all others and after the cookies. Returns `false` if the request has no credential header. Requests
/// that [`add_credentials`] rejects do not reach this function.
pub(super) fn add_first_credential(headers: &HeaderMap, hash: &mut FieldDigest) -> bool {
    let first = credential_lines(headers)
        .filter(|(_, line)| has_value(line))
        .min_by_key(|(name, _)| {
            let is_other = *name != header::AUTHORIZATION;
            (is_forwarded_cert(name), is_other, name.as_str())
        });
    let Some((name, line)) = first else {
        return false;
    };
    if !(is_forwarded_cert(name) && add_cookies(headers, hash)) {
        add_credential(name, &canonical_value(name, line), hash);
    }
    true
}

/// Returns the value by which the limits account for a caller with this line. It has no spaces around it, and the scheme of
/// `Authorization` is spelled as in `Bearer`, before one space.
///
/// A service accepts `bearer  token` for `Bearer token`. With another spelling, a client must not get another share.
fn canonical_value<'a>(name: &HeaderName, line: &'a HeaderValue) -> Cow<'a, [u8]> {
    let value = line.as_bytes().trim_ascii();
    let end = value.iter().position(u8::is_ascii_whitespace);
    let Some(end) = end.filter(|_| *name == header::AUTHORIZATION) else {
        return Cow::Borrowed(value);
    };
    let (scheme, credential) = (&value[..end], value[end..].trim_ascii_start());
    let mut canonical: SmallVec<[u8; 32]> = SmallVec::from_slice(scheme);
    canonical.make_ascii_lowercase();
    canonical[..1].make_ascii_uppercase();
    canonical.push(b' ');
    if value.starts_with(&canonical) && value.len() == canonical.len() + credential.len() {
        return Cow::Borrowed(value);
    }
    canonical.extend_from_slice(credential);
    Cow::Owned(canonical.into_vec())
}

/// Returns the lines of the credential headers, with their names.
fn credential_lines(headers: &HeaderMap) -> impl Iterator<Item = (&HeaderName, &HeaderValue)> {
    headers
        .iter()
        .filter(|(name, _)| is_credential_header(name.as_str()))
}

/// Returns `false` if the line is empty. A proxy may set such a line for a caller that it has not authenticated.
fn has_value(line: &HeaderValue) -> bool {
    !line.as_bytes().trim_ascii().is_empty()
}

/// Adds all values of a header, in order. Adds nothing if there is none.
pub(super) fn add_header(headers: &HeaderMap, name: &HeaderName, hash: &mut FieldDigest) {
    let lines = headers.get_all(name);
    let count = lines.iter().count();
    if count == 0 {
        return;
    }
    hash.field(b"header").field(name.as_str().as_bytes());
    hash.number(count);
    for line in lines.iter() {
        hash.field(line.as_bytes());
    }
}

/// Adds the only value of a header, as [`add_header`] does.
pub(super) fn add_header_value(name: &HeaderName, value: &[u8], hash: &mut FieldDigest) {
    hash.field(b"header").field(name.as_str().as_bytes());
    hash.number(1).field(value);
}

/// Adds the value of a header that identifies the caller. A forwarded certificate counts by its names.
pub(super) fn add_credential(name: &HeaderName, value: &[u8], hash: &mut FieldDigest) {
    if !(is_forwarded_cert(name) && add_certificate_names(value, hash)) {
        add_header_value(name, value, hash);
    }
}

/// Adds the line of a header that identifies the caller. Returns the kind of identity, which is anonymous if there is no line,
/// or one without a value. Fails if the header has two lines.
pub(super) fn add_identifying_header(
    headers: &HeaderMap,
    name: &HeaderName,
    purpose: Purpose,
    hash: &mut FieldDigest,
) -> Result<Identity, PrincipalError> {
    let mut lines = lines_of(headers, name);
    let line = lines.next();
    if lines.next().is_some() {
        return Err(PrincipalError::two_lines());
    }
    let Some(line) = line.filter(|line| has_value(line)) else {
        return Ok(Identity::Anonymous);
    };
    match purpose {
        Purpose::Keys => add_credential(name, line.as_bytes(), hash),
        Purpose::Shares => add_credential(name, &canonical_value(name, line), hash),
    }
    Ok(Identity::of_line(name, line))
}

/// Adds the credential headers in the order of their names: clients and proxies may send them in another order. If the only
/// one is a forwarded certificate, which callers may share, adds the cookies too.
fn add_credential_headers(
    headers: &HeaderMap,
    hash: &mut FieldDigest,
) -> Result<Identity, PrincipalError> {
    let mut lines: SmallVec<[_; 4]> = credential_lines(headers).collect();
    lines.sort_unstable_by_key(|(name, _)| name.as_str());
    if lines.windows(2).any(|pair| pair[0].0 == pair[1].0) {
        return Err(PrincipalError::two_lines());
    }
    lines.retain(|(_, line)| has_value(line));
    for (name, line) in &lines {
        add_credential(name, line.as_bytes(), hash);
    }
    Ok(match *lines {
        [] => Identity::Anonymous,
        [(name, _)] if is_forwarded_cert(name) && add_cookies(headers, hash) => {
            Identity::OtherAccount
        }
        [(name, line)] => Identity::of_line(name, line),
        _ => Identity::OtherAccount,
    })
}

/// Returns `true` if a header of this name, in lower case, authenticates callers and is the same in every retry.
///
/// Anti-forgery tokens, whose names end with `csrf-token` or `xsrf-token`, change and are left out. This function runs for
/// every header of a request: the checks for `key` and `token` reject most names at once.
pub(super) fn is_credential_header(name: &str) -> bool {
    const KEYS: [&str; 3] = ["x-auth-key", "x-functions-key", "x-rapidapi-key"];
    const KEY_SUFFIXES: [&str; 4] = ["api-key", "apikey", "access-key", "subscription-key"];
    const TOKENS: [&str; 3] = ["private-token", "x-figma-token", "x-vault-token"];
    const TOKEN_SUFFIXES: [&str; 4] = ["api-token", "access-token", "auth-token", "session-token"];
    let is = |expected: &str| name.len() == expected.len() && ends_with(name, expected);
    let is_one_of = |names: &[&str], suffixes: &[&str]| {
        names.iter().any(|one| is(one)) || suffixes.iter().any(|suffix| ends_with(name, suffix))
    };
    name == "authorization"
        || name.ends_with("key") && is_one_of(&KEYS, &KEY_SUFFIXES)
        || name.ends_with("token") && is_one_of(&TOKENS, &TOKEN_SUFFIXES)
        || ends_with(name, "client-cert")
        || name.ends_with("clientcert")
        || name == "x-amzn-mtls-clientcert-leaf"
        || is("x-client-secret")
}

/// Returns `true` if the name ends with the suffix. A `_` of the name counts as `-`, as in CGI and in what follows it.
fn ends_with(name: &str, suffix: &str) -> bool {
    let Some(start) = name.len().checked_sub(suffix.len()) else {
        return false;
    };
    let end = name.bytes().skip(start);
    end.zip(suffix.bytes())
        .all(|(byte, expected)| byte == expected || (byte, expected) == (b'_', b'-'))
}

/// Adds the cookies that may identify the caller, in the order of their names and values.
fn add_cookies(headers: &HeaderMap, hash: &mut FieldDigest) -> bool {
    let mut cookies: Vec<_> = cookies(headers)
        .filter(|(name, _)| !is_unrelated_cookie(name))
        .collect();
    if cookies.is_empty() {
        return false;
    }
    cookies.sort_unstable();
    hash.field(b"cookies");
    hash.number(cookies.len());
    for (name, value) in cookies {
        hash.field(name).field(value);
    }
    true
}

/// Returns the value of the cookie that identifies the caller, or `None` if there is none, or an empty one.
///
/// Fails if the cookie occurs twice.
pub(super) fn cookie<'a>(
    headers: &'a HeaderMap,
    name: &str,
) -> Result<Option<&'a [u8]>, PrincipalError> {
    let mut values = cookies(headers)
        .filter(|(cookie, _)| *cookie == name.as_bytes())
        .map(|(_, value)| value);
    let value = values.next();
    if values.next().is_some() {
        return Err(PrincipalError::ambiguous(
            "expected the cookie that identifies the caller once, found it twice",
        ));
    }
    // A client that has logged out may send an empty cookie.
    Ok(value.filter(|value| !value.is_empty()))
}

/// Returns the names and values of all cookies. HTTP/2 clients may send each one in a line of its own.
fn cookies(headers: &HeaderMap) -> impl Iterator<Item = (&[u8], &[u8])> {
    headers
        .get_all(header::COOKIE)
        .iter()
        .flat_map(|line| line.as_bytes().split(|byte| *byte == b';'))
        .map(<[u8]>::trim_ascii)
        .filter(|pair| !pair.is_empty())
        .map(name_and_value)
}

/// Returns the text before the first `=` and the text after it, or only a value.
fn name_and_value(pair: &[u8]) -> (&[u8], &[u8]) {
    match pair.iter().position(|byte| *byte == b'=') {
        Some(at) => (pair[..at].trim_ascii(), pair[at + 1..].trim_ascii()),
        None => (&b""[..], pair.trim_ascii()),
    }
}

/// Returns `true` for cookies that never authenticate a caller and that change between two requests of one caller.
///
/// A retry in which an unlisted cookie has changed counts as another caller. Callers would share a scope if their session
/// cookie were listed. The list therefore has only names of well-known products and of anti-forgery tokens.
fn is_unrelated_cookie(name: &[u8]) -> bool {
    const NAMES: [&str; 75] = [
        // Anti-forgery tokens: a second credential in addition to the session.
        "XSRF-TOKEN",
        "_csrf",
        "csrf",
        "csrf-token",
        "csrf_token",
        "csrftoken",
        // Load balancers and bot detection.
        "ARRAffinity",
        "ARRAffinitySameSite",
        "AWSALB",
        "AWSALBCORS",
        "AWSALBTG",
        "AWSALBTGCORS",
        "AWSELB",
        "AWSELBCORS",
        "GCLB",
        "__cf_bm",
        "__cflb",
        "__cfruid",
        "_px2",
        "_px3",
        "_pxhd",
        "_pxvid",
        "_abck",
        "_cfuvid",
        "ak_bmsc",
        "bm_mi",
        "bm_sv",
        "bm_sz",
        "cf_clearance",
        "datadome",
        // Consent.
        "CookieConsent",
        "OptanonAlertBoxClosed",
        "OptanonConsent",
        "cookieyes-consent",
        "euconsent-v2",
        // Analytics.
        "__hssc",
        "__hssrc",
        "__hstc",
        "_clck",
        "_clsk",
        "_dd_s",
        "_fbc",
        "_fbp",
        "_ga",
        "_gat",
        "_gcl_ag",
        "_gcl_au",
        "_gcl_aw",
        "_gcl_dc",
        "_gcl_gb",
        "_gcl_gf",
        "_gcl_gs",
        "_gcl_ha",
        "_gid",
        "_hjid",
        "_pin_unauth",
        "_scid",
        "_tt_enable_cookie",
        "_ttp",
        "_uetsid",
        "_uetvid",
        "_vis_opt_s",
        "_vis_opt_test_cookie",
        "_vwo",
        "_vwo_ds",
        "_vwo_referrer",
        "_vwo_sn",
        "_vwo_uuid",
        "_vwo_uuid_v2",
        "ajs_anonymous_id",
        "ajs_user_id",
        "hubspotutk",
        "optimizelyEndUserId",
        "optimizelySession",
        "utag_main",
    ];
    // Frameworks name a session after the application, such as `_gateway_session`. Each prefix is long enough that no session
    // begins with it.
    const PREFIXES: [&str; 23] = [
        ".AspNetCore.Antiforgery.",
        "AMCVS_",
        "AMCV_",
        "AWSALBAPP-",
        "BIGipServer",
        "__Host-csrf",
        "__RequestVerificationToken",
        "__utm",
        "_dc_gtm_UA-",
        "_gac_UA-",
        "_gac_gb_",
        "_gat_UA-",
        "_gat_gtag_",
        "_hp2_id.",
        "_hp2_props.",
        "_hp2_ses_props.",
        "_pk_cvar.",
        "_pk_id.",
        "_pk_ref.",
        "_pk_ses.",
        "_vis_opt_exp_",
        "incap_ses_",
        "visid_incap_",
    ];
    // These prefixes count only before a capital letter or a digit, as in `_ga_8K2X` and `_hjSession_7`.
    const CAPITALIZED: [&str; 2] = ["_ga_", "_hj"];
    const ENCLOSED: [(&str, &str); 2] = [("mp_", "_mixpanel"), ("ph_", "_posthog")];
    let rest_after = |prefix: &str| name.strip_prefix(prefix.as_bytes());
    NAMES.iter().any(|known| known.as_bytes() == name)
        || PREFIXES.iter().any(|prefix| rest_after(prefix).is_some())
        || CAPITALIZED.iter().any(|prefix| {
            let next = rest_after(prefix).and_then(<[u8]>::first);
            next.is_some_and(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit())
        })
        || ENCLOSED.iter().any(|(prefix, suffix)| {
            rest_after(prefix).is_some_and(|rest| rest.ends_with(suffix.as_bytes()))
        })
}

#[cfg(test)]
mod tests;
