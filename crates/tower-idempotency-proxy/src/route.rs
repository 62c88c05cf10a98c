//! Patterns of paths and hosts, and the segments of a request path.

use std::{borrow::Cow, fmt};

use http::{Method, uri::PathAndQuery};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

/// A pattern of paths: segments, `{name}` for any one segment, and `**` at the end for any remaining segments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PathPattern {
    text: String,
    segments: Vec<Segment>,
    /// `true` if the pattern ends with `**`.
    is_prefix: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Segment {
    Literal(String),
    Any,
}

impl PathPattern {
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let Some(rest) = text.strip_prefix('/') else {
            return Err(format!(
                "`{text}` is no path, expected one that begins with /"
            ));
        };
        if text.contains(['?', '#', '%', ';']) {
            return Err(format!(
                "`{text}` is no path, expected one without a query, an escape or a parameter"
            ));
        }
        let (mut segments, mut is_prefix) = (Vec::new(), false);
        for segment in rest.split('/').filter(|segment| !segment.is_empty()) {
            if is_prefix {
                return Err(format!(
                    "expected `**` only at the end of a path, found `{text}`"
                ));
            }
            if segment == "**" {
                is_prefix = true;
                continue;
            }
            let inner = segment
                .strip_prefix('{')
                .and_then(|rest| rest.strip_suffix('}'));
            segments.push(match inner {
                Some(name) if !name.is_empty() && !name.contains(['{', '}', '*']) => Segment::Any,
                None if !segment.contains(['{', '}', '*']) => Segment::Literal(segment.to_owned()),
                Some(_) | None => {
                    return Err(format!(
                        "`{segment}` is no segment of a path, expected a text, {{name}} or ** at the end"
                    ));
                }
            });
        }
        let text = text.to_owned();
        Ok(Self {
            text,
            segments,
            is_prefix,
        })
    }

    fn is_match(&self, path: &[Cow<'_, str>], ignores_case: bool) -> bool {
        let length_fits = if self.is_prefix {
            path.len() >= self.segments.len()
        } else {
            path.len() == self.segments.len()
        };
        length_fits
            && self
                .segments
                .iter()
                .zip(path)
                .all(|(segment, part)| match segment {
                    Segment::Literal(literal) if ignores_case => eq_ignore_case(literal, part),
                    Segment::Literal(literal) => literal == part,
                    Segment::Any => true,
                })
    }

    /// Returns `true` if each path that matches `other` also matches this pattern.
    fn covers(&self, other: &Self, ignores_case: bool) -> bool {
        let length_fits = if self.is_prefix {
            other.segments.len() >= self.segments.len()
        } else {
            !other.is_prefix && other.segments.len() == self.segments.len()
        };
        length_fits
            && self
                .segments
                .iter()
                .zip(&other.segments)
                .all(|pair| match pair {
                    (Segment::Any, _) => true,
                    (Segment::Literal(a), Segment::Literal(b)) if ignores_case => {
                        eq_ignore_case(a, b)
                    }
                    (Segment::Literal(a), Segment::Literal(b)) => a == b,
                    (Segment::Literal(_), Segment::Any) => false,
                })
    }

    /// Returns `true` if a path matches both patterns.
    fn overlaps(&self, other: &Self) -> bool {
        let (short, long) = if self.segments.len() <= other.segments.len() {
            (self, other)
        } else {
            (other, self)
        };
        let lengths_fit = short.segments.len() == long.segments.len() || short.is_prefix;
        lengths_fit
            && short
                .segments
                .iter()
                .zip(&long.segments)
                .all(|pair| match pair {
                    (Segment::Literal(a), Segment::Literal(b)) => eq_ignore_case(a, b),
                    (Segment::Any, _) | (_, Segment::Any) => true,
                })
    }
}

/// Returns `true` if a service that ignores letter case may read both segments as the same one.
fn eq_ignore_case(a: &str, b: &str) -> bool {
    a.eq_ignore_ascii_case(b) || folded(a).eq(folded(b))
}

