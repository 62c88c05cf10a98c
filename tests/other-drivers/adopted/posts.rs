// Posts of a blog: SeaORM, an entity, functions that take any connection, and a transaction in a closure.

use axum::{
    Json, Router,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::post,
};
use sea_orm::{
    ActiveModelTrait, ConnectionTrait, Database, DatabaseConnection, DbErr, Set, TransactionTrait,
};
use tokio::net::TcpListener;

/// The table of posts.
mod post {
    use sea_orm::entity::prelude::*;

    #[derive(Clone, Debug, PartialEq, Eq, DeriveEntityModel, serde::Serialize)]
    #[sea_orm(table_name = "posts")]
    pub(super) struct Model {
        #[sea_orm(primary_key)]
        pub(super) id: i32,
        pub(super) name: String,
    }

    #[derive(Copy, Clone, Debug, EnumIter, DeriveRelation)]
    pub(super) enum Relation {}

    impl ActiveModelBehavior for ActiveModel {}
}

/// The table of links to posts.
mod link {
    use sea_orm::entity::prelude::*;

    #[derive(Clone, Debug, PartialEq, Eq, DeriveEntityModel)]
    #[sea_orm(table_name = "links")]
    pub(super) struct Model {
        #[sea_orm(primary_key)]
        pub(super) id: i32,
        pub(super) post_id: i32,
    }

    #[derive(Copy, Clone, Debug, EnumIter, DeriveRelation)]
    pub(super) enum Relation {}

    impl ActiveModelBehavior for ActiveModel {}
}

#[derive(Clone)]
struct AppState {
    conn: DatabaseConnection,
}

/// Serves the application.
pub async fn run(
    listener: TcpListener,
    database_url: &str,
) -> Result<(), Box<dyn std::error::Error>> {
    let conn = Database::connect(database_url).await?;
    let app = Router::new()
        .route("/posts", post(create_post))
        .with_state(AppState { conn });
    Ok(axum::serve(listener, app).await?)
}

#[derive(serde::Deserialize)]
struct NewPost {
    name: String,
}

async fn create_post(
    State(state): State<AppState>,
    Json(form): Json<NewPost>,
) -> Result<Response, (StatusCode, String)> {
    let created = state.conn.transaction::<_, post::Model, DbErr>(|tx| {
        Box::pin(async move {
            let post = insert_post(tx, form).await?;
            insert_link(tx, post.id).await?;
            Ok(post)
        })
    });
    let post = created.await.map_err(internal_error)?;
    Ok((StatusCode::CREATED, Json(post)).into_response())
}

async fn insert_post(db: &impl ConnectionTrait, form: NewPost) -> Result<post::Model, DbErr> {
    let post = post::ActiveModel {
        name: Set(form.name),
        ..Default::default()
    };
    post.insert(db).await
}

async fn insert_link(db: &impl ConnectionTrait, post: i32) -> Result<link::Model, DbErr> {
    let link = link::ActiveModel {
        post_id: Set(post),
        ..Default::default()
    };
    link.insert(db).await
}

fn internal_error<E: std::error::Error>(error: E) -> (StatusCode, String) {
    (StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
}
