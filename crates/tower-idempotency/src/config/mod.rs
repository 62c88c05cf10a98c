//! Settings of the layer: the rules for requests, responses, executions and limits.

pub(crate) mod preset;

use std::fmt;

use crate::{
    enforcement::EnforcementSwitch,
    execution, limits,
    request::{self, LeaseTerms},
    response,
    store::Ttl,
};

/// Settings of one layer.
#[derive(Clone)]
pub(crate) struct Config {
    pub(crate) request: request::rules::Rules,
    pub(crate) response: response::rules::Rules,
    pub(crate) execution: execution::rules::Rules,
    pub(crate) limits: limits::Rules,
    pub(crate) enforcement: EnforcementSwitch,
}

impl Config {
    /// Returns the terms of the leases that the process `owner` requests. `has_operation` is `true` if the store stores the
    /// operations of claims.
    pub(crate) fn lease_terms(&self, owner: &'static str, has_operation: bool) -> LeaseTerms {
        LeaseTerms {
            ttl: self.execution.lease_ttl,
            orphan_policy: self.execution.orphan_policy,
            orphan_retention: self.orphan_retention(),
            owner,
            has_operation,
        }
    }

    /// Returns how long an orphan is stored: as long as a record, unless it is set.
    pub(crate) fn orphan_retention(&self) -> Ttl {
        let orphan_retention = self.execution.orphan_retention;
        orphan_retention.unwrap_or(self.response.retention)
    }
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Config")
            .field("enforcement", &self.enforcement)
            .field("missing_key", &self.request.missing_key)
            .field("principal", &self.request.principal)
            .field("key_reuse", &self.request.key_reuse)
            .field("concurrent_requests", &self.execution.concurrent_requests)
            .field("lease_ttl", &self.execution.lease_ttl)
            .field("orphan_policy", &self.execution.orphan_policy)
            .field("store_failure", &self.execution.store_failure)
            .field("request_limit", &self.request.body_limit)
            .field("response_limit", &self.response.body_limit)
            .field("retention", &self.response.retention)
            .finish_non_exhaustive()
    }
}
