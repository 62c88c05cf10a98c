//! gRPC calls: which methods are protected, which codes are outcomes, and the responses of the layer itself.
//!
//! A gRPC call is HTTP/2 with length-prefixed messages, and its status is in the trailers. `docs/guide/grpc.md` explains the
//! settings.

mod code;
mod details;
mod message;
mod methods;
mod response;

pub(crate) use self::{
    code::GRPC_STATUS,
    message::{MessageReader, RequestShape},
    methods::{CallKind, Side, is_grpc_response},
};
pub use self::{code::GrpcCode, methods::GrpcMethods, response::grpc_response};
