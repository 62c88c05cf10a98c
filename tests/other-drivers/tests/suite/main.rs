//! Handlers' transactions with diesel-async, SeaORM and sqlx 0.8, beside a store of sqlx 0.9.

#[macro_use]
mod suite;
mod diesel;
mod faults;
mod fleet;
mod sea_orm;

use other_drivers::Sqlx08;

mod sqlx_08 {
    suite!(super::Sqlx08);
}
