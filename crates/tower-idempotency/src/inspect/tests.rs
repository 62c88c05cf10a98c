use std::{collections::HashSet, time::Duration};

use super::*;
use crate::{
    record::{Codec, ExecutionTrace, NeedsAttention, Origin},
    store::{Token, Ttl},
};

fn id(byte: u8) -> KeyId {
    KeyId::from_bytes([byte; 32])
}

#[test]
fn resolutions_apply_to_their_states() {
    use State::{Completed, InProgress, NeedsAttention as Attention, Orphaned, Unreadable};
    let complete = Resolution::Complete {
        record: "record".into(),
        retention: Ttl::MIN,
    };
    let attention = Resolution::NeedsAttention(NeedsAttention::new("examine"));
    for (resolution, expected) in [
        (Resolution::Free, &[Orphaned, Attention][..]),
        (Resolution::Retry, &[Orphaned, Attention]),
        (complete, &[Orphaned, Attention]),
        (attention, &[Orphaned, Attention]),
        (Resolution::BreakLease, &[InProgress]),
        (Resolution::DeleteRecord, &[Completed, Unreadable]),
    ] {
        let states = State::ALL.iter().copied();
        let found: Vec<_> = states.filter(|it| resolution.applies_to(*it)).collect();
        assert_eq!(found, expected, "{}", resolution.name());
        for &state in State::ALL {
            let checked = resolution.check(&Seen::new(id(1), state, 1, 1));
            assert_eq!(checked.is_ok(), expected.contains(&state));
        }
    }
}

#[test]
fn debug_of_resolution_shows_no_record() {
    let complete = Resolution::Complete {
        record: "card 4242".into(),
        retention: Ttl::MIN,
    };
    let attention = NeedsAttention::new("examine").with_reason("card 4242");
    for resolution in [complete, Resolution::NeedsAttention(attention)] {
        assert!(!format!("{resolution:?}").contains("4242"));
    }
}

#[test]
fn stored_failure_keeps_trace_and_reason() {
    const TRACEPARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let mut headers = http::HeaderMap::new();
    headers.insert("traceparent", http::HeaderValue::from_static(TRACEPARENT));
    let trace = ExecutionTrace::from_headers(&headers).expect("a trace");
    let origin = Origin {
        id: &id(1),
        traceparent: Some(&trace),
    };
    let first = NeedsAttention::new("refund-failed").with_reason("charged ch_123");
    let record = Codec::encode_attention(origin, None, &first);
    let read = NeedsAttention::in_record(&record).expect("a failure");
    let changed = read.with_code("examine");
    let (record, _) = Resolution::NeedsAttention(changed)
        .record(&id(1))
        .expect("a record");
    assert_eq!(ExecutionTrace::in_record(&id(1), &record), Some(trace));
    let read = NeedsAttention::in_record(&record).expect("a failure");
    assert_eq!((read.code(), read.reason()), ("examine", "charged ch_123"));
}

#[test]
fn state_names_parse_back() {
    for &state in State::ALL {
        assert_eq!(state.to_string().parse(), Ok(state));
        assert_eq!(State::from_code(state.code()), Some(state));
    }
    assert!("overdue".parse::<State>().is_err());
    assert_eq!(State::from_code(5), None);
}

#[test]
fn seen_text_has_every_part() {
    let base = Seen::new(id(1), State::Orphaned, 2, 3);
    let others = [
        Seen::new(id(2), State::Orphaned, 2, 3),
        Seen::new(id(1), State::InProgress, 2, 3),
        Seen::new(id(1), State::Orphaned, 3, 3),
        Seen::new(id(1), State::Orphaned, 2, 4),
    ];
    let texts: HashSet<_> = others.iter().chain([&base]).map(Seen::to_string).collect();
    assert_eq!(texts.len(), 5);
    let text = base.to_string();
    assert_eq!(text.parse(), Ok(base));
    assert!(
        text.bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
    );
    for wrong in [
        "",
        "AA",
        &text[1..],
        &text[..text.len() - 1],
        &format!("{text}A"),
        &format!("{text}="),
        &text.replace('A', "+"),
        &"A".repeat(text.len()),
        &"A".repeat(100_000),
        "\u{e9}",
    ] {
        assert!(wrong.parse::<Seen>().is_err(), "{wrong}");
    }
}

#[test]
fn version_covers_token_and_lease_expiry() {
    let tokens = [[1; 16], [2; 16]].map(Token::from_bytes);
    let versions: HashSet<_> = [
        Seen::version_of(None, None),
        Seen::version_of(None, Some(7)),
        Seen::version_of(Some(&tokens[0]), None),
        Seen::version_of(Some(&tokens[1]), None),
        Seen::version_of(Some(&tokens[0]), Some(7)),
        Seen::version_of(Some(&tokens[0]), Some(8)),
    ]
    .into();
    assert_eq!(versions.len(), 6);
}

#[test]
fn page_token_text_is_bounded() {
    let query = Query::new(State::Orphaned);
    let longest = PageToken::new("store", &query, &[0xff; PageToken::MAX_POSITION]);
    let text = longest.to_string();
    assert!(text.len() <= 1024, "{}", text.len());
    let parsed: PageToken = text.parse().expect("its own text");
    let position = parsed.position("store", &query).expect("its own query");
    assert_eq!(position, [0xff; PageToken::MAX_POSITION]);
    for wrong in [
        "",
        "A",
        "AQ",
        "AAAAAAAAAAAA",
        &format!("{text}AAAA"),
        "!",
        &"A".repeat(1 << 20),
    ] {
        assert!(wrong.parse::<PageToken>().is_err(), "{}", wrong.len());
    }
}

