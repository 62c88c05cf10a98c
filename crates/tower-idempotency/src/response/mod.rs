//! From the response of the handler to the record, and from the record to the response of a retry.

pub(crate) mod directives;
pub(crate) mod disposition;
pub(crate) mod problem;
pub(crate) mod reject;
pub(crate) mod replay;
pub(crate) mod rules;
