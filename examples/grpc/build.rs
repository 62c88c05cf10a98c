//! Generates the service and its client without `protoc`. A service with `protoc` uses `tonic-prost-build` and `proto/`
//! instead.

use tonic_build::manual::{Builder, Method, MethodBuilder, Service};

fn method(name: &str, route: &str, input: &str, output: &str) -> MethodBuilder {
    Method::builder()
        .name(name)
        .route_name(route)
        .input_type(format!("crate::messages::{input}"))
        .output_type(format!("crate::messages::{output}"))
        .codec_path("tonic_prost::ProstCodec")
}

fn main() {
    let service = Service::builder()
        .package("payments.v1")
        .name("Payments")
        .comment("Payments from accounts.")
        .method(method("pay", "Pay", "PayRequest", "Payment").build())
        .method(method("get_balance", "GetBalance", "BalanceRequest", "Balance").build())
        .method(
            method("watch", "Watch", "BalanceRequest", "Payment")
                .server_streaming()
                .build(),
        )
        .method(
            method("pay_all", "PayAll", "PayRequest", "Payment")
                .client_streaming()
                .server_streaming()
                .build(),
        )
        .build();
    Builder::new().compile(&[service]);
    println!("cargo::rerun-if-changed=build.rs");
}
