//! Fingerprints of requests that are observed, from the frames of their body as they pass.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, header, request};

use super::{CustomFn, FingerprintBy, FingerprintMethod, media_type};
use crate::{
    body::chunks::Chunks,
    digest::{FieldDigest, Secret, VERSION},
    request::{canonical_json, json_fingerprint::JsonFingerprint, key::RequestKey, multipart},
    store::Fingerprint,
};

/// Fingerprint of a request whose body is still arriving.
///
/// It equals no fingerprint of an enforced request. Two observed requests have equal fingerprints if those of the enforced
/// requests would be equal.
pub(crate) struct ObservedFingerprint {
    hash: FieldDigest,
    content: Content,
    len: usize,
}

enum Content {
    /// The body is no part of the fingerprint.
    Ignored,
    /// Each frame is hashed as it passes.
    Hashed,
    /// The form of the complete body decides.
    Json(JsonFingerprint, Chunks),
    Multipart(Box<HeaderMap>, Chunks),
    Custom(Arc<CustomFn>, Box<request::Parts>, Chunks),
}

impl FingerprintBy {
    /// Begins the fingerprint of a request with this key that is observed.
    pub(crate) fn observe(
        &self,
        secret: Option<&Secret>,
        key: &RequestKey,
        head: &request::Parts,
    ) -> ObservedFingerprint {
        let mut hash = FieldDigest::new(secret);
        hash.field(b"observed").field(VERSION);
        let content = if let FingerprintMethod::Custom(f) = &self.method {
            self.headers.add_listed(&head.headers, &mut hash);
            Content::Custom(Arc::clone(f), Box::new(head.clone()), Chunks::default())
        } else {
            let media_type = media_type(head);
            self.add_head(head, media_type.as_deref(), &mut hash);
            self.add_preconditions(key, head, &mut hash);
            self.content(head, media_type.as_deref())
        };
        ObservedFingerprint {
            hash,
            content,
            len: 0,
        }
    }

    fn content(&self, head: &request::Parts, media_type: Option<&str>) -> Content {
        match &self.method {
            FingerprintMethod::HeadOnly => Content::Ignored,
            FingerprintMethod::Json(by) if media_type.is_some_and(super::is_json) => {
                Content::Json(by.clone(), Chunks::default())
            }
            FingerprintMethod::Multipart if media_type == Some(super::FORM) => {
                let mut headers = HeaderMap::new();
                for line in head.headers.get_all(header::CONTENT_TYPE) {
                    headers.append(header::CONTENT_TYPE, line.clone());
                }
                Content::Multipart(Box::new(headers), Chunks::default())
            }
            _ => Content::Hashed,
        }
    }
}

impl ObservedFingerprint {
    /// Returns `true` if the body is stored until it is complete.
    pub(crate) const fn is_buffered(&self) -> bool {
        !matches!(self.content, Content::Ignored | Content::Hashed)
    }

    /// Returns `true` if the body has no limit.
    pub(crate) const fn is_head_only(&self) -> bool {
        matches!(self.content, Content::Ignored)
    }

    /// Returns the bytes of the body so far.
    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    /// Adds the next bytes of the body.
    pub(crate) fn push(&mut self, data: &Bytes) {
        self.len += data.len();
        match &mut self.content {
            Content::Ignored => {}
            Content::Hashed => self.hash.append(data),
            Content::Json(_, chunks)
            | Content::Multipart(_, chunks)
            | Content::Custom(_, _, chunks) => chunks.push(data.clone()),
        }
    }

    /// Returns the fingerprint of the complete request.
    pub(crate) fn finish(mut self) -> Fingerprint {
        let hash = &mut self.hash;
        match self.content {
            Content::Ignored => {
                hash.field(b"head");
            }
            Content::Hashed => {
                hash.number(self.len).field(b"raw");
            }
            Content::Json(by, chunks) => {
                let body = chunks.into_bytes();
                match canonical_json::canonical_form(&body, &by) {
                    Some(canonical) => hash.field(b"json").field(&canonical),
                    None => hash.field(b"raw").field(&body),
                };
            }
            Content::Multipart(headers, chunks) => {
                let body = chunks.into_bytes();
                match multipart::parts(&headers, &body) {
                    Some(parts) => {
                        hash.field(b"multipart");
                        parts.iter().fold(hash, |hash, part| hash.field(part))
                    }
                    None => hash.field(b"raw").field(&body),
                };
            }
            Content::Custom(f, head, chunks) => {
                hash.field(b"custom").field(&f(&head, &chunks.into_bytes()));
            }
        }
        Fingerprint::from_bytes(self.hash.finish())
    }
}
