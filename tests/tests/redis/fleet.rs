//! Several processes on one Redis, killed and paused at any moment: what is executed how often, and what clients are told.
//!
//! Fewer kills, pauses and keys by default; `FULL=1` makes them 300, 20 and 1,000.

use std::time::Duration;

use tests::{
    few_or,
    fleet::{Blow, Fleet, Load, Stampede},
    oracle::History,
    proxy::{Mode, Proxy},
    servers::redis::RedisServer,
};

const MEMBERS: usize = 4;
const LEASE: Duration = Duration::from_millis(700);
const POLL: Duration = Duration::from_millis(100);
const HANDLER: Duration = Duration::from_millis(40);
/// What everything else takes: the store, which answers late, and processes that wait for a processor. Less than another
/// lease would be.
const SLACK: Duration = Duration::from_millis(450);

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

    async fn run(self, orphans: &str, load: Load) -> History {
        let store = format!("redis://{}/0", self.proxy.address());
        let lease = format!("{}ms", load.lease.as_millis());
        let args = ["--store", &store, "--orphans", orphans, "--lease", &lease];
        let history = Fleet::start(MEMBERS, &args).run(load).await;
        println!("{orphans}: {}", history.sums());
        history
    }
}

fn kills(seed: u64) -> Load {
    Load {
        path: format!("/slow/{}", HANDLER.as_millis()),
        at_a_time: 16,
        keys: 0,
        poll: POLL,
        lease: LEASE,
        blows: few_or(90, 300),
        blow: Blow::Kill,
        at_once: 2,
        respite: Duration::from_millis(70),
        seed,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_refuses_orphans_executes_no_key_twice_however_many_processes_are_killed() {
    let history = Late::start().run("refuse", kills(1)).await;
    let sums = history.sums();
    none("doubles", &history.doubles());
    none("contradictions", &history.contradictions());
    free(&history, LEASE + POLL + SLACK);
    assert!(sums.refused_with_effect > sums.strikes / 15, "{sums}");
    assert!(sums.refused_without_effect > 0, "{sums}");
    assert!(sums.lost_replies > 0, "{sums}");
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_executes_orphans_again_executes_twice_only_what_was_killed_at_work() {
    let history = Late::start().run("reexecute", kills(2)).await;
    let sums = history.sums();
    none("unexplained", &history.unexplained());
    none("contradictions", &history.contradictions());
    free(&history, LEASE + POLL + HANDLER + SLACK);
    assert_eq!(
        (sums.refused_with_effect, sums.refused_without_effect),
        (0, 0)
    );
    assert!(sums.doubles > sums.strikes / 15, "{sums}");
    assert!(sums.lost_replies > 0, "{sums}");
}

/// Where kills are frequent, hardly ever is it certain since when nobody has had the lease.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_killed_process_was_at_is_free_again_after_one_lease() {
    let rare = Load {
        blows: 40,
        respite: Duration::from_millis(1500),
        ..kills(7)
    };
    let history = Late::start().run("reexecute", rare).await;
    let sums = history.sums();
    none("unexplained", &history.unexplained());
    none("contradictions", &history.contradictions());
    free(&history, LEASE + POLL + HANDLER + SLACK);
    assert!(sums.doubles > 2, "{sums}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_was_paused_past_its_lease_answers_what_is_stored() {
    let handler = Duration::from_millis(200);
    let lease = Duration::from_millis(500);
    let pauses = Load {
        lease,
        path: format!("/slow/{}", handler.as_millis()),
        at_a_time: 24,
        blows: few_or(10, 20),
        blow: Blow::Pause(lease * 3 / 2),
        at_once: 1,
        respite: Duration::from_millis(300),
        ..kills(3)
    };
    let run = |orphans, seed| {
        Late::start().run(
            orphans,
            Load {
                seed,
                ..pauses.clone()
            },
        )
    };
    let (first, second, refusing) =
        tokio::join!(run("reexecute", 3), run("reexecute", 4), run("refuse", 5));
    for history in [&first, &second, &refusing] {
        assert_eq!(history.sums().strikes, pauses.blows);
        none("unexplained", &history.unexplained());
        none("contradictions", &history.contradictions());
        // A client may have waited for a member that was stopped before it asked another one.
        let patience = lease / 2;
        free(history, patience + lease + POLL + handler + SLACK);
    }
    let outrun = first.sums().late_and_outrun + second.sums().late_and_outrun;
    assert!(
        outrun >= pauses.blows,
        "{outrun} late answers are another's"
    );
    none("doubles", &refusing.doubles());
    assert!(refusing.sums().late > 0, "{}", refusing.sums());
}

#[tokio::test(flavor = "multi_thread")]
async fn sixty_four_clients_at_once_cause_one_execution_of_each_key() {
    for (in_flight, keys) in [("wait", few_or(100, 700)), ("conflict", few_or(50, 300))] {
        let redis = RedisServer::start(&[]);
        let args = ["--store", &redis.url(), "--in-flight", in_flight];
        let stampede = Stampede {
            path: "/orders".to_owned(),
            clients: 64,
            keys,
            poll: Duration::from_millis(10),
            lease: Duration::from_secs(15),
            seed: 6,
        };
        let history = Fleet::start(MEMBERS, &args).stampede(&stampede).await;
        println!("{in_flight}: {}", history.sums());
        none("doubles", &history.doubles());
        none("contradictions", &history.contradictions());
        assert_eq!(history.effects.len(), keys);
        let answers = history.attempts.iter().filter_map(|it| it.answer());
        assert_eq!(answers.count(), 64 * keys);
    }
}

fn free(history: &History, limit: Duration) {
    if let Err(late) = history.are_free_within(limit) {
        panic!("{late}");
    }
}

fn none(what: &str, keys: &[String]) {
    let first: Vec<_> = keys.iter().take(3).map(String::as_str).collect();
    let n = keys.len();
    assert!(n == 0, "{what}: {n} keys, such as\n{}", first.join("\n"));
}
