//! Handlers' transactions with diesel-async, SeaORM and sqlx 0.8, together with a store of sqlx 0.9.

#[macro_use]
mod suite;
mod adopted;
mod diesel;
mod faults;
mod fleet;
mod sea_orm;

use other_drivers::Sqlx08;

mod sqlx_08 {
    suite!(super::Sqlx08);
}
