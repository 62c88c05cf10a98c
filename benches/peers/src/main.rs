//! Whole requests through this layer, through its peers and through layers that do less, in turn and in one process.
//!
//! `scripts/bench-peers` runs it and explains the modes.

mod check;
mod contenders;
mod floor;
mod measure;
mod requests;
mod sockets;

use std::process::Command;

use contenders::{BARE, Contender, Handler, all};
use measure::{Size, measure, print_table, runtime};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["check", handler] => print_checks(self::handler(handler)),
        [mode @ ("one" | "many"), handler] => {
            in_turn(&all(), self::handler(handler), size(mode));
        }
        ["growing", handler] => {
            let growing: Vec<_> = all().into_iter().filter(|one| one.can_grow).collect();
            let size = Size {
                grows: true,
                ..size("one")
            };
            in_turn(&growing, self::handler(handler), size);
        }
        ["alone", handler] => each_alone(handler),
        ["alone", handler, name] => {
            let of_name = |contender: &Contender| [BARE, name].contains(&contender.name);
            let pair: Vec<_> = all().into_iter().filter(of_name).collect();
            in_turn(&pair, self::handler(handler), size("one"));
        }
        ["repeat", handler, name, column, count] => {
            let count = count.parse().expect("a number of requests");
            measure::repeat(self::handler(handler), name, column, count);
        }
        ["sockets", handler] => sockets::compare(handler),
        ["serve", handler, name] => sockets::serve(self::handler(handler), name),
        _ => {
            eprintln!("usage: peers check|one|many|growing|alone|sockets light|heavy");
            eprintln!("       peers repeat light|heavy CONTENDER no-key|fresh|replay COUNT");
            std::process::exit(2);
        }
    }
}

fn handler(name: &str) -> Handler {
    match name {
        "light" => Handler::Light,
        "heavy" => Handler::Heavy,
        _ => panic!("expected the handler light or heavy, found {name}"),
    }
}

/// Returns the size of a measurement: one task, or 64 tasks on two workers.
///
/// The rounds are short. On a busy machine, the system interrupts long rounds more often than short ones, so contenders that
/// take longer would look even slower.
fn size(mode: &str) -> Size {
    let (tasks, each) = if mode == "one" { (1, 100) } else { (64, 2) };
    Size {
        tasks,
        each,
        rounds: 600,
        grows: false,
    }
}

/// Checks each contender and prints the work that it leaves out.
fn print_checks(handler: Handler) {
    let runtime = runtime();
    for contender in all() {
        let remarks = runtime.block_on(check::check(&contender, handler));
        for remark in remarks {
            println!("- {} {remark}.", contender.name);
        }
    }
}

fn in_turn(contenders: &[Contender], handler: Handler, size: Size) {
    let runtime = runtime();
    let times = measure(&runtime, contenders, handler, size);
    let names: Vec<_> = contenders.iter().map(|contender| contender.name).collect();
    print_table(&names, &times);
}

/// Measures each contender in a process of its own, beside bare axum only.
fn each_alone(handler: &str) {
    println!("| | no key | fresh | replay |\n|---|---|---|---|");
    let program = std::env::current_exe().expect("the path of this program");
    for contender in all().iter().filter(|contender| contender.name != BARE) {
        let output = Command::new(&program)
            .args(["alone", handler, contender.name])
            .output()
            .expect("this program runs");
        assert!(output.status.success(), "{}", contender.name);
        let output = String::from_utf8_lossy(&output.stdout);
        println!("{}", output.lines().last().unwrap_or_default());
    }
}
