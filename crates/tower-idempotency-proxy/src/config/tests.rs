use tower_idempotency::{IdempotencyLayer, MemoryStore};

use super::*;

mod console;
mod durations;
mod reload;
mod variables;

const GOOD: &str = r#"[listen]
address = "127.0.0.1:8080"
[store]
url = "memory"
[upstream.app]
url = "http://127.0.0.1:3000"
[[route]]
path = "/v1/charges"
upstream = "app"
[[route]]
path = "/**"
upstream = "app"
mode = "off"
"#;

/// Returns a configuration with one route for all paths, and with its upstream at this URL.
pub(crate) fn minimal(upstream: &str) -> Config {
    let config = Config::from_toml(&format!(
        r#"
        [listen]
        address = "127.0.0.1:0"
        [store]
        url = "memory"
        [upstream.app]
        url = "{upstream}"
        [[route]]
        path = "/**"
        upstream = "app"
        "#
    ));
    config.unwrap()
}

fn message(text: &str) -> String {
    Config::from_toml(text).unwrap_err().to_string()
}

/// Returns the message after `from` is replaced.
fn broken(from: &str, to: &str) -> String {
    assert!(GOOD.contains(from), "{from}");
    message(&GOOD.replacen(from, to, 1))
}

#[test]
fn route_has_name_that_layer_accepts() {
    let (longest, too_long) = ("a".repeat(64), "a".repeat(65));
    for name in [
        "",
        "a",
        "pay.v1_x-2",
        "a b",
        "ä",
        "a/b",
        &longest,
        &too_long,
    ] {
        let layer = IdempotencyLayer::new(MemoryStore::new()).with_name(name);
        let with_name = GOOD.replacen("[[route]]", &format!("[[route]]\nname = \"{name}\""), 1);
        let config = Config::from_toml(&with_name);
        assert_eq!(config.is_ok(), layer.is_ok(), "{name:?}");
    }
}

