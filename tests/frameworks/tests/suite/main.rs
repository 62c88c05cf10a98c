//! The layer in each framework, over sockets. The list of behaviours is the same for all.

mod behaviours;
mod documents;

use frameworks::{
    actix::Actix,
    axum_07::Axum07,
    axum_08::{Axum08, Axum08Builder},
    hyper_service::Hyper,
    poem_endpoint::Poem,
    salvo_router::Salvo,
    warp_filter::Warp,
};

/// Instantiates the behaviours for each framework.
macro_rules! suite {
    ($($module:ident: $framework:ident,)*) => {$(
        mod $module {
            use super::$framework;
            suite!(@tests $framework:
                new_request_executes,
                retry_is_replayed_byte_for_byte,
                other_request_gets_422,
                keyless_request_executes_each_time,
                concurrent_duplicate_gets_409,
                handler_error_frees_key,
                response_extension_blocks_retry,
                execution_continues_after_disconnect,
                keyless_handler_after_disconnect,
                incomplete_request_executes_nothing,
                chunked_request_executes_once,
                event_stream_is_not_recorded,
                callers_have_keys_of_their_own,
                nested_route_is_another_request,
                connection_serves_several_requests,
            );
        }
    )*};
    (@tests $framework:ident: $($test:ident,)*) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $test() {
            tests::barrier::bounded(crate::behaviours::$test::<$framework>()).await;
        }
    )*};
}

suite! {
    axum_08: Axum08,
    axum_08_builder: Axum08Builder,
    axum_07: Axum07,
    hyper: Hyper,
    poem: Poem,
    salvo: Salvo,
    warp: Warp,
    actix: Actix,
}
