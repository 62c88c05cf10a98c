//! The SQL stores on PostgreSQL, MariaDB and SQLite.

mod checks;
mod completer;
mod conformance_mariadb;
mod conformance_postgres;
mod conformance_sqlite;
mod connections;
mod costs;
mod cut_off;
mod damaged;
mod deadlocks;
mod fences;
mod golden_rows;
mod held_request;
mod inspect;
mod migrations;
mod plans;
mod purging;
mod secrets;
mod silence;
mod sqlite_file;
mod stores;
mod transaction_faults;
mod transactions;
mod versions;
mod waiting;
mod warnings;
