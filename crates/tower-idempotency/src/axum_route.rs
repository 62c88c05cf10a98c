//! Calls the routes of axum without a wrapper around the body.

use std::{any::Any, convert::Infallible};

use axum::routing::Route;
use axum_core::body::Body;
use http::Request;
use tower_service::Service;

/// Calls a service that is a route of axum with a body of axum. Returns the request if the service or the body has another
/// type.
///
/// A route accepts every body and boxes each one that is not axum's own. For a request without a key, that allocation and a
/// boxed call for each frame would be most of the cost of the layer.
#[expect(
    clippy::result_large_err,
    reason = "most calls return the request, and a box would cost what this saves"
)]
pub(crate) fn call<S, F, B>(service: &mut S, req: Request<B>) -> Result<F, Request<B>>
where
    S: 'static,
    F: 'static,
    B: 'static,
{
    let Some(route) = (service as &mut dyn Any).downcast_mut::<Route<Infallible>>() else {
        return Err(req);
    };
    if !is_same::<F, <Route as Service<Request<Body>>>::Future>() {
        return Err(req);
    }
    let req = cast::<Request<B>, Request<Body>>(req)?;
    cast(route.call(req)).map_err(|_| unreachable!("the types were compared"))
}

fn is_same<A: 'static, B: 'static>() -> bool {
    std::any::TypeId::of::<A>() == std::any::TypeId::of::<B>()
}

/// Returns the value as another type if that is its type, else the value.
fn cast<A: 'static, B: 'static>(value: A) -> Result<B, A> {
    let mut value = Some(value);
    let cast = (&mut value as &mut dyn Any).downcast_mut::<Option<B>>();
    match cast.and_then(Option::take) {
        Some(cast) => Ok(cast),
        None => Err(value.expect("the value was not taken")),
    }
}