/// Returns the letters of a segment without their case.
///
/// Services use different rules of Unicode. Letters that are equal by one of these rules are equal here. So `s` equals U+017F,
/// and `k` equals U+212A. `i` equals U+0130, whose small letter has a dot of its own, U+0307.
fn folded(segment: &str) -> impl Iterator<Item = char> {
    let lower = segment.chars().flat_map(char::to_lowercase);
    let upper = lower.flat_map(char::to_uppercase);
    upper.filter(|letter| *letter != '\u{307}')
}

impl fmt::Display for PathPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl<'de> Deserialize<'de> for PathPattern {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::parse(&String::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

impl Serialize for PathPattern {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}

/// The name of a host, in lower case and without a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HostPattern(String);

impl<'de> Deserialize<'de> for HostPattern {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let is_part = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
        if text.is_empty() || !text.bytes().all(is_part) {
            return Err(D::Error::custom(format!(
                "`{text}` is no host, expected a name without a port, such as \"api.example\""
            )));
        }
        // A trailing dot (RFC 1034, section 3.1) names the same host.
        let text = text.strip_suffix('.').unwrap_or(&text);
        Ok(Self(text.to_ascii_lowercase()))
    }
}

impl Serialize for HostPattern {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

/// The requests of a route. `==` does not compare `ignores_case`.
#[derive(Clone, Debug)]
pub(crate) struct RouteMatch {
    pub(crate) path: PathPattern,
    /// Empty for all methods.
    pub(crate) methods: Vec<Method>,
    pub(crate) host: Option<HostPattern>,
    /// `true` if matching ignores the letter case of a path. Protected routes ignore it, because many services do: a client
    /// could otherwise avoid the route.
    pub(crate) ignores_case: bool,
}

impl RouteMatch {
    pub(crate) fn is_match(&self, method: &Method, host: &str, path: &[Cow<'_, str>]) -> bool {
        (self.methods.is_empty() || self.methods.contains(method))
            && self
                .host
                .as_ref()
                .is_none_or(|own| own.0.eq_ignore_ascii_case(host))
            && self.path.is_match(path, self.ignores_case)
    }

    /// Returns `true` if each request that matches `other` also matches this rule.
    pub(crate) fn covers(&self, other: &Self) -> bool {
        let covers_methods = self.methods.is_empty()
            || (!other.methods.is_empty()
                && other
                    .methods
                    .iter()
                    .all(|method| self.methods.contains(method)));
        let covers_host = self.host.is_none() || self.host == other.host;
        let covers_case = self.ignores_case || !other.ignores_case;
        covers_methods
            && covers_host
            && covers_case
            && self.path.covers(&other.path, self.ignores_case)
    }

    /// Returns `true` if a request can match both rules.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        let hosts = match (&self.host, &other.host) {
            (Some(a), Some(b)) => a == b,
            (None, _) | (_, None) => true,
        };
        hosts && self.overlaps_without_host(other)
    }

    /// Returns `true` if two requests that differ only in their host can match one rule each. `self` comes before `other`.
    pub(crate) fn is_separated_by_host(&self, other: &Self) -> bool {
        self.host.is_some() && self.host != other.host && self.overlaps_without_host(other)
    }

    fn overlaps_without_host(&self, other: &Self) -> bool {
        let methods = self.methods.is_empty()
            || other.methods.is_empty()
            || self
                .methods
                .iter()
                .any(|method| other.methods.contains(method));
        methods && self.path.overlaps(&other.path)
    }
}

impl PartialEq for RouteMatch {
    fn eq(&self, other: &Self) -> bool {
        (&self.path, &self.methods, &self.host) == (&other.path, &other.methods, &other.host)
    }
}

impl fmt::Display for RouteMatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for method in &self.methods {
            write!(f, "{method} ")?;
        }
        if let Some(host) = &self.host {
            f.write_str(&host.0)?;
        }
        self.path.fmt(f)
    }
}

