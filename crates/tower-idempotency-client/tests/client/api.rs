//! The public interface, as a list of names. A change of the list is a change for users.

use std::{fs, path::Path};

/// Returns the lines that declare a public item, with the type that they belong to.
fn public_items(source: &str) -> Vec<String> {
    let mut owner = String::new();
    let mut items = Vec::new();
    let code = source
        .split(
            "
#[cfg(test)]
mod tests",
        )
        .next()
        .unwrap();
    let code = code
        .split(
            "
#[cfg(doctest)]",
        )
        .next()
        .unwrap();
    for line in code.lines() {
        if let Some(implemented) = line.strip_prefix("impl") {
            // Without the parameters of the implementation, which contain no `>` of their own.
            let implemented = match implemented.strip_prefix('<') {
                Some(rest) => rest.split_once("> ").unwrap().1,
                None => implemented.trim_start(),
            };
            let name = implemented.split(" for ").last().unwrap();
            let name = name.split([' ', '<', '{']).next();
            owner = name.unwrap().to_owned();
        }
        let line = line.trim();
        let Some(declared) = line.strip_prefix("pub ") else {
            continue;
        };
        let words: Vec<_> = declared.split([' ', '(', '<', '{', ';', ':']).collect();
        let Some(at) = words
            .iter()
            .position(|word| ["fn", "struct", "enum", "trait"].contains(word))
        else {
            continue;
        };
        items.push(if words[at] == "fn" {
            format!("{owner}::{}", words[at + 1])
        } else {
            format!("{} {}", words[at], words[at + 1])
        });
    }
    items
}

#[test]
fn public_interface_is_as_listed() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let files = |directory: &Path| {
        let files = fs::read_dir(directory).unwrap();
        files.map(|file| file.unwrap().path()).collect::<Vec<_>>()
    };
    let mut items: Vec<_> = [files(&sources), files(&sources.join("outbox"))]
        .concat()
        .into_iter()
        .filter(|path| path.is_file())
        .flat_map(|path| public_items(&fs::read_to_string(path).unwrap()))
        .collect();
    items.sort();
    let types = items.iter().filter(|item| !item.contains("::")).count();
    assert!(types <= 30, "{types} types");
    insta::assert_snapshot!(items.join("\n"), @r"
    Attempt::code
    Attempt::error
    Attempt::response
    Budget::new
    Entry::body
    Entry::decode
    Entry::encode
    Entry::first_sent
    Entry::headers
    Entry::key
    Entry::method
    Entry::new
    Entry::or_first_sent
    Entry::or_provider
    Entry::provider
    Entry::uri
    Entry::with_headers_of
    Error::is_expired
    Error::operation
    Error::outcome
    FileOutbox::open
    FileOutbox::with_max_bytes
    FileOutbox::without_fsync
    IdempotencyKeyLayer::new
    IdempotencyKeyLayer::with_header
    IdempotencyKeyLayer::with_methods
    IdempotencyKeyLayer::with_operations
    IdempotencyKeyLayer::with_protocol
    Operation::attempts
    Operation::derived
    Operation::first_sent
    Operation::key
    Operation::new
    Operation::new_v7
    Operation::outcome
    Operation::provider
    Operation::with_first_sent
    Operation::with_key
    Operation::with_provider
    OutboxError::new
    OutboxLayer::new
    OutboxLayer::with_headers
    OutboxLayer::with_manual_removal
    OutboxLayer::with_providers
    OutboxService::recover
    Outcome::can_delete_key
    PostgresOutbox::migrate
    PostgresOutbox::new
    PostgresOutbox::remove_in
    PostgresOutbox::store_in
    PostgresOutbox::with_table
    ProviderChoice::choose
    ProviderChoice::of
    Recovery::next
    RetryLayer::into_reqwest
    RetryLayer::new
    RetryLayer::with_backoff
    RetryLayer::with_body_clone
    RetryLayer::with_budget
    RetryLayer::with_deadline
    RetryLayer::with_jitter_seed
    RetryLayer::with_keys
    RetryLayer::with_lifetime
    RetryLayer::with_max_attempts
    RetryLayer::with_max_retry_after
    RetryLayer::with_throttled_base
    RetryLayer::with_verdict
    SqliteOutbox::migrate
    SqliteOutbox::new
    SqliteOutbox::with_table
    enum Cause
    enum Outcome
    enum Protocol
    enum Verdict
    struct Attempt
    struct Budget
    struct Entry
    struct Error
    struct FileOutbox
    struct IdempotencyKeyLayer
    struct InvalidKey
    struct Operation
    struct OutboxError
    struct OutboxLayer
    struct OutboxService
    struct PostgresOutbox
    struct ProviderChoice
    struct Recovered
    struct Recovery
    struct ResponseBody
    struct ResponseFuture
    struct Retry
    struct RetryLayer
    struct SetIdempotencyKey
    struct SqliteOutbox
    trait Outbox
    ");
}
