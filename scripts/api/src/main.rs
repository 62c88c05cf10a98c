//! Lists the public items of each crate, and compares the lists with `docs/internals/api`. See `scripts/check-api`.

mod cfg;
mod macros;
mod modules;
mod paths;
mod public;
mod render;
mod resolve;
#[cfg(test)]
mod tests;
mod text;

use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

const UPDATE: &str = "scripts/check-api --update";

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let update = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => false,
        ["--update"] => true,
        _ => {
            eprintln!("usage: scripts/check-api [--update]");
            return ExitCode::from(2);
        }
    };
    match run(Path::new(""), update) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => {
            eprintln!("if the public API is to change, run {UPDATE} and commit the result");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}

/// Writes or compares the snapshot of each crate below `root`. Returns the number of differences.
fn run(root: &Path, update: bool) -> Result<usize, String> {
    let folder = root.join("docs/internals/api");
    let mut expected = BTreeSet::new();
    let mut differences = 0;
    for name in crates(&root.join("crates"))? {
        let library = root.join("crates").join(&name).join("src/lib.rs");
        let lines = api(&library, &|path| fs::read_to_string(path))
            .map_err(|error| format!("{name}: {error}"))?;
        let path = folder.join(&name).with_extension("txt");
        if update {
            fs::create_dir_all(&folder)
                .and_then(|()| fs::write(&path, lines.join("\n") + "\n"))
                .map_err(|error| format!("{}: {error}", path.display()))?;
        } else {
            let snapshot = fs::read_to_string(&path).unwrap_or_default();
            differences += report(&path, &snapshot, &lines);
        }
        expected.insert(path);
    }
    for path in files(&folder) {
        if !expected.contains(&path) {
            if update {
                fs::remove_file(&path).map_err(|error| format!("{}: {error}", path.display()))?;
            } else {
                eprintln!("{}: there is no such crate", path.display());
                differences += 1;
            }
        }
    }
    Ok(differences)
}

/// Returns the lines of the public API of the library at `path`.
fn api(
    path: &Path,
    read: &dyn Fn(&Path) -> std::io::Result<String>,
) -> Result<Vec<String>, String> {
    let modules = modules::Modules::load(path, read)?;
    render::lines(&modules, &public::items(&modules)?)
}

/// Prints the lines that only one list has, and returns their number.
fn report(path: &Path, snapshot: &str, lines: &[String]) -> usize {
    let changes = differences(snapshot, lines);
    if !changes.is_empty() {
        eprintln!("{}:", path.display());
    }
    for change in &changes {
        eprintln!("{change}");
    }
    changes.len()
}

/// Returns the lines that only the snapshot has (`-`) and those that only the crate has (`+`), in their order.
fn differences(snapshot: &str, lines: &[String]) -> Vec<String> {
    let old: BTreeSet<&str> = snapshot.lines().collect();
    let new: BTreeSet<&str> = lines.iter().map(String::as_str).collect();
    let mut changes: Vec<(&str, char)> = old.difference(&new).map(|line| (*line, '-')).collect();
    changes.extend(new.difference(&old).map(|line| (*line, '+')));
    // A changed signature is below the former one.
    changes.sort_by_key(|(line, sign)| (render::path_of(line), *sign == '+', *line));
    changes
        .into_iter()
        .map(|(line, sign)| format!("{sign} {line}"))
        .collect()
}

fn crates(folder: &Path) -> Result<Vec<String>, String> {
    let entries = fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut names: Vec<String> = entries
        .filter_map(Result::ok)
        .filter(|entry| entry.path().join("src/lib.rs").is_file())
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    Ok(names)
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect()
}