/// Returns the decoded segments of a path, so that each spelling of a path matches the same routes. Drops the part of a
/// segment after a semicolon, because some services ignore it.
///
/// Returns `None` for a path that an upstream may read as another one. Such a path
///
/// - begins with `//`, which parsers of URLs read as the start of a host;
/// - or has `.` or `..`, a segment of parameters alone, an encoded slash, a backslash, a control character or an incomplete
///   escape. `$` of a regular expression also matches before a line feed, so a pattern of an upstream may ignore it.
pub(crate) fn segments(path: &PathAndQuery) -> Option<Vec<Cow<'_, str>>> {
    let path = path.path();
    if path == "*" {
        return Some(vec![path.into()]);
    }
    if path.starts_with("//") {
        return None;
    }
    let mut segments = Vec::new();
    for raw in path.split('/') {
        let mut segment = decode(raw)?;
        if segment.contains(|c: char| c.is_control() || matches!(c, '\\' | '/')) {
            return None;
        }
        if let Some(end) = segment.find(';') {
            segment = Cow::Owned(segment[..end].to_owned());
        }
        match &*segment {
            "" if !raw.is_empty() => return None,
            "" => {}
            "." | ".." => return None,
            _ => segments.push(segment),
        }
    }
    Some(segments)
}

fn decode(raw: &str) -> Option<Cow<'_, str>> {
    if !raw.contains('%') {
        return Some(Cow::Borrowed(raw));
    }
    let (mut bytes, mut rest) = (Vec::with_capacity(raw.len()), raw.as_bytes());
    while let Some((&first, tail)) = rest.split_first() {
        if first != b'%' {
            bytes.push(first);
            rest = tail;
            continue;
        }
        let (escape, tail) = tail.split_at_checked(2)?;
        let digit = |byte: u8| char::from(byte).to_digit(16);
        let value = digit(escape[0])? * 16 + digit(escape[1])?;
        bytes.push(u8::try_from(value).ok()?);
        rest = tail;
    }
    // A segment that is not UTF-8 matches a `{name}`, and no literal.
    Some(Cow::Owned(String::from_utf8_lossy(&bytes).into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_match(pattern: &str, path: &str) -> bool {
        let pattern = PathPattern::parse(pattern).unwrap();
        let path = path.parse().unwrap();
        segments(&path).is_some_and(|path| pattern.is_match(&path, false))
    }

    #[test]
    fn host_has_no_trailing_dot() {
        let host: HostPattern = serde_json::from_str("\"API.example.\"").unwrap();
        assert_eq!(host, HostPattern("api.example".to_owned()));
    }

    #[test]
    fn pattern_matches_each_spelling_of_path() {
        for path in [
            "/v1/charges",
            "/v1/charges/",
            "/v1//charges//",
            "/v1/%63harges",
            "/v1/charges?a=b",
            "/v1;a/charges;b=c",
            "/v1/charges%3bb",
        ] {
            assert!(is_match("/v1/charges", path), "{path}");
        }
        for path in ["/v1/charge", "/v1/charges/7", "/V1/charges", "/v1", "/"] {
            assert!(!is_match("/v1/charges", path), "{path}");
        }
        let pattern = PathPattern::parse("/v1/Charges").unwrap();
        let path = "/V1/charges".parse().unwrap();
        let path = segments(&path).unwrap();
        assert!(pattern.is_match(&path, true) && !pattern.is_match(&path, false));
        assert!(is_match("/orders/{id}/refund", "/orders/7/refund"));
        assert!(!is_match("/orders/{id}/refund", "/orders/refund"));
        assert!(is_match("/**", "/") && is_match("/**", "/a/b") && is_match("/a/**", "/a"));
    }

    /// An upstream that ignores letter case may read both paths as the same one.
    #[test]
    fn pattern_ignores_case_of_all_letters() {
        for (pattern, path) in [
            ("/v1/checkouts", "/V1/chec%E2%84%AAout%C5%BF"),
            ("/items", "/%C4%B0tems"),
            ("/items", "/%C4%B1tems"),
            ("/\u{c4}rzte", "/%C3%A4rzte"),
            ("/stra\u{df}e", "/STRASSE"),
            ("/\u{3bf}\u{3b4}\u{3cc}\u{3c2}", "/%CE%9F%CE%94%CE%8C%CE%A3"),
        ] {
            let path = path.parse().unwrap();
            let path = segments(&path).unwrap();
            let is_match = |ignores_case| {
                let rule = rule(pattern, &[], None, ignores_case);
                rule.is_match(&Method::POST, "", &path)
            };
            assert!(is_match(true) && !is_match(false), "{pattern} {path:?}");
        }
        let lower = rule("/\u{e4}", &[], None, true);
        let upper = rule("/\u{c4}", &[], None, true);
        assert!(lower.covers(&upper) && lower.overlaps(&upper));
        assert!(!lower.covers(&rule("/a", &[], None, true)));
    }

    #[test]
    fn ambiguous_paths_match_nothing() {
        for path in [
            "/v1/./charges",
            "/v1/x/../charges",
            "/v1/%2e%2E/charges",
            "/v1/..;a=b/charges",
            "/v1/;a=b/charges",
            "/v1/charges/%3B7",
            "/v1%2fcharges",
            "/v1%5ccharges",
            "/v1/charges%0A",
            "/v1/charges%0d",
            "/v1%09/charges",
            "/v1/charges%00",
            "/v1/charges%7f",
            "/v1/charges%C2%85",
            "/v1/%zz",
            "/v1/%2",
            "//v1/charges",
            "//x/v1/charges",
            "///v1/charges",
            "//",
            "//?a=b",
        ] {
            assert_eq!(segments(&path.parse().unwrap()), None, "{path}");
        }
    }

    fn rule(path: &str, methods: &[Method], host: Option<&str>, ignores_case: bool) -> RouteMatch {
        RouteMatch {
            path: PathPattern::parse(path).unwrap(),
            methods: methods.to_vec(),
            host: host.map(|host| HostPattern(host.to_owned())),
            ignores_case,
        }
    }

    #[test]
    fn pattern_covers_patterns_with_fewer_paths() {
        for (a, b, expected) in [
            ("/a", "/a", true),
            ("/a", "/a/", true),
            ("/a", "/A", true),
            ("/a", "/b", false),
            ("/a/{id}", "/a/b", true),
            ("/a/{id}", "/a/{name}", true),
            ("/a/b", "/a/{id}", false),
            ("/**", "/a/{id}", true),
            ("/a/**", "/a", true),
            ("/a/**", "/a/b/**", true),
            ("/a/**", "/**", false),
            ("/a/{id}", "/a/**", false),
            ("/a/b/**", "/a/b", true),
            ("/a/b/**", "/a", false),
        ] {
            let covers = rule(a, &[], None, true).covers(&rule(b, &[], None, true));
            assert_eq!(covers, expected, "{a} {b}");
        }
    }

    #[test]
    fn rule_covers_fewer_methods_hosts_and_spellings() {
        let all = rule("/a", &[], None, true);
        let post = rule("/a", &[Method::POST], None, true);
        let both = rule("/a", &[Method::POST, Method::PUT], None, true);
        let x = rule("/a", &[], Some("x"), true);
        let y = rule("/a", &[], Some("y"), true);
        let lower = rule("/a", &[], None, false);
        let upper = rule("/A", &[], None, false);
        for (one, other) in [(&both, &post), (&all, &both), (&all, &x), (&all, &upper)] {
            assert!(one.covers(other), "{one:?} {other:?}");
            assert!(!other.covers(one), "{other:?} {one:?}");
        }
        for (one, other) in [(&x, &y), (&lower, &upper), (&post, &x)] {
            assert!(!one.covers(other), "{one:?} {other:?}");
            assert!(!other.covers(one), "{other:?} {one:?}");
        }
        for one in [&all, &post, &x, &lower] {
            assert!(one.covers(one), "{one:?}");
        }
    }

    #[test]
    fn overlap_is_symmetric() {
        for (a, b, expected) in [
            ("/a", "/a", true),
            ("/a", "/b", false),
            ("/a", "/A", true),
            ("/a/{id}", "/a/b", true),
            ("/a/{id}", "/a", false),
            ("/**", "/a/b", true),
            ("/a/**", "/b/**", false),
            ("/a/{id}/**", "/{x}/b", true),
            ("/a/b/**", "/a", false),
        ] {
            let (a, b) = (
                PathPattern::parse(a).unwrap(),
                PathPattern::parse(b).unwrap(),
            );
            assert_eq!(
                (a.overlaps(&b), b.overlaps(&a)),
                (expected, expected),
                "{a} {b}"
            );
        }
    }
}
