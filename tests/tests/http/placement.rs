//! Middleware inside and outside of the layer, and the routes that it covers, as `docs/guide/placement.md` states.

use std::time::Duration;

use axum::{
    Extension, Router,
    body::Body,
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::any,
};
use http::{Request, StatusCode};
use tests::{Effects, barrier::Barrier, created, post, send};
use tokio::time::sleep;
use tower_idempotency::{IdempotencyLayer, MemoryStore};

fn layer() -> IdempotencyLayer {
    IdempotencyLayer::new(MemoryStore::new())
}

fn order() -> Request<Body> {
    post("/orders", "k", "order")
}

// F-929
#[tokio::test(start_paused = true)]
async fn outer_middleware_ends_with_its_client() {
    for is_inside in [true, false] {
        let (effects, saves, barrier) = (Effects::default(), Effects::default(), Barrier::closed());
        let (counted, passed) = (effects.clone(), barrier.clone());
        let app = Router::new().fallback(async move || {
            passed.pass().await;
            created(counted.happen())
        });
        let saved = saves.clone();
        let session = middleware::from_fn(move |req: Request<Body>, next: Next| {
            let saved = saved.clone();
            async move {
                let res = next.run(req).await;
                saved.happen();
                res
            }
        });
        let layer = layer();
        let app = if is_inside {
            app.layer(session).layer(layer.clone())
        } else {
            app.layer(layer.clone()).layer(session)
        };
        let client = tokio::spawn({
            let app = app.clone();
            async move { send(&app, order()).await }
        });
        barrier.arrival().await;
        client.abort();
        assert!(client.await.is_err_and(|error| error.is_cancelled()));
        barrier.open_for_good();
        while layer.in_flight() > 0 {
            sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(effects.count(), 1);
        assert_eq!(saves.count(), u64::from(is_inside));

        assert!(send(&app, order()).await.is_replay());
        // Outside, the middleware also runs for the replay.
        assert_eq!((effects.count(), saves.count()), (1, 1), "{is_inside}");
    }
}

// F-929
#[tokio::test(start_paused = true)]
async fn outer_middleware_fails_after_record() {
    for is_inside in [true, false] {
        let (effects, commits) = (Effects::default(), Effects::default());
        let counted = effects.clone();
        let app = Router::new().fallback(async move || created(counted.happen()));
        let transaction = middleware::from_fn(move |req: Request<Body>, next: Next| {
            let commits = commits.clone();
            async move {
                let res = next.run(req).await;
                match commits.happen() {
                    1 => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
                    _ => res,
                }
            }
        });
        let app = if is_inside {
            app.layer(transaction).layer(layer())
        } else {
            app.layer(layer()).layer(transaction)
        };
        let failed = send(&app, order()).await;
        assert_eq!(failed.status, StatusCode::INTERNAL_SERVER_ERROR);
        let retry = send(&app, order()).await;
        assert_eq!(retry.status, StatusCode::CREATED);
        assert_eq!(retry.is_replay(), !is_inside);
        assert_eq!(effects.count(), if is_inside { 2 } else { 1 });
    }
}

/// An error that a middleware renders.
#[derive(Clone)]
struct SoldOut;

async fn render(res: Response) -> Response {
    if res.extensions().get::<SoldOut>().is_some() {
        (StatusCode::UNPROCESSABLE_ENTITY, "sold out").into_response()
    } else {
        res
    }
}

#[tokio::test(start_paused = true)]
async fn outer_middleware_finds_no_extension_in_replay() {
    for is_inside in [true, false] {
        let app = Router::new().fallback(async || (StatusCode::CONFLICT, Extension(SoldOut)));
        let rendering = middleware::map_response(render);
        let app = if is_inside {
            app.layer(rendering).layer(layer())
        } else {
            app.layer(layer()).layer(rendering)
        };
        let first = send(&app, order()).await;
        assert_eq!((first.status.as_u16(), first.text()), (422, "sold out"));
        let retry = send(&app, order()).await;
        assert!(retry.is_replay());
        let expected = if is_inside {
            (422, "sold out")
        } else {
            (409, "")
        };
        assert_eq!((retry.status.as_u16(), retry.text()), expected);
    }
}

#[tokio::test(start_paused = true)]
async fn route_layer_covers_earlier_routes_only() {
    let [before, after, other] = [(); 3].map(|()| Effects::default());
    let handler = |effects: &Effects| {
        let counted = effects.clone();
        async move || created(counted.happen())
    };
    let app = Router::new()
        .route("/before", any(handler(&before)))
        .route_layer(layer())
        .route("/after", any(handler(&after)))
        .fallback(handler(&other));
    for (path, effects, expected) in [
        ("/before", before, 1),
        ("/after", after, 2),
        ("/other", other, 2),
    ] {
        for _ in 0..2 {
            let res = send(&app, post(path, "k", "order")).await;
            assert_eq!(res.status, StatusCode::CREATED);
        }
        assert_eq!(effects.count(), expected, "{path}");
    }
}
