//! The protocol as it is: every property in every state.

use std::time::Instant;

use stateright::{Checker, Model};

use crate::{
    properties,
    store::{Orphans, Rules, Times},
    system::System,
};

pub(crate) fn system(clients: usize) -> System {
    System {
        clients,
        others: 0,
        orphans: Orphans::TakeOver,
        transactional: false,
        late_calls: false,
        data_loss: false,
        rules: Rules {
            times: Times {
                lease: 1,
                keep: 2,
                retention: 2,
            },
            mutant: None,
        },
        properties: Vec::new(),
    }
}

fn check(mut system: System) -> usize {

    system.properties = properties::that_hold(system.orphans, system.transactional);
    let began = Instant::now();
    let checked = system.checker().spawn_bfs().join();
    println!(
        "{} states, {} deep, {:?}",
        checked.unique_state_count(),
        checked.max_depth(),
        began.elapsed()
    );
    checked.assert_properties();
    checked.unique_state_count()
}

#[test]
fn two() { check(system(2)); }
#[test]
fn three() { check(system(3)); }
#[test]
fn four() { check(system(4)); }
#[test]
fn four_refuse() { check(System{orphans: Orphans::Refuse, ..system(4)}); }
#[test]
fn four_tx() { check(System{transactional: true, ..system(4)}); }
#[test]
fn three_late() { check(System{late_calls: true, ..system(3)}); }
#[test]
fn four_other() { check(System{others: 1, ..system(4)}); }
