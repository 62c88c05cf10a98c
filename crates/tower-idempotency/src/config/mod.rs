//! Settings of the layer: the rules for requests, responses, executions and limits.

pub(crate) mod preset;

use std::{fmt, sync::Arc};

#[cfg(feature = "grpc")]
use http::header;

#[cfg(feature = "grpc")]
use crate::grpc::GrpcMethods;
use crate::{
    enforcement::EnforcementSwitch,
    execution,
    layer_name::LayerName,
    limits,
    request::{self, LeaseTerms},
    response,
    store::Ttl,
    telemetry::Warnings,
};

/// Settings of one layer.
#[derive(Clone)]
pub(crate) struct Config {
    pub(crate) request: request::rules::Rules,
    pub(crate) response: response::rules::Rules,
    pub(crate) execution: execution::rules::Rules,
    pub(crate) limits: limits::Rules,
    pub(crate) enforcement: EnforcementSwitch,
    #[cfg(feature = "grpc")]
    pub(crate) grpc: Option<GrpcMethods>,
    /// The settings of the layer, if these are its settings for gRPC calls.
    #[cfg(feature = "grpc")]
    pub(crate) of_layer: Option<Arc<Config>>,
}

impl Config {
    /// Returns the terms of the leases that the process `owner` requests.
    pub(crate) fn lease_terms(&self, owner: &'static str) -> LeaseTerms {
        LeaseTerms {
            ttl: self.execution.lease_ttl,
            orphan_policy: self.execution.orphan_policy,
            orphan_retention: self.orphan_retention(),
            owner,
        }
    }

    /// Returns the orphan retention: the configured one, or else the retention of records.
    pub(crate) fn orphan_retention(&self) -> Ttl {
        let orphan_retention = self.execution.orphan_retention;
        orphan_retention.unwrap_or(self.response.retention)
    }

    /// Returns the name of the layer.
    pub(crate) fn layer(&self) -> &LayerName {
        self.response.layer()
    }

    /// Returns the warnings of the layer.
    pub(crate) fn warnings(&self) -> &Arc<Warnings> {
        &self.response.warnings
    }

    /// Returns `true` if these are settings of the layer with the settings `layer`.
    pub(crate) fn is_of_layer(self: &Arc<Self>, layer: &Arc<Self>) -> bool {
        #[cfg(feature = "grpc")]
        if let Some(of_layer) = &self.of_layer {
            return Arc::ptr_eq(of_layer, layer);
        }
        Arc::ptr_eq(self, layer)
    }

    /// Returns the settings for gRPC calls of protected methods, or `None` if no method is protected.
    #[cfg(feature = "grpc")]
    pub(crate) fn for_grpc(self: &Arc<Self>) -> Option<Self> {
        let methods = self.grpc.clone()?;
        let mut config = Self::clone(self);
        config.of_layer = Some(Arc::clone(self));
        config.request.is_grpc = true;
        config.response.grpc = Some(methods);
        config.response.error_response = response::rules::ErrorResponse::Grpc;
        let replayed = Arc::clone(&self.response.replayed_headers);
        config.response.replayed_headers =
            Arc::new(move |name| is_replayed_in_grpc(name) || replayed(name));
        Some(config)
    }
}

/// Returns `true` if a replay of a gRPC call has this header with any settings. Without its status, it would be another response.
#[cfg(feature = "grpc")]
pub(crate) fn is_replayed_in_grpc(name: &header::HeaderName) -> bool {
    name == header::CONTENT_TYPE || name.as_str().starts_with("grpc-")
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
