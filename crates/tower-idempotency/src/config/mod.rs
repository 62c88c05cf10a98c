//! The settings of the layer: one set of rules for each room.

pub(crate) mod preset;

use std::fmt;

use crate::{execution, limits, request, response, store::Ttl};

/// The settings of one layer.
#[derive(Clone)]
pub(crate) struct Config {
    pub(crate) request: request::rules::Rules,
    pub(crate) response: response::rules::Rules,
    pub(crate) execution: execution::rules::Rules,
    pub(crate) limits: limits::Rules,
}

impl Config {
    /// Returns how long an orphan is stored: as long as a record, unless it is set.
    pub(crate) fn orphan_retention(&self) -> Ttl {
        let orphan_retention = self.execution.orphan_retention;
        orphan_retention.unwrap_or(self.response.retention)
    }
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Config")
            .field("missing_key", &self.request.missing_key)
            .field("principal", &self.request.principal)
            .field("key_reuse", &self.request.key_reuse)
            .field("concurrent_requests", &self.execution.concurrent_requests)
            .field("lease", &self.execution.lease)
            .field("orphans", &self.execution.orphans)
            .field("store_failure", &self.execution.store_failure)
            .field("request_limit", &self.request.body_limit)
            .field("response_limit", &self.response.body_limit)
            .field("retention", &self.response.retention)
            .finish_non_exhaustive()
    }
}
