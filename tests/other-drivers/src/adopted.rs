//! Three applications, each without the layer, with it, and exactly-once. The build script makes the two latter from the
//! first one and the diffs in `adopted`.

/// Subscriptions, by sqlx 0.8.
#[path = "../adopted/newsletter.rs"]
pub mod newsletter;
/// Posts, by SeaORM.
#[path = "../adopted/posts.rs"]
pub mod posts;
/// Users, by diesel-async.
#[path = "../adopted/users.rs"]
pub mod users;

macro_rules! adopted {
    ($($module:ident: $file:literal,)*) => { $(
        #[expect(missing_docs, reason = "the module that it was made from has documentation")]
        pub mod $module {
            include!(concat!(env!("OUT_DIR"), $file));
        }
    )* };
}

adopted! {
    newsletter_layer: "/newsletter_layer.rs",
    newsletter_exactly_once: "/newsletter_exactly_once.rs",
    users_layer: "/users_layer.rs",
    users_exactly_once: "/users_exactly_once.rs",
    posts_layer: "/posts_layer.rs",
    posts_exactly_once: "/posts_exactly_once.rs",
}
