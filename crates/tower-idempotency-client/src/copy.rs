//! A copy of a request, for retries.

use std::any::Any;

use bytes::Bytes;
use http::{Extensions, HeaderMap, HeaderName, HeaderValue, Method, Request, Uri, Version};
use http_body_util::{Empty, Full};

/// Copy of a request without its body. Makes at most one allocation if the caller has set no extensions, and none without
/// headers.
pub(crate) struct RequestCopy {
    method: Method,
    uri: Uri,
    version: Version,
    headers: HeaderCopy,
    /// Extensions of the caller, if there are any besides the operation.
    extensions: Option<Extensions>,
}

impl RequestCopy {
    /// Copies a request, with these extensions.
    pub(crate) fn new<B>(req: &Request<B>, extensions: Option<Extensions>) -> Self {
        Self {
            method: req.method().clone(),
            uri: req.uri().clone(),
            version: req.version(),
            headers: HeaderCopy::of(req.headers()),
            extensions,
        }
    }

    /// Returns a request with this body.
    pub(crate) fn request<B>(&self, body: B) -> Request<B> {
        let mut req = Request::new(body);
        *req.method_mut() = self.method.clone();
        *req.uri_mut() = self.uri.clone();
        *req.version_mut() = self.version;
        *req.headers_mut() = self.headers.headers();
        if let Some(extensions) = &self.extensions {
            *req.extensions_mut() = extensions.clone();
        }
        req
    }
}

/// Headers in one buffer. Each line has the length of its name, the length of its value, a flag, the name and the value.
///
/// A clone of a `HeaderMap` allocates twice, and once more for each value that is cloned for the first time.
struct HeaderCopy(Vec<u8>);

impl HeaderCopy {
    fn of(headers: &HeaderMap) -> Self {
        let length =
            |(name, value): (&HeaderName, &HeaderValue)| PREFIX + name.as_str().len() + value.len();
        let mut buffer = Vec::with_capacity(headers.iter().map(length).sum());
        for (name, value) in headers {
            let name = name.as_str().as_bytes();
            let lengths = (u32::try_from(name.len()), u32::try_from(value.len()));
            // No header of 4 GiB fits into a `HeaderMap` that an HTTP client sends.
            let (Ok(name_length), Ok(value_length)) = lengths else {
                continue;
            };
            buffer.extend_from_slice(&name_length.to_be_bytes());
            buffer.extend_from_slice(&value_length.to_be_bytes());
            buffer.push(u8::from(value.is_sensitive()));
            buffer.extend_from_slice(name);
            buffer.extend_from_slice(value.as_bytes());
        }
        Self(buffer)
    }

    fn headers(&self) -> HeaderMap {
        let mut headers = HeaderMap::new();
        let mut rest = self.0.as_slice();
        while let Some((name, value, following)) = next_line(rest) {
            // Cannot fail: the original map had as many lines.
            let _ = headers.try_append(name, value);
            rest = following;
        }
        headers
    }
}

/// Returns the first line and the bytes after it. `None` at the end.
fn next_line(buffer: &[u8]) -> Option<(HeaderName, HeaderValue, &[u8])> {
    let (name_length, rest) = buffer.split_first_chunk()?;
    let (value_length, rest) = rest.split_first_chunk()?;
    let (&is_sensitive, rest) = rest.split_first()?;
    let (name, rest) = rest.split_at_checked(u32::from_be_bytes(*name_length) as usize)?;
    let (value, rest) = rest.split_at_checked(u32::from_be_bytes(*value_length) as usize)?;
    let mut value = HeaderValue::from_bytes(value).ok()?;
    value.set_sensitive(is_sensitive == 1);
    Some((HeaderName::from_bytes(name).ok()?, value, rest))
}

const PREFIX: usize = 9;

/// Function of the caller that copies bodies of one type. Returns `None` if it cannot copy a body.
pub(crate) type CloneBody<B> = Box<dyn Fn(&B) -> Option<B> + Send + Sync>;

/// Returns a copy of a body, or `None` if it cannot be sent twice.
///
/// `clone_body` may be a [`CloneBody`] of this type. Bodies that contain all their bytes are copied without it.
pub(crate) fn clone_body<B: 'static>(
    clone_body: Option<&(dyn Any + Send + Sync)>,
    body: &B,
) -> Option<B> {
    if let Some(clone_body) = clone_body.and_then(|any| any.downcast_ref::<CloneBody<B>>()) {
        return clone_body(body);
    }
    clone_as::<Full<Bytes>, B>(body)
        .or_else(|| clone_as::<Empty<Bytes>, B>(body))
        .or_else(|| clone_as::<String, B>(body))
}

/// Returns a clone of the body if its type is `T`.
fn clone_as<T: Clone + 'static, B: 'static>(body: &B) -> Option<B> {
    let body = (body as &dyn Any).downcast_ref::<T>()?;
    let mut clone = Some(body.clone());
    (&mut clone as &mut dyn Any)
        .downcast_mut::<Option<B>>()?
        .take()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copy_keeps_everything() {
        let mut secret = HeaderValue::from_static("secret");
        secret.set_sensitive(true);
        let mut original = Request::put("https://example.com/a?b")
            .version(Version::HTTP_2)
            .header("accept", "x")
            .header("x-repeated", "1")
            .header("x-repeated", HeaderValue::from_bytes(b"\xe9").unwrap())
            .header("authorization", secret)
            .header("x-empty", "")
            .extension(7_u32)
            .body(Full::new(Bytes::from("body")))
            .unwrap();
        let extensions = Some(original.extensions().clone());
        let body = clone_body(None, original.body()).unwrap();
        let copy = RequestCopy::new(&original, extensions);
        let mut again = copy.request(body);
        assert_eq!(again.headers(), original.headers());
        assert!(again.headers()["authorization"].is_sensitive());
        assert!(!again.headers()["accept"].is_sensitive());
        assert_eq!(again.extensions_mut().remove(), Some(7_u32));
        original.headers_mut().clear();
        again.headers_mut().clear();
        assert_eq!(format!("{again:?}"), format!("{original:?}"));
    }

    #[test]
    fn only_whole_bodies_are_copied() {
        assert!(clone_body(None, &Empty::<Bytes>::new()).is_some());
        assert_eq!(
            clone_body(None, &"body".to_owned()).as_deref(),
            Some("body")
        );
        let stream = http_body_util::StreamBody::new(());
        assert!(clone_body(None, &stream).is_none());
        let by_caller: CloneBody<u8> = Box::new(|&body| (body > 0).then_some(body));
        let by_caller: Box<dyn Any + Send + Sync> = Box::new(by_caller);
        assert_eq!(clone_body(Some(&*by_caller), &7_u8), Some(7));
        assert_eq!(clone_body(Some(&*by_caller), &0_u8), None);
    }
}
