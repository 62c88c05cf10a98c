//! Initial data directories of databases. The first server of a version creates one, and later servers copy it.

use std::{
    env,
    ffi::OsStr,
    fs,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    path::{Path, PathBuf},
    process::Command,
};

use crate::playground::run;

/// Returns the path of the template for this version of the server. It is in the target directory, because not every run of
/// the tests deletes its temporary directory.
///
/// `install` is the command that creates the data directory, without the paths of one server. It names the owner of the
/// files.
///
/// # Panics
///
/// Panics if the server does not print its version.
pub(super) fn path(server: &Path, install: &Command) -> PathBuf {
    let version = run(&server.to_string_lossy(), ["--version"]);
    let version = version.expect("a server prints its version");
    let mut hasher = DefaultHasher::new();
    (version, install.get_program()).hash(&mut hasher);
    for arg in install.get_args() {
        arg.hash(&mut hasher);
    }
    let name = server.file_name().unwrap_or_default().to_string_lossy();
    let target = env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let servers = root.join(target).join("servers");
    servers.join(format!("{name}-{:016x}", hasher.finish()))
}

/// Copies the template to `data`. If there is none, calls `create`, and makes a template of the directory that it has
/// created. No server has used that directory yet, so it contains no socket and no process id.
///
/// The template contains no file of `unshared`. Each server creates its own.
pub(super) fn fill(data: &Path, template: &Path, unshared: &[&str], create: impl FnOnce()) {
    if template.is_dir() && copy(template, data) {
        return;
    }
    // The copy may be incomplete, for example because the template belongs to another user.
    let _ = fs::remove_dir_all(data);
    create();
    save(data, template, unshared);
}

/// Makes a template of the directory, unless another process does that first. The tests can do without a template, so
/// errors are ignored.
fn save(data: &Path, template: &Path, unshared: &[&str]) {
    let (Some(servers), Some(directory)) = (template.parent(), data.parent()) else {
        return;
    };
    // The directory of a server has a unique name.
    let incomplete = servers.join(directory.file_name().unwrap_or_default());
    // A killed process may have left it.
    let _ = fs::remove_dir_all(&incomplete);
    let is_copied = fs::create_dir_all(servers).is_ok() && copy(data, &incomplete);
    let has_no_unshared_file = unshared.iter().all(|name| {
        let file = incomplete.join(name);
        !file.exists() || fs::remove_file(file).is_ok()
    });
    // After a power failure, the renamed directory could otherwise contain empty files.
    let _ = run("sync", [OsStr::new("-f"), incomplete.as_os_str()]);
    // The rename fails if another process has made the template.
    let is_saved = is_copied && has_no_unshared_file && fs::rename(&incomplete, template).is_ok();
    if !is_saved {
        let _ = fs::remove_dir_all(&incomplete);
    }
}

/// Copies a directory with its owners and permissions. Returns `false` if that fails.
fn copy(from: &Path, to: &Path) -> bool {
    // Most bytes are zero: the copy of a MariaDB directory uses 7 MB in place of 114 MB.
    let options = ["-a", "-T", "--sparse=always", "--"].map(OsStr::new);
    let paths = [from.as_os_str(), to.as_os_str()];
    run("cp", options.into_iter().chain(paths)).is_ok()
}

#[cfg(test)]
mod tests {
    use std::{fs::Permissions, os::unix::fs::PermissionsExt as _, sync::Barrier, thread};

    use super::*;
    use crate::scratch::Scratch;

    const UNSHARED: [&str; 1] = ["identity"];

    /// Returns the path of the data directory of a server, whose own directory exists.
    fn data(scratch: &Scratch, server: &str) -> PathBuf {
        let directory = scratch.file(server);
        fs::create_dir(&directory).expect("a throwaway directory");
        directory.join("data")
    }

    fn create(data: &Path) {
        fs::create_dir(data).expect("a throwaway directory");
        fs::set_permissions(data, Permissions::from_mode(0o700)).expect("it exists");
        for name in ["rows", "identity"] {
            fs::write(data.join(name), name).expect("a throwaway file");
        }
    }

    fn names(directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(directory).expect("a directory");
        let names = entries.map(|entry| entry.expect("an entry").file_name());
        names.map(|name| name.display().to_string()).collect()
    }

    #[test]
    fn concurrent_servers_save_one_template() {
        let scratch = Scratch::new();
        let template = scratch.file("servers/template");
        let barrier = Barrier::new(8);
        thread::scope(|scope| {
            for n in 0..8 {
                let (template, barrier) = (&template, &barrier);
                let data = data(&scratch, &format!("server-{n}"));
                scope.spawn(move || {
                    fill(&data, template, &UNSHARED, || {
                        barrier.wait();
                        create(&data);
                    });
                    assert_eq!(names(&data).len(), 2);
                });
            }
        });
        assert_eq!(names(&scratch.file("servers")), ["template"]);

        let data = data(&scratch, "late");
        fill(&data, &template, &UNSHARED, || {
            panic!("there is a template")
        });
        assert_eq!(names(&data), ["rows"]);
        let mode = fs::metadata(&data).expect("it exists").permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
    }

    #[test]
    fn failed_copy_is_created() {
        let scratch = Scratch::new();
        let template = scratch.file("servers/template");
        let first = data(&scratch, "first");
        fill(&first, &template, &UNSHARED, || create(&first));
        // The copy fails, because its directory does not exist.
        let second = scratch.file("second/data");
        fill(&second, &template, &UNSHARED, || {
            create(&data(&scratch, "second"));
        });
        assert_eq!(names(&second).len(), 2);
        assert_eq!(names(&scratch.file("servers")), ["template"]);
    }
}
