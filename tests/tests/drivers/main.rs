//! Handlers' transactions with drivers other than sqlx 0.9, together with a store of sqlx.

mod tokio_postgres;
mod tokio_postgres_faults;