#[test]
fn wrong_files_name_line_and_nearest_name() {
    let with_route = |line: &str| {
        broken(
            "upstream = \"app\"\n",
            &format!("upstream = \"app\"\n{line}\n"),
        )
    };
    let with_upstream = |line: &str| broken("[[route]]", &format!("{line}\n[[route]]"));
    let inline = |line: &str, table: &str| message(&format!("{line}\n{}", GOOD.replace(table, "")));
    for (found, expected) in [
        (
            broken("address", "adress"),
            "line 2: unknown setting `adress`, did you mean `address`?",
        ),
        (
            broken("[listen]", "[listener]"),
            "line 1: unknown setting `listener`, did you mean `listen`?",
        ),
        (
            broken("127.0.0.1:8080", "localhost:8080"),
            "line 2: invalid socket address syntax",
        ),
        (
            broken("address = \"127.0.0.1:8080\"", ""),
            "line 1: missing setting `address`",
        ),
        (
            broken("[store]\nurl = \"memory\"", "[store]"),
            "expected url or url_file in [store], or the variable IDEMPOTENCY_PROXY__STORE__URL",
        ),
        (
            broken("url = \"memory\"", "url = \"memory\"\nurl_file = \"x\""),
            "line 4: expected either url or url_file, found both",
        ),
        (
            broken("url = \"memory\"", "url_file = \"/nowhere/url\""),
            "line 4: cannot read url_file /nowhere/url: No such file or directory (os error 2)",
        ),
        (
            broken("url = \"memory\"", "uri = \"redis://:hush@host\""),
            "line 4: unknown setting `uri`, did you mean `url`?",
        ),
        (
            inline(
                "store = \"redis://:hush@host\"",
                "[store]\nurl = \"memory\"\n",
            ),
            "line 1: expected a table, found a text",
        ),
        (
            inline(
                "upstream.app = \"https://u:hush@host\"",
                "[upstream.app]\nurl = \"http://127.0.0.1:3000\"\n",
            ),
            "line 1: expected a table, found a text",
        ),
        (
            broken("url = \"memory\"", "url = 7"),
            "line 4: expected a text in quotes",
        ),
        (
            broken(
                "[upstream.app]\nurl = \"http://127.0.0.1:3000\"",
                "[upstream]",
            ),
            "expected at least one [upstream.NAME]",
        ),
        (
            broken("http://127.0.0.1:3000", "127.0.0.1:3000"),
            "line 6: expected http://HOST:PORT or https://HOST:PORT without a path",
        ),
        (
            broken("http://127.0.0.1:3000", "http://127.0.0.1:3000/api"),
            "line 6: expected http://HOST:PORT or https://HOST:PORT without a path",
        ),
        (
            broken("http://127.0.0.1:3000", "http://127.0.0.1:99999"),
            "line 6: expected http://HOST:PORT or https://HOST:PORT without a path",
        ),
        (
            broken("http://127.0.0.1:3000", "http://[::1]:8O80"),
            "line 6: expected http://HOST:PORT or https://HOST:PORT without a path",
        ),
        (
            broken("http://127.0.0.1:3000", "http://u:hush@127.0.0.1:3000"),
            "line 6: expected a URL without a user and a password",
        ),
        (
            with_upstream("timeout = 30"),
            "line 7: expected a duration in quotes, such as \"30s\"",
        ),
        (
            with_upstream("timeout = \"30 parsecs\""),
            "line 7: `30 parsecs` is no duration, expected one such as \"30s\"",
        ),
        (
            with_upstream("timeout = \"0s\""),
            "line 7: expected timeout to be longer than zero",
        ),
        (
            broken("8080\"", "8080\"\nidle_timeout = \"0s\""),
            "line 3: expected idle_timeout to be longer than zero",
        ),
        (
            inline("drain.timeout = \"5000 years\"", ""),
            "line 1: `5000 years` is too long, expected at most ten years",
        ),
        (
            with_upstream("conect_timeout = \"1s\""),
            "line 7: unknown setting `conect_timeout`, did you mean `connect_timeout`?",
        ),
        (
            with_route("share = \"110%\""),
            "line 10: `110%` is no share, expected one from \"0%\" to \"100%\"",
        ),
        (
            with_route("name = \"card payments\""),
            "line 10: `card payments` is no name of a route, expected 1 to 64 characters of a-z, A-Z, 0-9, _, . and -",
        ),
        (
            with_route("share = 10"),
            "line 10: expected a share in quotes, such as \"10%\"",
        ),
        (
            with_route("mode = \"observe\"\nshare = \"10%\""),
            "line 8: share has no effect without mode = \"enforce\"",
        ),
        (
            with_route("mode = \"obserf\""),
            "line 10: unknown value `obserf`, did you mean `observe`?",
        ),
        (
            broken("upstream = \"app\"", "upstream = \"ap\""),
            "line 9: unknown upstream `ap`, did you mean `app`?",
        ),
        (
            broken("path = \"/v1/charges\"", "path = \"v1/charges\""),
            "line 8: `v1/charges` is no path, expected one that begins with /",
        ),
        (
            broken("path = \"/v1/charges\"", "path = \"/v1/**/x\""),
            "line 8: expected `**` only at the end of a path, found `/v1/**/x`",
        ),
        (
            broken("path = \"/v1/charges\"", "path = \"/v1/{}/x\""),
            "line 8: `{}` is no segment of a path, expected a text, {name} or ** at the end",
        ),
        (
            broken("path = \"/**\"", "path = \"/v1/charges\""),
            "line 11: the route /v1/charges occurs twice",
        ),
        (
            broken("mode = \"off\"", "mode = \"of\""),
            "line 13: unknown value `of`, did you mean `off`?",
        ),
        (
            broken("mode = \"off\"", "mode = \"off\"\nmissing_key = \"reject\""),
            "line 11: missing_key = \"reject\" has no effect with mode = \"off\"",
        ),
        (
            with_route("methods = [\"post\"]"),
            "line 10: `post` is no method, expected one in capital letters, such as \"POST\"",
        ),
        (
            with_route("preset = \"ietf\"\nmethods = [\"GET\", \"PATCH\", \"PUT\"]"),
            "line 8: the preset ietf protects only POST and PATCH, found PUT in methods",
        ),
        (
            with_route("preset = \"acp\"\nmode = \"observe\"\nmethods = [\"PATCH\"]"),
            "line 8: the preset acp protects only POST, found PATCH in methods",
        ),
        (
            with_route("retention = \"24 h\"\nretentoin = \"1h\""),
            "line 11: unknown setting `retentoin`, did you mean `retention`?",
        ),
        (
            with_route("unknown = \"retry\""),
            "line 10: unknown value `retry`, expected attention, orphan, free",
        ),
        (
            with_route("unknown_statuses = [404]"),
            "line 10: expected statuses of 500 to 599 in unknown_statuses, found 404",
        ),
        (
            with_route("orphans = \"takeover\""),
            "line 10: unknown value `takeover`, did you mean `take-over`?",
        ),
        (
            with_route("principal = \"credential\""),
            "line 10: unknown value `credential`, did you mean `credentials`?",
        ),
        (
            with_route("principal = { heder = \"x-user\" }"),
            "line 10: unknown setting `heder`, did you mean `header`?",
        ),
        (
            with_route("concurrent_requests = \"wait\""),
            "line 10: unknown value `wait`, expected conflict, too-many-requests, wait 5s",
        ),
        (
            with_route("request_limit = \"2MB\""),
            "line 10: `2MB` is no size, expected a number with B, KiB, MiB or GiB, such as \"2MiB\"",
        ),
        (
            with_route("key_header = \"idempotency key\""),
            "line 10: `idempotency key` is no name of a header",
        ),
        (
            with_route("host = \"api.example:443\""),
            "line 10: `api.example:443` is no host, expected a name without a port, such as \"api.example\"",
        ),
    ] {
        assert_eq!(found, expected);
        assert!(!found.contains("hush"));
    }
}

