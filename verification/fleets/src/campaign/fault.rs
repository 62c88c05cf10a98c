//! The faults that a campaign can inject.

use super::Kind;

/// A fault that is injected repeatedly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "the list of all faults")]
pub enum Fault {
    /// A member is killed with SIGKILL, and another process replaces it.
    Kill,
    /// A member is stopped for longer than its leases last.
    Pause,
    /// All connections to the store are cut.
    Cut,
    /// Requests to the store and replies from the store are delayed.
    Delay,
    /// No bytes reach the store or the fleet, and none are lost.
    Silence,
    /// Replies of the store are lost.
    Replies,
    /// The server is killed and restarted, with its data.
    Restart,
    /// The server is stopped for longer than leases last.
    Freeze,
    /// The server is killed and restarted, without its data.
    Empty,
    /// The server is killed, and its replica replaces it.
    Failover,
    /// The server evicts all entries.
    Evict,
    /// The server loses its scripts.
    Scripts,
    /// The server has no memory for new entries.
    Full,
    /// A master of the cluster is killed; its replica takes over, and the master returns as a replica.
    Node,
    /// Slots of the cluster move to another master.
    Slots,
    /// The disk is full.
    Disk,
}

impl Fault {
    /// All faults.
    pub const ALL: [Self; 16] = [
        Self::Kill,
        Self::Pause,
        Self::Cut,
        Self::Delay,
        Self::Silence,
        Self::Replies,
        Self::Restart,
        Self::Freeze,
        Self::Empty,
        Self::Failover,
        Self::Evict,
        Self::Scripts,
        Self::Full,
        Self::Node,
        Self::Slots,
        Self::Disk,
    ];

    /// Returns the name of the fault on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Kill => "kill",
            Self::Pause => "pause",
            Self::Cut => "cut",
            Self::Delay => "delay",
            Self::Silence => "silence",
            Self::Replies => "replies",
            Self::Restart => "restart",
            Self::Freeze => "freeze",
            Self::Empty => "empty",
            Self::Failover => "failover",
            Self::Evict => "evict",
            Self::Scripts => "scripts",
            Self::Full => "full",
            Self::Node => "node",
            Self::Slots => "slots",
            Self::Disk => "disk",
        }
    }

    /// Returns `true` if the fault can be injected into this store.
    #[must_use]
    pub fn applies_to(self, kind: Kind) -> bool {
        use Kind::{DynamoDb, MariaDb, Postgres, Redis, RedisCluster, Sqlite};
        match self {
            Self::Kill | Self::Pause => true,
            Self::Cut | Self::Delay | Self::Silence | Self::Replies => {
                matches!(kind, Postgres | MariaDb | Redis | DynamoDb)
            }
            Self::Restart => matches!(kind, Postgres | MariaDb | Redis),
            // PostgreSQL consists of several processes; stopping one of them has little effect.
            Self::Freeze => matches!(kind, MariaDb | Redis | RedisCluster | DynamoDb),
            Self::Empty | Self::Failover | Self::Evict | Self::Scripts | Self::Full => {
                kind == Redis
            }
            Self::Node | Self::Slots => kind == RedisCluster,
            Self::Disk => kind == Sqlite,
        }
    }

    /// Returns `true` if the fault strikes the processes of the fleet instead of the store.
    #[must_use]
    pub fn strikes_members(self) -> bool {
        matches!(self, Self::Kill | Self::Pause)
    }
}
