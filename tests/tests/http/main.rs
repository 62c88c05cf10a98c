//! Keys, fingerprints, bodies, recording and replay over one store in memory.
//!
//! Tests without a socket run on a paused clock, so that no timeout passes because of a slow machine.

mod acp;
mod auto_traits;
mod axum_and_hyper;
mod bodies;
mod bodiless;
mod bounds;
mod changes;
mod concurrency;
mod coverage;
mod duplicates;
mod errors;
mod extremes;
mod fingerprints;
mod gem;
mod grpc;
mod hostile;
mod keys;
mod multipart;
mod observe;
mod observe_wire;
mod openapi;
mod passing;
mod placement;
mod policy;
mod presets;
mod principals;
mod published;
mod recording;
mod redirects;
mod refusal_texts;
mod replay;
mod scope;
mod service_keys;
mod shares;
mod traces;
mod world;