#[test]
fn preset_covers_methods_of_its_layer() {
    use tower_idempotency::{IdempotencyLayer, MemoryStore};
    for preset in PresetName::ALL {
        let layer = IdempotencyLayer::with_preset(MemoryStore::new(), preset.preset());
        let policy = layer.policy();
        for method in ["GET", "POST", "PUT", "PATCH", "DELETE", "QUERY", "PROPFIND"] {
            let method = Method::from_bytes(method.as_bytes()).unwrap();
            let expected = policy.covers(&method);
            assert_eq!(preset.covers(&method), expected, "{preset} {method}");
        }
    }
}

#[test]
fn methods_without_protection_are_accepted() {
    for lines in [
        "preset = \"stripe\"\nmethods = [\"GET\", \"HEAD\", \"QUERY\", \"POST\"]",
        "preset = \"stripe\"\nmethods = [\"PUT\"]\nmode = \"off\"",
        "methods = [\"PUT\", \"PURGE\"]",
    ] {
        let route = format!("upstream = \"app\"\n{lines}\n");
        let text = GOOD.replacen("upstream = \"app\"\n", &route, 1);
        assert!(Config::from_toml(&text).is_ok(), "{lines}");
    }
}

/// Returns a configuration of two hosts. `second` contains the lines of the second route.
fn two_hosts(first: &str, second: &str) -> Result<Config, ConfigError> {
    Config::from_toml(&format!(
        "[listen]\naddress = \"127.0.0.1:0\"\n[store]\nurl = \"memory\"\n\
         [upstream.a]\nurl = \"http://127.0.0.1:3000\"\n[upstream.b]\nurl = \"http://127.0.0.1:3001\"\n\
         [[route]]\nhost = \"a.example\"\npath = \"/**\"\nupstream = \"a\"\n{first}\n[[route]]\n{second}\n"
    ))
}

#[test]
fn services_on_two_hosts_share_no_keys() {
    let error = two_hosts(
        "",
        "host = \"b.example\"\npath = \"/v1/{x}\"\nupstream = \"b\"",
    );
    let expected = "line 16: the routes a.example/** and b.example/v1/{x} have different upstreams and the same keys, expected host_in_scope = true in one of them";
    assert_eq!(error.unwrap_err().to_string(), expected);
    // All other hosts.
    assert!(two_hosts("", "path = \"/**\"\nupstream = \"b\"").is_err());
    let b = "host = \"b.example\"\npath = \"/**\"\nupstream = \"b\"";
    for lines in [
        "mode = \"observe\"",
        // Requests can have the principal of the first route, or none for both routes.
        "principal = \"credentials\"",
        "principal = \"authorization\"",
        "principal = { header = \"authorization\" }",
        "principal = { cookie = \"session\" }",
    ] {
        assert!(two_hosts("", &format!("{b}\n{lines}")).is_err(), "{lines}");
    }
}

#[test]
fn hosts_with_keys_of_their_own_are_accepted() {
    let b = "host = \"b.example\"\npath = \"/**\"";
    for (first, second) in [
        (
            "host_in_scope = true",
            format!("{b}\nupstream = \"b\"\nhost_in_scope = true"),
        ),
        ("", format!("{b}\nupstream = \"a\"")),
        ("", format!("{b}\nupstream = \"b\"\nmode = \"off\"")),
        ("mode = \"off\"", format!("{b}\nupstream = \"b\"")),
        ("host_in_scope = true", format!("{b}\nupstream = \"b\"")),
        // Only one of the routes protects these methods.
        ("methods = [\"GET\"]", format!("{b}\nupstream = \"b\"")),
        (
            "preset = \"stripe\"",
            format!("{b}\nupstream = \"b\"\nmethods = [\"PUT\"]"),
        ),
        // Requests that differ in more than the host.
        (
            "methods = [\"POST\"]",
            format!("{b}\nupstream = \"b\"\nmethods = [\"PUT\"]"),
        ),
    ] {
        let config = two_hosts(first, &second);
        assert!(config.is_ok(), "{first} {second}: {config:?}");
    }
}

