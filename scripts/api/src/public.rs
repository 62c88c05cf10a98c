//! The items that other crates can name, with their public paths.

use std::collections::{BTreeMap, HashMap, VecDeque};

use crate::{
    cfg::Marks,
    modules::{ModuleId, Modules, is_public, visibility},
    resolve::Target,
};

/// An item of a module.
pub(crate) type ItemId = (ModuleId, String);

/// Public paths of items.
#[derive(Debug, Default)]
pub(crate) struct PublicItems {
    /// The shortest path of each item, and the marks of the modules and of the `use` on the way.
    pub(crate) paths: BTreeMap<ItemId, (Vec<String>, Marks)>,
    /// Further paths, and public modules: lines without an item.
    pub(crate) lines: Vec<String>,
}

impl PublicItems {
    /// Returns the public path of an item.
    pub(crate) fn path(&self, module: ModuleId, name: &str) -> Option<String> {
        let (path, _) = self.paths.get(&(module, name.to_owned()))?;
        Some(path.join("::"))
    }
}

/// Returns the public items of a crate.
pub(crate) fn items(modules: &Modules) -> Result<PublicItems, String> {
    let mut public = PublicItems::default();
    // Breadth first, so that the first path of an item is the shortest.
    let mut waiting = VecDeque::from([(0, Vec::new(), Marks::default())]);
    let mut known: HashMap<ModuleId, String> = HashMap::new();
    while let Some((id, path, marks)) = waiting.pop_front() {
        let shown = path.join("::");
        if let Some(first) = known.get(&id) {
            public.lines.push(format!("use {shown} = {first}"));
            continue;
        }
        known.insert(id, shown.clone());
        if id != 0 {
            public.lines.push(marks.mark_line(&format!("mod {shown}")));
        }
        module(modules, id, &path, &marks, &mut public, &mut waiting)?;
    }
    Ok(public)
}

type Waiting = VecDeque<(ModuleId, Vec<String>, Marks)>;

/// Adds the public items of a module, and queues its public modules.
fn module(
    modules: &Modules,
    id: ModuleId,
    path: &[String],
    marks: &Marks,
    public: &mut PublicItems,
    waiting: &mut Waiting,
) -> Result<(), String> {
    let module = modules.get(id);
    let below = |name: &str| [path, &[name.to_owned()]].concat();
    for (item, _) in &module.items {
        if let (Some(name), Some(visibility)) = (crate::modules::name(item), visibility(item))
            && is_public(visibility)
        {
            let name = name.to_string();
            add(public, (id, name.clone()), below(&name), marks);
        }
    }
    let mut children: Vec<_> = module.children.iter().collect();
    children.sort_by_key(|(name, _)| *name);
    for (name, child) in children {
        if child.public {
            waiting.push_back((child.id, below(name), marks.joined_with(&child.marks)));
        }
    }
    for import in module.imports.iter().filter(|import| import.public) {
        let marks = marks.joined_with(&import.marks);
        let target = modules.resolve(id, &import.path);
        let Some(name) = &import.name else {
            match target {
                // The items of the module, at the path of this one.
                Target::Module(other) => {
                    self::module(modules, other, path, &marks, public, waiting)?;
                }
                _ => return Err(format!("cannot follow {}::*", import.path.join("::"))),
            }
            continue;
        };
        match target {
            Target::Module(other) => waiting.push_back((other, below(name), marks)),
            Target::Item {
                module,
                name: of,
                rest: 0,
            } => {
                add(public, (module, of), below(name), &marks);
            }
            Target::External(of) => {
                let line = format!("use {} = {}", below(name).join("::"), of.join("::"));
                public.lines.push(marks.mark_line(&line));
            }
            Target::Item { .. } | Target::Unknown => {
                return Err(format!("cannot follow {}", import.path.join("::")));
            }
        }
    }
    Ok(())
}

fn add(public: &mut PublicItems, item: ItemId, path: Vec<String>, marks: &Marks) {
    match public.paths.get(&item) {
        None => {
            public.paths.insert(item, (path, marks.clone()));
        }
        Some((first, _)) if *first == path => {}
        Some((first, _)) => {
            let line = format!("use {} = {}", path.join("::"), first.join("::"));
            public.lines.push(marks.mark_line(&line));
        }
    }
}
