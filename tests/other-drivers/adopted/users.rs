// Users of a service: diesel-async in a pool of deadpool, a transaction in a closure, and errors as a status and a text.

use axum::{Json, Router, extract::State, http::StatusCode, routing::post};
use diesel::prelude::*;
use diesel_async::{
    AsyncConnection, AsyncPgConnection, RunQueryDsl,
    pooled_connection::{AsyncDieselConnectionManager, deadpool},
};
use tokio::net::TcpListener;

use self::schema::{users, welcomes};

/// The tables.
mod schema {
    diesel::table! {
        users (id) {
            id -> Integer,
            name -> Text,
        }
    }

    diesel::table! {
        welcomes (id) {
            id -> Integer,
            user_id -> Integer,
        }
    }
}

#[derive(Queryable, serde::Serialize)]
struct User {
    id: i32,
    name: String,
}

#[derive(Insertable, serde::Deserialize)]
#[diesel(table_name = users)]
struct NewUser {
    name: String,
}

type Pool = deadpool::Pool<AsyncPgConnection>;

/// Serves the application.
pub async fn run(
    listener: TcpListener,
    database_url: &str,
) -> Result<(), Box<dyn std::error::Error>> {
    let manager = AsyncDieselConnectionManager::new(database_url);
    let pool = Pool::builder(manager).build()?;
    let app = Router::new()
        .route("/user/create", post(create_user))
        .with_state(pool);
    Ok(axum::serve(listener, app).await?)
}

async fn create_user(
    State(pool): State<Pool>,
    Json(new_user): Json<NewUser>,
) -> Result<(StatusCode, Json<User>), (StatusCode, String)> {
    let mut conn = pool.get().await.map_err(internal_error)?;
    let created = conn.transaction(async |conn| {
        let user: User = diesel::insert_into(users::table)
            .values(&new_user)
            .get_result(conn)
            .await?;
        diesel::insert_into(welcomes::table)
            .values(welcomes::user_id.eq(user.id))
            .execute(conn)
            .await?;
        Ok::<_, diesel::result::Error>(user)
    });
    let user = created.await.map_err(internal_error)?;
    Ok((StatusCode::CREATED, Json(user)))
}

fn internal_error<E: std::error::Error>(error: E) -> (StatusCode, String) {
    (StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
}
