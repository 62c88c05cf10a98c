//! The stores that a campaign can be run on.

use std::time::Duration;

/// Which store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "the stores that there are")]
pub enum Kind {
    /// `PostgresStore` on PostgreSQL.
    Postgres,
    /// `MySqlStore` on MariaDB.
    MariaDb,
    /// `SqliteStore` on a file.
    Sqlite,
    /// `RedisStore` on a Redis that appends to a file what it did, unless it is to lose that.
    Redis,
    /// `RedisStore` on three masters with a replica each.
    RedisCluster,
    /// `DynamoDbStore` on dynoxide.
    DynamoDb,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Postgres,
        Self::MariaDb,
        Self::Sqlite,
        Self::Redis,
        Self::RedisCluster,
        Self::DynamoDb,
    ];

    /// As it is named on the command line.
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

    /// Whether effect and record can be in one transaction.
    #[must_use]
    pub fn has_transactions(self) -> bool {
        matches!(self, Self::Postgres | Self::MariaDb | Self::Sqlite)
    }

    /// How many processes share it.
    pub(super) fn members(self) -> usize {
        match self {
            Self::Postgres => 8,
            Self::MariaDb | Self::Redis => 6,
            Self::RedisCluster | Self::Sqlite | Self::DynamoDb => 4,
        }
    }

    /// How many keys are asked for at a time: most of them wait for the lease of somebody who was struck.
    pub(super) fn at_a_time(self) -> usize {
        match self {
            Self::Redis | Self::RedisCluster | Self::MariaDb => 48,
            Self::Postgres | Self::Sqlite => 24,
            Self::DynamoDb => 16,
        }
    }

    /// The lease: longer where a call takes longer.
    pub(super) fn lease(self) -> Duration {
        Duration::from_millis(match self {
            Self::Postgres | Self::MariaDb | Self::Redis | Self::Sqlite => 700,
            Self::RedisCluster => 1000,
            Self::DynamoDb => 1500,
        })
    }

    /// How long a member is left alone after it has started: until it has connected, and has something to lose.
    pub(super) fn respite(self) -> Duration {
        Duration::from_millis(match self {
            Self::Redis | Self::Sqlite => 250,
            // A process for each connection takes its time.
            Self::Postgres => 900,
            Self::MariaDb => 400,
            Self::RedisCluster => 300,
            Self::DynamoDb => 400,
        })
    }
}
