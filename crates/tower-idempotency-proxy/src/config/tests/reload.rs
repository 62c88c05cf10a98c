//! Changes that a running proxy accepts.

use super::{Config, EnforcedRoutes, GOOD};

fn reload(from: &str, to: &str) -> Result<(), String> {
    let old = Config::from_toml(GOOD).unwrap();
    let new = Config::from_toml(&GOOD.replacen(from, to, 1)).unwrap();
    accepts(&old, &new)
}

/// Reloads `old` to `new`. Returns the message of the error.
pub(super) fn accepts(old: &Config, new: &Config) -> Result<(), String> {
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

/// An upstream that knows keys executes a request again if it gets another key.
#[test]
fn enforced_route_keeps_its_forward_key() {
    const PASS: &str = "forward_key = \"pass\"";
    let observed = |lines: &str| with_lines(&format!("mode = \"observe\"\n{lines}"));
    for texts in [
        vec![GOOD.to_owned(), with_lines(PASS)],
        vec![with_lines(PASS), GOOD.to_owned()],
        vec![GOOD.to_owned(), observed(PASS)],
        vec![GOOD.to_owned(), observed(""), with_lines(PASS)],
        vec![GOOD.to_owned(), with_front(PASS)],
    ] {
        let (index, error) = reload_all(&texts).unwrap_err();
        assert_eq!(index, texts.len() - 1, "{error}");
        assert!(error.starts_with("forward_key of the route "), "{error}");
        assert!(error.ends_with("needs a restart"), "{error}");
    }
    let off = format!("mode = \"off\"\n{PASS}");
    for texts in [
        vec![observed(""), observed(PASS), with_lines(PASS)],
        vec![GOOD.to_owned(), GOOD.replacen("mode = \"off\"", &off, 1)],
    ] {
        assert_eq!(reload_all(&texts), Ok(()));
    }
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

/// A protected route ignores the letter case, so the new one gets the same requests.
#[test]
fn changed_letter_case_is_named_as_cause() {
    let last = "[[route]]\npath = \"/**\"\nupstream = \"app\"\nmode = \"off\"\n";
    for old in [GOOD.to_owned(), GOOD.replacen(last, "", 1)] {
        for path in ["/v1/Charges", "/V1/{name}", "/V1/**"] {
            let texts = [old.clone(), old.replacen("/v1/charges", path, 1)];
            let (_, error) = reload_all(&texts).unwrap_err();
            let expected = format!(
                "the protected route /v1/charges has changed to {path}, which needs a restart"
            );
            assert_eq!(error, expected);
        }
    }
    // A route that was there before does not replace the one that is removed.
    let last = "[[route]]\npath = \"/**\"\nupstream = \"app\"\nmode = \"off\"\n";
    let wider = "[[route]]\npath = \"/v1/**\"\nupstream = \"app\"\n";
    let old = GOOD.replacen(last, wider, 1);
    assert_ne!(old, GOOD);
    let removed = old.replacen("path = \"/v1/charges\"", "path = \"/other\"", 1);
    let (_, error) = reload_all(&[old, removed]).unwrap_err();
    assert!(
        error.starts_with("the protected route /v1/charges is missing"),
        "{error}"
    );
    // The last route gets requests that the changed route does not match.
    let narrower = GOOD.replacen("/v1/charges", "/V1/Charges/{id}", 1);
    let (_, error) = reload_all(&[GOOD.to_owned(), narrower]).unwrap_err();
    assert!(
        error.starts_with("the route /** would no longer"),
        "{error}"
    );
}
