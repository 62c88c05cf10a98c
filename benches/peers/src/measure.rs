//! Rounds in turn, and their medians.

use std::{sync::Arc, time::Instant};

use axum::Router;
use bytes::Bytes;
use tokio::runtime::Runtime;

use crate::{
    contenders::{BARE, Contender, Effects, Handler, all},
    requests::{COLUMNS, Column, order, succeed},
};

/// Number of requests of a round, and of rounds.
#[derive(Clone, Copy)]
pub struct Size {
    pub tasks: u64,
    pub each: u64,
    pub rounds: usize,
    /// `true` if the stores keep the records of all rounds. Otherwise each round begins with an empty store.
    pub grows: bool,
}

/// Nanoseconds of a request in each round, by column.
pub type Rounds = [Vec<f64>; 3];

/// Measures all contenders in turn. Each round starts with another one.
pub fn measure(
    runtime: &Runtime,
    contenders: &[Contender],
    handler: Handler,
    size: Size,
) -> Vec<Rounds> {
    let body = order();
    let mut lasting: Vec<(Router, Effects)> = contenders
        .iter()
        .map(|contender| prepared(runtime, contender, handler, &body, size))
        .collect();
    let mut times = vec![Rounds::default(); contenders.len()];
    for round in 0..size.rounds {
        for (at, column) in COLUMNS.into_iter().enumerate() {
            for turn in 0..contenders.len() {
                let index = (turn + round) % contenders.len();
                let contender = &contenders[index];
                if !size.grows {
                    lasting[index] = prepared(runtime, contender, handler, &body, size);
                }
                let (app, effects) = &lasting[index];
                let before = effects.count();
                let nanos = run(runtime, app, &body, column, size.tasks, size.each);
                let executes = column != Column::Replay || !contender.replays;
                let expected = if executes { size.tasks * size.each } else { 0 };
                let found = effects.count() - before;
                assert_eq!(found, expected, "effects of {}", contender.name);
                times[index][at].push(nanos);
            }
        }
    }
    times
}

/// Number of requests of a task before the first round.
const WARM: u64 = 2;

/// Returns a router that has answered requests of every kind.
fn prepared(
    runtime: &Runtime,
    contender: &Contender,
    handler: Handler,
    body: &Bytes,
    size: Size,
) -> (Router, Effects) {
    let effects = Effects::default();
    let app = {
        let _entered = runtime.enter();
        contender.build(handler, &effects)
    };
    run(runtime, &app, body, Column::Replay, 1, 1);
    for column in COLUMNS {
        run(runtime, &app, body, column, size.tasks, WARM);
    }
    (app, effects)
}

/// Runs one round. Returns the nanoseconds of a request.
fn run(
    runtime: &Runtime,
    app: &Router,
    body: &Bytes,
    column: Column,
    tasks: u64,
    each: u64,
) -> f64 {
    runtime.block_on(async {
        let started = Instant::now();
        let running: Vec<_> = (0..tasks)
            .map(|_| {
                let (app, body) = (app.clone(), body.clone());
                tokio::spawn(async move {
                    for _ in 0..each {
                        succeed(&app, &body, column).await;
                    }
                })
            })
            .collect();
        for task in running {
            task.await.expect("no panic");
        }
        started.elapsed().as_nanos() as f64 / (tasks * each) as f64
    })
}

/// Sends requests of one kind to one contender, on one thread: for profilers and counters of instructions.
pub fn repeat(handler: Handler, name: &str, column: &str, count: u64) {
    let column = match column {
        "no-key" => Column::NoKey,
        "fresh" => Column::Fresh,
        "replay" => Column::Replay,
        _ => panic!("expected a column, found {column}"),
    };
    let contenders = all();
    let contender = contenders.iter().find(|contender| contender.name == name);
    let contender = contender.expect("a contender");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    runtime.expect("a runtime").block_on(async {
        let (effects, body) = (Effects::default(), order());
        let app = contender.build(handler, &effects);
        succeed(&app, &body, Column::Replay).await;
        for _ in 0..count {
            succeed(&app, &body, column).await;
        }
        println!("effects: {}", effects.count());
    });
}

/// Returns the value below which `part` of the values are.
pub fn quantile(values: &[f64], part: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len() - 1;
    sorted[(last as f64 * part).round() as usize]
}

pub fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

/// Prints ratios to bare axum: that of the medians, and the quartiles of the rounds.
pub fn print_table(names: &[&str], times: &[Rounds]) {
    let bare = names.iter().position(|name| *name == BARE).expect("a base");
    let micros = |at: usize| median(&times[bare][at]) / 1000.0;
    println!("| | no key | fresh | replay |\n|---|---|---|---|");
    let (no_key, fresh, replay) = (micros(0), micros(1), micros(2));
    println!("| {BARE} | 1 ({no_key:.2} us) | 1 ({fresh:.2} us) | 1 ({replay:.2} us) |");
    for (name, rounds) in names.iter().zip(times) {
        if *name == BARE {
            continue;
        }
        let cells = rounds.iter().zip(&times[bare]).map(|(own, base)| {
            let ratios: Vec<f64> = own.iter().zip(base).map(|(own, base)| own / base).collect();
            let ratio = median(own) / median(base);
            let (low, high) = (quantile(&ratios, 0.25), quantile(&ratios, 0.75));
            format!("{ratio:.2} ({low:.2} to {high:.2})")
        });
        println!("| {name} | {} |", cells.collect::<Vec<_>>().join(" | "));
    }
}

/// Shares a runtime of two workers.
pub fn runtime() -> Arc<Runtime> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    Arc::new(runtime.expect("a runtime"))
}
