//! Consumers of a retry queue and their operators: killed at named points, repeated and raced. The parcels are counted.

mod attempts;
mod harness;
mod killed;
mod operators;
mod plans;
mod points;
mod process;

/// Runs each test on PostgreSQL and on Redis.
macro_rules! on_each_database {
    ($($test:ident),* $(,)?) => {
        mod postgres {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $test() {
                    super::$test(crate::harness::Harness::postgres(concat!("parcels_", stringify!($test))).await).await;
                }
            )*
        }

        mod redis {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $test() {
                    super::$test(crate::harness::Harness::redis().await).await;
                }
            )*
        }
    };
}
pub(crate) use on_each_database;
