//! Resolves names to items.

use crate::modules::{ModuleId, Modules, name};

/// The meaning of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// A module of the crate.
    Module(ModuleId),
    /// An item of the crate: its module and its name. The path has `rest` further segments, such as a variant.
    Item {
        module: ModuleId,
        name: String,
        rest: usize,
    },
    /// An item of another crate, with its whole path.
    External(Vec<String>),
    /// A name that nothing in the module declares: of the prelude, of the language, or a parameter.
    Unknown,
}

impl Modules {
    /// Returns the meaning of a path that is written in a module.
    pub(crate) fn resolve(&self, module: ModuleId, path: &[String]) -> Target {
        self.resolve_at(module, path, 0)
    }

    fn resolve_at(&self, module: ModuleId, path: &[String], depth: usize) -> Target {
        let [first, rest @ ..] = path else {
            return Target::Module(module);
        };
        if depth > MAX_DEPTH {
            return Target::Unknown;
        }
        let start = match first.as_str() {
            "" => return Target::External(rest.to_vec()),
            "crate" => Target::Module(0),
            "self" => Target::Module(module),
            "super" => match self.get(module).parent {
                Some(parent) => Target::Module(parent),
                None => return Target::Unknown,
            },
            _ => match self.lookup(module, first, rest.is_empty(), false, depth) {
                Target::Unknown if !rest.is_empty() => return Target::External(path.to_vec()),
                target => target,
            },
        };
        self.follow(start, rest, depth)
    }

    /// Follows the segments of a path after the first.
    fn follow(&self, start: Target, path: &[String], depth: usize) -> Target {
        let mut target = start;
        for (at, segment) in path.iter().enumerate() {
            target = match target {
                Target::Module(_) if segment == "super" => Target::Unknown,
                Target::Module(id) => self.lookup(id, segment, at + 1 == path.len(), true, depth),
                Target::Item { module, name, .. } => {
                    let rest = path.len() - at;
                    return Target::Item { module, name, rest };
                }
                Target::External(mut path) => {
                    path.push(segment.clone());
                    Target::External(path)
                }
                Target::Unknown => return Target::Unknown,
            };
        }
        target
    }

    /// Returns the meaning of one name in a module. `within` is `false` for the first segment of a path.
    fn lookup(
        &self,
        id: ModuleId,
        segment: &str,
        is_last: bool,
        within: bool,
        depth: usize,
    ) -> Target {
        let module = self.get(id);
        let child = module.children.get(segment);
        let is_item = module
            .items
            .iter()
            .any(|(item, _)| name(item).is_some_and(|name| name == segment));
        if let Some(child) = child
            && (!is_last || !is_item)
        {
            return Target::Module(child.id);
        }
        if is_item {
            return Target::Item {
                module: id,
                name: segment.to_owned(),
                rest: 0,
            };
        }
        let imports = || module.imports.iter();
        if let Some(import) = imports().find(|one| one.name.as_deref() == Some(segment)) {
            // `use serde;` imports a crate.
            if import.path.len() == 1 && import.path[0] == segment {
                return Target::External(import.path.clone());
            }
            let target = self.resolve_at(id, &import.path, depth + 1);
            return match target {
                Target::Unknown => Target::External(import.path.clone()),
                target => target,
            };
        }
        for import in imports().filter(|one| one.name.is_none()) {
            if let Target::Module(other) = self.resolve_at(id, &import.path, depth + 1)
                && other != id
            {
                let target = self.lookup(other, segment, is_last, true, depth + 1);
                if target != Target::Unknown {
                    return target;
                }
            }
        }
        if within && is_last && self.macros.contains_key(segment) {
            // An exported macro is at the root.
            return Target::Item {
                module: 0,
                name: segment.to_owned(),
                rest: 0,
            };
        }
        Target::Unknown
    }
}

const MAX_DEPTH: usize = 32;
