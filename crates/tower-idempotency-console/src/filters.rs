//! Filters of the templates.

#![expect(
    unreachable_pub,
    reason = "the macro of askama creates items that are public"
)]

/// Encodes a text as the value of a query.
#[askama::filter_fn]
pub(crate) fn encoded(text: &str, _: &dyn askama::Values) -> askama::Result<String> {
    Ok(form_urlencoded::byte_serialize(text.as_bytes()).collect())
}
