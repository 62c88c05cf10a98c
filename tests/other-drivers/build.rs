//! Applies the diffs in `adopted` to the applications there.

use std::{env, fs, path::Path};

fn main() {
    let out = env::var("OUT_DIR").expect("set by Cargo");
    for app in ["newsletter", "users", "posts"] {
        let mut source = read(&format!("adopted/{app}.rs"));
        for step in ["layer", "exactly-once"] {
            let diff = read(&format!("adopted/{app}.{step}.diff"));
            let patch = diffy::Patch::from_str(&diff).expect("a unified diff");
            source = diffy::apply(&source, &patch).expect("the diff applies");
            let name = format!("{app}_{step}.rs").replace('-', "_");
            fs::write(Path::new(&out).join(name), &source).expect("a writable directory");
        }
    }
}

fn read(path: &str) -> String {
    println!("cargo::rerun-if-changed={path}");
    fs::read_to_string(path).expect("a file")
}
