//! The strikers: a thread for each member.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use tests::random::Random;
use verification::oracle::Strike;

use super::{Fleet, Load, Member, StrikeKind};

/// Strikes the members until no strikes are left.
pub(super) fn all(fleet: &Fleet, load: &Load) -> thread::Result<Vec<Strike>> {
    let left = AtomicUsize::new(load.strike_count);
    let down = AtomicUsize::new(0);
    thread::scope(|scope| {
        let strikers: Vec<_> = (fleet.members.iter().zip(0..))
            .map(|(member, n)| {
                let striker = Striker {
                    member,
                    n,
                    load,
                    random: Random(load.seed ^ (n as u64) << 48),
                    left: &left,
                    down: &down,
                };
                scope.spawn(|| striker.strike())
            })
            .collect();
        let strikes = strikers.into_iter().map(|it| it.join());
        let strikes: Result<Vec<_>, _> = strikes.collect();
        Ok(strikes?.into_iter().flatten().collect())
    })
}

struct Striker<'a> {
    member: &'a Member,
    n: usize,
    load: &'a Load,
    random: Random,
    /// The number of strikes that are left, for all strikers.
    left: &'a AtomicUsize,
    /// The number of members that are down.
    down: &'a AtomicUsize,
}

impl Striker<'_> {
    fn strike(mut self) -> Vec<Strike> {
        let mut strikes = Vec::new();
        loop {
            thread::sleep(self.random.around(self.load.strike_interval));
            let less = |left: usize| left.checked_sub(1);
            let taken = self
                .left
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
            if taken.is_err() {
                return strikes;
            }
            self.wait_for_others();
            self.wait_for_work();
            let (pid, ordered, down, resumed) = match self.load.strike_kind {
                StrikeKind::Kill => self.member.kill(),
                StrikeKind::Pause(length) => self.member.pause(length),
            };
            strikes.push(Strike {
                member: self.n,
                pid,
                ordered,
                down,
                resumed,
            });
            self.down.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Waits until the member has work to lose, for a limited time. A member that receives no requests has no such work.
    fn wait_for_work(&self) {
        let began = Instant::now();
        while !self.member.has_responded() && began.elapsed() < IDLE {
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until enough of the other members are up.
    fn wait_for_others(&self) {
        let more = |down: usize| (down < self.load.at_once).then_some(down + 1);
        while self
            .down
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, more)
            .is_err()
        {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The longest delay of a strike at a member that serves no client.
const IDLE: Duration = Duration::from_secs(2);