#[test]
fn page_token_belongs_to_store_and_filters() {
    let query = Query::new(State::Orphaned).with_owner("a");
    let token = PageToken::new("store", &query, b"7");
    let is_accepted = |store: &str, query: &Query| token.position(store, query).is_ok();
    assert!(is_accepted("store", &query));
    assert!(is_accepted("store", &query.clone().with_limit(7)));
    assert!(!is_accepted("other", &query));
    let prefix = "01234567".parse().expect("digits");
    for other in [
        Query::new(State::InProgress).with_owner("a"),
        Query::new(State::Orphaned),
        Query::new(State::Orphaned).with_operation("a"),
        query.clone().with_operation(""),
        query.clone().with_older_than(Duration::ZERO),
        query.clone().with_id_prefix(prefix),
    ] {
        assert!(!is_accepted("store", &other), "{other:?}");
    }
}

#[test]
fn unlisted_state_names_its_setting() {
    let abilities = Abilities::all()
        .without_list(State::Orphaned)
        .without_list_unless(State::Completed, "with_list(true)");
    let check = |state| abilities.check(&Query::new(state));
    for (state, setting) in [
        (State::Orphaned, None),
        (State::Completed, Some("with_list(true)")),
    ] {
        assert_eq!(abilities.setting_to_list(state), setting);
        let error = check(state).expect_err("the state is not listed");
        assert_eq!(error.kind(), InspectErrorKind::Unsupported);
        let source = std::error::Error::source(&error).map(ToString::to_string);
        let expected = setting.map(|it| format!("set `{it}` in each process to list them"));
        assert_eq!(source, expected);
    }
    assert_eq!(abilities.setting_to_list(State::InProgress), None);
    assert!(check(State::InProgress).is_ok());
}

#[test]
fn filters_apply_together() {
    let mut entry = Entry::new(Seen::new(id(0x6f), State::InProgress, 1, 1));
    entry.owner = "host:1".into();
    entry.operation = "POST /pay".into();
    entry.age = Duration::from_secs(10);
    let matching = Query::overdue(Duration::from_secs(9))
        .with_operation("POST")
        .with_owner("host:1")
        .with_id_prefix("6f6f6f6f".parse().expect("digits"));
    assert!(matching.matches(&entry));
    for other in [
        matching.clone().with_older_than(Duration::from_secs(10)),
        matching.clone().with_operation("POST /pay/"),
        matching.clone().with_owner("host"),
        matching
            .clone()
            .with_id_prefix("6f6f6f6e".parse().expect("digits")),
    ] {
        assert!(!other.matches(&entry), "{other:?}");
    }
    assert!(!Query::new(State::Orphaned).matches(&entry));
    let unreadable = Entry::unreadable(id(0x6f), 1, "damaged");
    assert!(matching.matches(&unreadable));
    let elsewhere = Entry::unreadable(id(0x6e), 1, "damaged");
    assert!(!matching.matches(&elsewhere));
}

#[test]
fn limit_is_bounded() {
    let limit = |limit| Query::new(State::Orphaned).with_limit(limit).limit();
    assert_eq!(
        [0, 1, 1000, 1001, u16::MAX].map(limit),
        [1, 1, 1000, 1000, 1000]
    );
}

#[test]
fn id_prefix_covers_odd_digits() {
    let digits = id(0x6f).to_hex();
    assert_eq!(digits.parse(), Ok(id(0x6f)));
    for length in 8..=64 {
        let prefix: IdPrefix = digits[..length].to_uppercase().parse().expect("digits");
        assert_eq!(prefix.to_string(), digits[..length]);
        assert!(prefix.matches(&id(0x6f)));
        let (first, last) = prefix.range();
        assert!(first <= id(0x6f) && id(0x6f) <= last);
        assert_eq!(prefix.to_key_id(), (length == 64).then(|| id(0x6f)));
        let mut other = *id(0x6f).as_bytes();
        other[(length - 1) / 2] ^= if length % 2 == 0 { 1 } else { 0x10 };
        assert!(!prefix.matches(&KeyId::from_bytes(other)), "{length}");
    }
    for wrong in [
        "",
        "6f6f6f6",
        "6f6f6f6g",
        "6f6f 6f6f",
        &"6".repeat(65),
        "\u{e9}6f6f6f",
    ] {
        assert!(wrong.parse::<IdPrefix>().is_err(), "{wrong}");
        assert!(wrong.parse::<KeyId>().is_err(), "{wrong}");
    }
}

#[test]
fn random_tokens_allow_no_retry() {
    let allowed = Token::retry_allowed().expect("randomness");
    assert!(allowed.allows_retry());
    assert_ne!(allowed, Token::retry_allowed().expect("randomness"));
    assert!(!Token::random().expect("randomness").allows_retry());
}

#[test]
fn futures_and_inspector_are_send() {
    fn is_send<T: Send>(_: &T) {}
    let inspector = Inspector::new(crate::MemoryStore::new());
    is_send(&inspector);
    is_send(&inspector.list(&Query::new(State::Orphaned)));
    let _: &(dyn Send + Sync) = &inspector.clone();
    assert!(format!("{inspector:?}").contains("Inspector"));
}
