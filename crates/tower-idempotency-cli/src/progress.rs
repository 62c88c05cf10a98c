//! Progress of commands that take long.

use std::{
    io::{self, IsTerminal as _},
    time::Duration,
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A line on standard error that shows a growing number. Nothing is shown unless standard error is a terminal. The line is
/// removed on drop.
pub(crate) struct Progress(ProgressBar);

impl Progress {
    /// Creates a line with the text `unit`, such as `entries deleted`.
    pub(crate) fn new(unit: &'static str) -> Self {
        if !io::stderr().is_terminal() {
            return Self(ProgressBar::hidden());
        }
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template("{spinner} {human_pos} {msg} ({elapsed})") {
            bar.set_style(style);
        }
        bar.set_message(unit);
        bar.enable_steady_tick(Duration::from_millis(200));
        Self(bar)
    }

    /// Creates a line for a command that prints at the same time. Nothing is shown if its output goes to a terminal too.
    pub(crate) fn alongside_output(unit: &'static str) -> Self {
        if io::stdout().is_terminal() {
            return Self(ProgressBar::hidden());
        }
        Self::new(unit)
    }

    pub(crate) fn set(&self, count: u64) {
        self.0.set_position(count);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
