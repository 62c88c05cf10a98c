use super::*;

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

fn message(text: &str) -> String {
    Config::from_toml(text).unwrap_err().to_string()
}

/// Returns the message after `from` is replaced.
fn broken(from: &str, to: &str) -> String {
    assert!(GOOD.contains(from), "{from}");
    message(&GOOD.replacen(from, to, 1))
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
            "expected url or url_file in [store], or the variable IDEMPOTENCY_STORE",
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
            broken("http://127.0.0.1:3000", "http://u:hush@127.0.0.1:3000"),
            "line 6: the URL of an upstream has no user and no password",
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
            "line 7: timeout is longer than zero",
        ),
        (
            broken("8080\"", "8080\"\nidle_timeout = \"0s\""),
            "line 3: idle_timeout is longer than zero",
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
            "line 8: `**` is only the end of a path, in `/v1/**/x`",
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
            "line 10: unknown_statuses are 5xx, found 404",
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
            with_route("lease = \"10ms\""),
            "line 10: lease is at least 1s, or paused processes lose it",
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
        for method in ["POST", "PUT", "PATCH", "DELETE", "QUERY"] {
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
    let observed = "host = \"b.example\"\npath = \"/**\"\nupstream = \"b\"\nmode = \"observe\"";
    assert!(two_hosts("", observed).is_err());
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
fn environment_replaces_store_of_file() {
    let file = ::tests::scratch::Scratch::new().file("none");
    assert!(Config::load(&file, None).is_err());
    let config = Config::read(GOOD, Some("sqlite:keys.db")).unwrap();
    assert_eq!(config.store_url(), "sqlite:keys.db");
}

#[test]
fn output_contains_no_secret() {
    let config = Config::from_toml(&GOOD.replace("memory", "redis://:hush@host")).unwrap();
    assert!(!format!("{config:?}").contains("hush"));
    assert!(!config.to_json().to_string().contains("hush"));
}

fn reload(from: &str, to: &str) -> Result<(), String> {
    let old = Config::from_toml(GOOD).unwrap();
    let new = Config::from_toml(&GOOD.replacen(from, to, 1)).unwrap();
    accepts(&old, &new)
}

/// Reloads `old` to `new`. Returns the message of the error.
fn accepts(old: &Config, new: &Config) -> Result<(), String> {
    let accepted = old.0.accepts(&new.0, &EnforcedRoutes::new(&old.0));
    accepted.map_err(|error| error.to_string())
}

#[test]
fn reload_accepts_changes_that_keep_records() {
    for (from, to) in [
        ("3000", "3001"),
        ("mode = \"off\"", "mode = \"enforce\""),
        (
            "upstream = \"app\"\n",
            "upstream = \"app\"\nretention = \"1h\"\nmissing_key = \"reject\"\n",
        ),
        (
            "[[route]]",
            "[[route]]\npath = \"/health\"\nupstream = \"app\"\nmode = \"off\"\n[[route]]",
        ),
        (
            "[[route]]",
            "[[route]]\npath = \"/v1/{x}\"\nupstream = \"app\"\n[[route]]",
        ),
        // The operator lowers the share of all routes.
        (
            "[[route]]",
            "[rollout]\nshare = \"1%\"\n[[route]]\npath = \"/v1/{x}\"\nupstream = \"app\"\n[[route]]",
        ),
        (
            "upstream = \"app\"\n",
            "upstream = \"app\"\nshare = \"1%\"\n",
        ),
    ] {
        assert_eq!(reload(from, to), Ok(()), "{to}");
    }
}

#[test]
fn reload_rejects_changes_that_lose_records() {
    let shadow = "[[route]]\npath = \"/v1/{x}\"\nupstream = \"app\"\nmode = \"off\"\n[[route]]";
    let share = "[[route]]\npath = \"/v1/{x}\"\nupstream = \"app\"\nshare = \"1%\"\n[[route]]";
    for (from, to) in [
        ("\"memory\"", "\"sqlite:other.db\""),
        ("[store]", "[identity]\nnamespace = \"other\"\n[store]"),
        ("/v1/charges", "/v2/charges"),
        (
            "upstream = \"app\"\n",
            "upstream = \"app\"\nmode = \"off\"\n",
        ),
        (
            "upstream = \"app\"\n",
            "upstream = \"app\"\nprincipal = \"authorization\"\n",
        ),
        (
            "upstream = \"app\"\n",
            "upstream = \"app\"\npreset = \"stripe\"\n",
        ),
        (
            "upstream = \"app\"\n",
            "upstream = \"app\"\nfingerprint = \"canonical-json\"\n",
        ),
        (
            "upstream = \"app\"\n",
            "upstream = \"app\"\nhost_in_scope = true\n",
        ),
        ("[[route]]", shadow),
        ("[[route]]", share),
    ] {
        let error = reload(from, to).unwrap_err();
        assert!(
            error.contains("record") || error.contains("execute again"),
            "{error}"
        );
    }
}

#[test]
fn reload_considers_letter_case_of_earlier_routes() {
    // A route that is off matches only its own letter case. `/V1/Charges` gets the protected route after it.
    let with_first = |mode: &str| {
        let first = format!(
            "[[route]]\npath = \"/v1/charges\"\nupstream = \"app\"\nmode = \"{mode}\"\n[[route]]\npath = \"/v1/**\""
        );
        let text = GOOD.replacen("[[route]]\npath = \"/v1/charges\"", &first, 1);
        Config::from_toml(&text).unwrap()
    };
    let old = with_first("off");
    assert_eq!(accepts(&old, &old), Ok(()));
    let error = accepts(&old, &with_first("observe")).unwrap_err();
    assert!(error.contains("no longer protect"), "{error}");
}

/// Loads the configurations in order. Returns the message of the first error, and the index of its configuration.
fn reload_all(texts: &[String]) -> Result<(), (usize, String)> {
    let mut live = Config::from_toml(&texts[0]).unwrap();
    let mut enforced = EnforcedRoutes::new(&live.0);
    for (index, text) in texts.iter().enumerate().skip(1) {
        let new = Config::from_toml(text).unwrap();
        let accepted = live.0.accepts(&new.0, &enforced);
        accepted.map_err(|error| (index, error.to_string()))?;
        enforced.add(&new.0);
        // A reload for another reason, such as a new certificate.
        assert_eq!(
            new.0
                .accepts(&new.0, &enforced)
                .map_err(|error| error.to_string()),
            Ok(())
        );
        live = new;
    }
    Ok(())
}

/// Returns the configuration with these lines in the protected route.
fn with_lines(lines: &str) -> String {
    let route = format!("upstream = \"app\"\n{lines}\n");
    GOOD.replacen("upstream = \"app\"\n", &route, 1)
}

/// Returns the configuration with another route for POST in front.
fn with_front(lines: &str) -> String {
    let front = format!(
        "[[route]]\npath = \"/v1/{{x}}\"\nmethods = [\"POST\"]\nupstream = \"app\"\n{lines}\n[[route]]"
    );
    GOOD.replacen("[[route]]", &front, 1)
}

const OTHER: &str = "principal = \"authorization\"";

#[test]
fn route_that_was_enforced_keeps_its_identity() {
    let observed = |lines: &str| with_lines(&format!("mode = \"observe\"\n{lines}"));
    for line in [
        OTHER,
        "preset = \"stripe\"",
        "key_header = \"x-key\"",
        "key_syntax = \"strict\"",
        "host_in_scope = true",
        "fingerprint = \"canonical-json\"",
    ] {
        for changed in [observed(line), with_lines(line)] {
            let texts = [GOOD.to_owned(), observed(""), changed];
            let (index, error) = reload_all(&texts).unwrap_err();
            assert_eq!(index, 2, "{line}: {error}");
            assert!(error.contains("needs a restart"), "{error}");
        }
    }
    let retention = with_lines("retention = \"1h\"");
    let texts = [GOOD.to_owned(), observed(""), retention, GOOD.to_owned()];
    assert_eq!(reload_all(&texts), Ok(()));
}

#[test]
fn route_without_records_may_change() {
    let observed = with_lines("mode = \"observe\"");
    let other = with_lines(&format!("mode = \"observe\"\n{OTHER}"));
    let texts = [observed, other, with_lines(OTHER)];
    assert_eq!(reload_all(&texts), Ok(()));
}

#[test]
fn removed_route_keeps_its_identity() {
    let observed = with_lines("mode = \"observe\"");
    let at = |path: &str, lines: &str| with_lines(lines).replacen("/v1/charges", path, 1);
    // Another route that gets its requests, under any pattern.
    for (path, expected) in [
        ("/v1/charges", Err(3)),
        ("/v1/{name}", Err(3)),
        ("/v1/**", Err(3)),
        ("/v1/charges/**", Err(3)),
        ("/v2/charges", Ok(())),
        ("/v1/charges/{id}", Ok(())),
    ] {
        let removed = at("/health", "mode = \"off\"");
        let texts = [GOOD.to_owned(), observed.clone(), removed, at(path, OTHER)];
        let result = reload_all(&texts).map_err(|(index, _)| index);
        assert_eq!(result, expected, "{path}");
        let [first, second, third, _] = texts;
        let same = at(path, "");
        assert_eq!(reload_all(&[first, second, third, same]), Ok(()), "{path}");
    }
}

/// A route that covers the removed one hides the routes after it.
#[test]
fn route_after_cover_keeps_its_own_identity() {
    // The last route observes, so it has no records.
    let observed_last = format!("mode = \"observe\"\n{OTHER}");
    let last = |text: String| text.replacen("mode = \"off\"", &observed_last, 1);
    let observed = with_lines("mode = \"observe\"");
    let covered = GOOD.replacen("/v1/charges", "/v1/**", 1);
    let texts = [GOOD.to_owned(), observed, covered].map(last);
    assert_eq!(reload_all(&texts), Ok(()));
    let removed = texts[1].replacen("/v1/charges", "/health", 1);
    let [first, second, _] = texts;
    let (index, _) = reload_all(&[first, second, removed]).unwrap_err();
    assert_eq!(index, 2);
}

#[test]
fn route_in_front_keeps_identity_after_its_absence() {
    let front = with_front(OTHER);
    let observed_front = with_front(&format!("mode = \"observe\"\n{OTHER}"));
    // The protected route has no records of its requests.
    let texts = [observed_front, front];
    assert_eq!(reload_all(&texts), Ok(()));
    // It has some after a reload without the route in front.
    let [observed_front, front] = texts;
    let texts = [observed_front, GOOD.to_owned(), front];
    let (index, error) = reload_all(&texts).unwrap_err();
    assert_eq!(index, 2, "{error}");
}

#[test]
fn narrower_route_in_front_may_stay() {
    let front = with_front(&format!("mode = \"observe\"\n{OTHER}"));
    let narrow = front.replacen("/v1/{x}", "/v1/charges", 1);
    assert_eq!(reload_all(&[front, narrow]), Ok(()));
}

#[test]
fn known_routes_do_not_grow_with_reloads() {
    let observed = "mode = \"observe\"";
    let narrow = "[[route]]\npath = \"/v1/refunds\"\nmethods = [\"POST\"]\nupstream = \"app\"\nmode = \"observe\"\n[[route]]";
    let nested = with_front(observed).replacen("[[route]]", narrow, 1);
    let Config(settings) = Config::from_toml(&nested).unwrap();
    let mut enforced = EnforcedRoutes::new(&settings);
    for _ in 0..10 {
        enforced.add(&settings);
    }
    assert_eq!(enforced.known_in_front(), 2);
}

/// A route that gets no requests has no records.
#[test]
fn covered_route_may_change() {
    let covered = |lines: &str| {
        let front =
            "[[route]]\npath = \"/v1/**\"\nupstream = \"app\"\nmode = \"observe\"\n[[route]]";
        with_lines(lines).replacen("[[route]]", front, 1)
    };
    assert_eq!(reload_all(&[covered(""), with_lines(OTHER)]), Ok(()));
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
