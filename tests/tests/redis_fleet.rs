//! Several processes on one Redis, killed and paused at any moment: what is executed how often, and what clients are told.

use std::time::Duration;

use tests::{
    fleet::{Blow, Fleet, History, Load},
    proxy::{Mode, Proxy},
    servers::redis::RedisServer,
};

const LEASE: Duration = Duration::from_millis(500);
const POLL: Duration = Duration::from_millis(25);
const HANDLER: Duration = Duration::from_millis(40);
/// What everything else takes: the store, which answers late, and processes that have to wait for a processor.
const SLACK: Duration = Duration::from_millis(400);

/// Redis, which answers late: a process is often struck between what the store did and its hearing of it.
struct Late {
    _redis: RedisServer,
    proxy: Proxy,
}

impl Late {
    fn start() -> Self {
        let redis = RedisServer::start(&[]);
        let proxy = Proxy::start(redis.address());
        proxy.set(Mode::Delay {
            up: Duration::ZERO,
            down: Duration::from_millis(8),
        });
        Self {
            _redis: redis,
            proxy,
        }
    }

    async fn run(&self, orphans: &str, load: Load) -> History {
        let store = format!("redis://{}/0", self.proxy.address());
        let args = ["--store", &store, "--orphans", orphans, "--lease", "500ms"];
        let history = Fleet::start(3, &args).run(load).await;
        println!("{orphans}: {}", history.sums());
        history
    }
}

fn kills(seed: u64) -> Load {
    Load {
        path: format!("/slow/{}", HANDLER.as_millis()),
        at_a_time: 12,
        keys: 0,
        poll: POLL,
        lease: LEASE,
        blows: 300,
        blow: Blow::Kill,
        respite: Duration::from_millis(100),
        seed,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_refuses_orphans_executes_no_key_twice_however_many_processes_are_killed() {
    let history = Late::start().run("refuse", kills(1)).await;
    let sums = history.sums();
    assert_eq!(sums.strikes, 300);
    assert_eq!(history.doubles(), [""; 0]);
    assert_eq!(history.contradictions(), [""; 0]);
    assert_eq!(history.stuck(LEASE + POLL + SLACK), [""; 0]);
    assert!(sums.refused_with_effect > 20, "{sums}");
    assert!(sums.refused_without_effect > 0, "{sums}");
    assert!(sums.lost_replies > 0, "{sums}");
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_executes_orphans_again_executes_twice_only_what_was_killed_at_work() {
    let history = Late::start().run("reexecute", kills(2)).await;
    let sums = history.sums();
    assert_eq!(sums.strikes, 300);
    assert_eq!(history.unexplained(), [""; 0]);
    assert_eq!(history.contradictions(), [""; 0]);
    assert_eq!(history.stuck(LEASE + POLL + HANDLER + SLACK), [""; 0]);
    assert_eq!(
        (sums.refused_with_effect, sums.refused_without_effect),
        (0, 0)
    );
    assert!(sums.doubles > 20, "{sums}");
    assert!(sums.lost_replies > 0, "{sums}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_was_paused_past_its_lease_answers_what_is_stored() {
    let pauses = Load {
        blows: 40,
        blow: Blow::Pause(LEASE * 3 / 2),
        respite: Duration::from_millis(300),
        ..kills(3)
    };
    let history = Late::start().run("reexecute", pauses).await;
    let sums = history.sums();
    assert_eq!(sums.strikes, 40);
    assert_eq!(history.unexplained(), [""; 0]);
    assert_eq!(history.contradictions(), [""; 0]);
    assert_eq!(history.stuck(LEASE + POLL + HANDLER + SLACK), [""; 0]);
    assert!(sums.late_and_outrun >= 30, "{sums}");
}
