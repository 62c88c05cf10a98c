//! The plan that is drawn for a seed before its run: the settings of the layer, the frequency of faults, and the
//! strikes.

use std::time::Duration;

use http::StatusCode;
use tower_idempotency::{
    ConcurrentRequests, ExecutionFailure, OrphanPolicy, Preset, Ttl, Unrecordable,
};

use super::{Millis, random::Random};

/// The settings of a seed.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub(super) preset: Preset,
    pub(super) lease: Millis,
    pub(super) store_timeout: Millis,
    pub(super) retention: Millis,
    pub(super) orphans: OrphanPolicy,
    pub(super) orphan_retention: Option<Millis>,
    /// `None` if it follows from the orphan policy.
    pub(super) failure: Option<ExecutionFailure>,
    pub(super) in_flight: ConcurrentRequests,
    pub(super) unrecordable: Unrecordable,
    pub(super) collect_timeout: Millis,
    pub(super) body_timeout: Millis,
    /// The layer fingerprints the head only, and the handler reads the body itself.
    pub(super) head_only: bool,
    /// Few requests may be in flight at once, and few may wait. Callers have shares in these limits.
    pub(super) crowded: bool,
    /// Handlers commit effect and record together.
    pub(super) transactional: bool,
    /// The processes run work of `run_once`.
    pub(super) jobs: bool,
    /// The store is the crate's own [`MemoryStore`](tower_idempotency::MemoryStore).
    pub(super) memory: bool,
    pub(super) processes: usize,
    pub(super) clients: usize,
    pub(super) keys: u64,
    /// The percentage of store calls that meet a fault.
    pub(super) faults: u64,
    /// The percentage of notifications for waiters that are lost.
    pub(super) lost_notifications: u64,
    /// The percentage of requests that are left by their client.
    pub(super) leaving: u64,
    /// The percentage of executions that fail.
    pub(super) failing: u64,
    pub(super) strikes: Strikes,
    /// The time at which the clients begin.
    pub(super) rush: Millis,
}

/// The frequency of each strike at a process or at the store.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Strikes {
    pub(super) kills: u64,
    pub(super) pauses: u64,
    pub(super) drains: u64,
    /// An operator finishes an orphan.
    pub(super) takeovers: u64,
    /// The clock of the store steps forward.
    pub(super) steps: u64,
    /// An operator reads an entry, and resolves it.
    pub(super) resolutions: u64,
}

impl Plan {
    pub(super) fn draw(random: &mut Random) -> Self {
        let lease = random.pick(&[60, 150, 300, 900, 3_000]);
        let calm = random.percent(10);
        let transactional = random.percent(25);
        Self {
            preset: random.pick(&[
                Preset::Recommended,
                Preset::Recommended,
                Preset::Ietf,
                Preset::Stripe,
                Preset::Idempo,
            ]),
            lease,
            store_timeout: random.pick(&[lease / 10, lease / 3, lease, lease * 2]),
            retention: random.pick(&[lease / 2, lease, lease * 3, lease * 10, 1_000_000]),
            orphans: random.pick(&[OrphanPolicy::TakeOver, OrphanPolicy::Refuse]),
            orphan_retention: random.pick(&[None, None, Some(lease / 2), Some(lease * 5)]),
            failure: random.pick(&[
                None,
                None,
                Some(ExecutionFailure::Release),
                Some(ExecutionFailure::Orphan),
                Some(ExecutionFailure::NeedsAttention),
            ]),
            in_flight: match random.below(4) {
                0 => ConcurrentRequests::Conflict,
                1 => ConcurrentRequests::TooManyRequests,
                _ => ConcurrentRequests::Wait(Duration::from_millis(random.pick(&[
                    lease / 3,
                    lease * 2,
                    lease * 5,
                ]))),
            },
            unrecordable: random.pick(&[Unrecordable::Tombstone, Unrecordable::Release]),
            collect_timeout: random.pick(&[lease / 5, lease * 2]),
            body_timeout: random.pick(&[lease / 5, lease * 2]),
            head_only: random.percent(15),
            crowded: random.percent(8),
            transactional,
            jobs: false,
            memory: !transactional && random.percent(30),
            processes: random.pick(&[1, 2, 2, 3]),
            clients: random.pick(&[1, 2, 3, 4, 6]),
            keys: random.pick(&[1, 1, 2]),
            faults: if calm {
                0
            } else {
                random.pick(&[0, 5, 15, 40])
            },
            lost_notifications: random.pick(&[0, 0, 30, 100]),
            leaving: if calm { 0 } else { random.pick(&[0, 15, 40]) },
            failing: random.pick(&[0, 10, 35]),
            strikes: if calm {
                Strikes::default()
            } else {
                Strikes {
                    kills: random.pick(&[0, 0, 1, 2]),
                    pauses: random.pick(&[0, 0, 1, 2]),
                    drains: random.pick(&[0, 0, 0, 1]),
                    takeovers: random.pick(&[0, 0, 0, 2]),
                    steps: random.pick(&[0, 0, 0, 0, 1]),
                    resolutions: 0,
                }
            },
            rush: random.pick(&[3, lease / 3, lease, lease * 3]),
        }
    }

