//! Responses: records the response of the handler, replays it to retries, and rejects requests.

pub(crate) mod buffer;
pub(crate) mod directives;
pub(crate) mod disposition;
pub(crate) mod problem;
pub(crate) mod reject;
pub(crate) mod replay;
pub(crate) mod rules;
