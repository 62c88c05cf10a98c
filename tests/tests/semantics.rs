//! `docs/semantics.md` names tests that exist.

use std::{collections::BTreeSet, fs, path::Path};

/// The names of all functions below a folder.
fn functions(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            functions(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let source = fs::read_to_string(&path).expect("a source file");
            for (at, _) in source.match_indices("fn ") {
                let name = source[at + 3..].split(['(', '<']).next();
                found.extend(name.map(str::to_owned));
            }
        }
    }
}

#[test]
fn every_row_names_a_test_that_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut found = BTreeSet::new();
    functions(&root.join("tests/tests"), &mut found);
    functions(&root.join("crates/tower-idempotency/src"), &mut found);

    let table = fs::read_to_string(root.join("docs/semantics.md")).expect("the table");
    let mut named = BTreeSet::new();
    for row in table.lines().filter(|line| line.starts_with("| ")) {
        let cell = row.trim_end_matches(" |").rsplit("| ").next();
        let cell = cell.expect("a last cell");
        if cell == "Test" {
            continue;
        }
        let names = cell
            .strip_prefix('`')
            .and_then(|cell| cell.strip_suffix('`'));
        let names = names.unwrap_or_else(|| panic!("a row without a test: {row}"));
        for name in names.split("`, `") {
            assert!(found.contains(name), "no such test: {name}");
            assert!(named.insert(name), "two rows for one test: {name}");
        }
    }
    assert!(named.len() > 150, "{}", named.len());
}
