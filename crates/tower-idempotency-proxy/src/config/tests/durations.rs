//! The limits of durations.

use super::{Config, GOOD, broken};

/// Returns the message about a duration in the protected route.
fn message(line: &str) -> String {
    broken(
        "upstream = \"app\"\n",
        &format!("upstream = \"app\"\n{line}\n"),
    )
}

#[test]
fn short_durations_of_route_are_rejected() {
    let repeats = "later retries execute again";
    let suspended = "a process that is suspended longer loses its leases";
    for (setting, name, reason) in [
        ("retention", "a retention", repeats),
        ("orphan_retention", "an orphan_retention", repeats),
        ("lease", "a lease", suspended),
    ] {
        for value in ["0s", "1ns", "1ms", "999ms"] {
            let expected = format!("line 10: expected {name} of at least 1s, because {reason}");
            assert_eq!(message(&format!("{setting} = \"{value}\"")), expected);
        }
        let shortest = format!("mode = \"off\"\n{setting} = \"1s\"");
        let config = GOOD.replacen("mode = \"off\"", &shortest, 1);
        assert!(Config::from_toml(&config).is_ok(), "{setting}");
    }
}

#[test]
fn duration_has_at_most_ten_years() {
    assert_eq!(
        message("retention = \"10y 1s\""),
        "line 10: `10y 1s` is too long, expected at most ten years"
    );
    let longest = "mode = \"off\"\nretention = \"10y\"";
    let config = GOOD.replacen("mode = \"off\"", longest, 1);
    assert!(Config::from_toml(&config).is_ok());
}
