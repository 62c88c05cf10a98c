//! The stores that a campaign can be run on.

use std::time::Duration;

/// A store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "the list of all stores")]
pub enum Kind {
    /// `PostgresStore` on PostgreSQL.
    Postgres,
    /// `MySqlStore` on MariaDB.
    MariaDb,
    /// `SqliteStore` on a file.
    Sqlite,
    /// `RedisStore` on a Redis with an append-only file, unless the fault is data loss.
    Redis,
    /// `RedisStore` on three masters with a replica each.
    RedisCluster,
    /// `DynamoDbStore` on dynoxide.
    DynamoDb,
}

impl Kind {
    /// All stores.
    pub const ALL: [Self; 6] = [
        Self::Postgres,
        Self::MariaDb,
        Self::Sqlite,
        Self::Redis,
        Self::RedisCluster,
        Self::DynamoDb,
    ];

    /// Returns the name of the store on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Postgres => "postgres",
            Self::MariaDb => "mariadb",
            Self::Sqlite => "sqlite",
            Self::Redis => "redis",
            Self::RedisCluster => "redis-cluster",
            Self::DynamoDb => "dynamodb",
        }
    }

    /// Returns `true` if the store can commit effect and record in one transaction.
    #[must_use]
    pub fn has_transactions(self) -> bool {
        matches!(self, Self::Postgres | Self::MariaDb | Self::Sqlite)
    }

    /// Returns the number of processes that share the store.
    pub(super) fn members(self) -> usize {
        match self {
            Self::Postgres => 8,
            Self::MariaDb | Self::Redis => 6,
            Self::RedisCluster | Self::Sqlite | Self::DynamoDb => 4,
        }
    }

    /// Returns the number of keys that are requested at a time. Most of them wait for the lease of a member that was
    /// struck.
    pub(super) fn at_a_time(self) -> usize {
        match self {
            Self::Redis | Self::RedisCluster | Self::MariaDb => 48,
            Self::Postgres | Self::Sqlite => 24,
            Self::DynamoDb => 16,
        }
    }

    /// Returns the lease duration: longer if a call takes longer.
    pub(super) fn lease(self) -> Duration {
        Duration::from_millis(match self {
            Self::Postgres | Self::MariaDb | Self::Redis | Self::Sqlite => 700,
            Self::RedisCluster => 1000,
            Self::DynamoDb => 1500,
        })
    }

    /// Returns the delay between the start of a member and the next strike. By then the member has connected and has work
    /// to lose.
    pub(super) fn strike_interval(self) -> Duration {
        Duration::from_millis(match self {
            Self::Redis | Self::Sqlite => 250,
            // A server with a process for each connection needs more time.
            Self::Postgres => 900,
            Self::MariaDb => 400,
            Self::RedisCluster => 300,
            Self::DynamoDb => 400,
        })
    }
}