/// The proxy records no status of `unknown_statuses`, although some presets do.
#[test]
fn unknown_statuses_are_not_listed_as_recorded() {
    for (preset, line, unknown) in PresetName::ALL.into_iter().flat_map(|preset| {
        [
            (preset, "", &[502, 504, 520, 524][..]),
            (preset, "unknown_statuses = [500, 599]", &[500, 599]),
        ]
    }) {
        let lines = format!("upstream = \"app\"\npreset = \"{preset}\"\n{line}\n");
        let config = GOOD.replacen("upstream = \"app\"\n", &lines, 1);
        let policies = Config::from_toml(&config).unwrap().policies().unwrap();
        let policy = policies[0].1.as_ref().unwrap();
        for status in unknown {
            assert!(!policy.records(*status), "{preset} {status}: {policy}");
        }
        let records_errors = matches!(preset, PresetName::Ietf | PresetName::Stripe);
        assert!(policy.records(201), "{preset}");
        for neighbour in [501, 505, 598] {
            assert_eq!(
                policy.records(neighbour),
                records_errors,
                "{preset} {neighbour}"
            );
        }
    }
}

#[test]
fn output_contains_no_secret() {
    let config = Config::from_toml(&GOOD.replace("memory", "redis://:hush@host")).unwrap();
    assert!(!format!("{config:?}").contains("hush"));
    assert!(!config.to_json().to_string().contains("hush"));
}

/// Returns the names of a section that the parser knows. Its error about an unknown name lists them.
fn known_names(section: &str) -> Vec<String> {
    let text = format!("[listen]\naddress = \"127.0.0.1:1\"\n{section}\nno-name = 1\n");
    let text = if section == "[listen]" {
        "[listen]\nno-name = 1".to_owned()
    } else {
        text
    };
    let error = toml::from_str::<Settings>(&text).unwrap_err();
    let (_, names) = error.message().split_once("`no-name`").unwrap();
    names
        .split('`')
        .skip(1)
        .step_by(2)
        .map(str::to_owned)
        .collect()
}

#[test]
fn reference_lists_each_setting() {
    let page = include_str!("../../../../docs/reference/proxy.md");
    for (heading, section) in [
        ("`[listen]`", "[listen]"),
        ("`tls`", "[listen.tls]"),
        ("`[admin]`", "[admin]"),
        ("`[store]`", "[store]"),
        ("`[identity]`", "[identity]"),
        ("`[limits]`", "[limits]"),
        ("`[drain]`", "[drain]"),
        ("`[rollout]`", "[rollout]"),
        ("`[upstream.NAME]`", "[upstream.a]"),
        ("`[[route]]`", "[[route]]"),
    ] {
        let (_, rest) = page.split_once(&format!("\n## {heading}\n")).unwrap();
        let text = rest.split("\n## ").next().unwrap();
        let listed: Vec<_> = text
            .lines()
            .filter_map(|line| line.strip_prefix("| `")?.split('`').next())
            .collect();
        assert_eq!(listed, known_names(section), "{section}");
    }
}

/// Returns the defaults that the reference lists.
#[test]
fn reference_lists_each_default() {
    let page = include_str!("../../../../docs/reference/proxy.md");
    let config = Config::from_toml(GOOD).unwrap().to_json();
    let mut checked = 0;
    for (heading, values) in [
        ("`[listen]`", &config["listen"]),
        ("`[store]`", &config["store"]),
        ("`[identity]`", &config["identity"]),
        ("`[limits]`", &config["limits"]),
        ("`[drain]`", &config["drain"]),
        ("`[rollout]`", &config["rollout"]),
        ("`[upstream.NAME]`", &config["upstream"]["app"]),
        ("`[[route]]`", &config["route"][0]),
    ] {
        let (_, rest) = page.split_once(&format!("\n## {heading}\n")).unwrap();
        let text = rest.split("\n## ").next().unwrap();
        for line in text.lines().filter(|line| line.starts_with("| `")) {
            let cells: Vec<_> = line
                .split('|')
                .map(|cell| cell.trim().trim_matches('`'))
                .collect();
            let value = &values[cells[1]];
            // Other cells name the source of the default.
            if let Ok(default) = serde_json::from_str::<serde_json::Value>(cells[2])
                && !value.is_null()
            {
                let is_equal = match (default.as_str(), value.as_str()) {
                    (Some(default), Some(value)) => {
                        default.replace(' ', "") == value.replace("1m", "60s").replace(' ', "")
                    }
                    _ => default == *value,
                };
                assert!(is_equal, "{} is {value}", cells[1]);
                checked += 1;
            }
        }
    }
    assert!(checked >= 20, "{checked}");
}