    /// Returns this plan for work of `run_once`. Settings for HTTP alone get fixed values.
    pub(super) fn for_run_once(self) -> Self {
        Self {
            jobs: true,
            preset: Preset::Recommended,
            in_flight: ConcurrentRequests::Conflict,
            unrecordable: Unrecordable::Tombstone,
            head_only: false,
            strikes: Strikes {
                takeovers: 0,
                ..self.strikes
            },
            ..self
        }
    }

    /// Returns this plan with an operator that resolves entries.
    pub(super) fn with_operator(mut self, seed: u64) -> Self {
        self.strikes.resolutions = 1 + seed / 7 % 3;
        self
    }

    /// Returns `true` if the layer records a handler's response of this status.
    pub(super) fn records(&self, status: StatusCode) -> bool {
        match status {
            StatusCode::CREATED | StatusCode::NOT_FOUND => true,
            StatusCode::INTERNAL_SERVER_ERROR => {
                matches!(self.preset, Preset::Ietf | Preset::Stripe)
            }
            StatusCode::SERVICE_UNAVAILABLE => self.preset == Preset::Stripe,
            _ => false,
        }
    }

    /// Returns the state in which a failed execution leaves its key.
    pub(super) fn failure(&self) -> ExecutionFailure {
        self.failure.unwrap_or(match self.orphans {
            OrphanPolicy::Refuse => ExecutionFailure::Orphan,
            _ => ExecutionFailure::Release,
        })
    }

    /// Returns the caller that sends a key: one for all keys, or one for each.
    pub(super) fn caller(&self, key: u64) -> u64 {
        if self.clients.is_multiple_of(2) {
            key
        } else {
            0
        }
    }

    /// Returns `true` if a key that returns with another request is a separate key.
    pub(super) fn separates_requests(&self) -> bool {
        self.preset == Preset::Idempo
    }

    /// Returns `true` if replays are marked.
    pub(super) fn marks_replays(&self) -> bool {
        matches!(self.preset, Preset::Recommended | Preset::Stripe)
    }

    /// Returns a duration longer than any delay of this seed. An execution that is not disturbed has finished by then.
    pub(super) fn max_delay(&self) -> Millis {
        let wait = match self.in_flight {
            ConcurrentRequests::Wait(max) => {
                Millis::try_from(max.as_millis()).expect("a short wait")
            }
            _ => 0,
        };
        40 * self.lease + 20 * self.store_timeout + wait + self.body_timeout + self.collect_timeout
    }
}

pub(super) fn ttl(millis: Millis) -> Ttl {
    Ttl::from_millis(millis.max(1))
}
