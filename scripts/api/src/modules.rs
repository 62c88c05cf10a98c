//! The module tree of a crate, read from its files.

use std::{
    collections::HashMap,
    io,
    path::{Path, PathBuf},
};

use quote::ToTokens;
use syn::{Attribute, Ident, Item, ItemMacro, ItemMod, UseTree, Visibility};

use crate::{cfg::Marks, text::text};

/// Place of a module in [`Modules`].
pub(crate) type ModuleId = usize;

/// All modules of a crate. The first one is the root.
#[derive(Default)]
pub(crate) struct Modules {
    all: Vec<Module>,
    /// Macros by name.
    pub(crate) macros: HashMap<String, ItemMacro>,
}

/// A module, without the items that the build does not have.
#[derive(Default)]
pub(crate) struct Module {
    /// Path from the root of the crate.
    pub(crate) path: Vec<String>,
    pub(crate) parent: Option<ModuleId>,
    pub(crate) children: HashMap<String, Child>,
    pub(crate) imports: Vec<Import>,
    /// Items except modules and imports, with their marks.
    pub(crate) items: Vec<(Item, Marks)>,
}

/// A module inside of another.
#[derive(Debug)]
pub(crate) struct Child {
    pub(crate) id: ModuleId,
    pub(crate) public: bool,
    pub(crate) marks: Marks,
}

/// A name that a `use` declares, or all names of a module if `name` is [`None`].
#[derive(Clone, Debug)]
pub(crate) struct Import {
    pub(crate) name: Option<String>,
    pub(crate) path: Vec<String>,
    pub(crate) public: bool,
    pub(crate) marks: Marks,
}

type Read<'a> = dyn Fn(&Path) -> io::Result<String> + 'a;

impl Modules {
    /// Reads the crate with its root file at `path`.
    pub(crate) fn load(path: &Path, read: &Read<'_>) -> Result<Self, String> {
        let mut modules = Self::default();
        modules.all.push(Module::default());
        let folder = path.parent().unwrap_or(Path::new("")).to_owned();
        modules.file(0, path, &folder, &Marks::default(), read)?;
        Ok(modules)
    }

    pub(crate) fn get(&self, id: ModuleId) -> &Module {
        &self.all[id]
    }

    /// Returns the modules with their places.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (ModuleId, &Module)> {
        self.all.iter().enumerate()
    }

    fn file(
        &mut self,
        id: ModuleId,
        path: &Path,
        folder: &Path,
        marks: &Marks,
        read: &Read<'_>,
    ) -> Result<(), String> {
        let failed = |error: String| format!("{}: {error}", path.display());
        let source = read(path).map_err(|error| failed(error.to_string()))?;
        let file = syn::parse_file(&source).map_err(|error| failed(error.to_string()))?;
        self.items(id, file.items, folder, marks, read)
            .map_err(failed)
    }

    fn items(
        &mut self,
        id: ModuleId,
        items: Vec<Item>,
        folder: &Path,
        outer: &Marks,
        read: &Read<'_>,
    ) -> Result<(), String> {
        for item in items {
            let Some(marks) = outer.of_item(attributes(&item)?)? else {
                continue;
            };
            match item {
                Item::Mod(module) => self.module(id, module, folder, marks, read)?,
                Item::Use(item) => {
                    let public = is_public(&item.vis);
                    let mut path = Vec::new();
                    if item.leading_colon.is_some() {
                        path.push(String::new());
                    }
                    let imports = &mut self.all[id].imports;
                    leaves(&item.tree, &mut path, &mut |name, path| {
                        imports.push(Import {
                            name,
                            path,
                            public,
                            marks: marks.clone(),
                        });
                    });
                }
                Item::Macro(item) => self.r#macro(id, item, folder, outer, marks, read)?,
                Item::Verbatim(tokens) => return Err(format!("cannot read {}", text(tokens))),
                other => self.all[id].items.push((other, marks)),
            }
        }
        Ok(())
    }

    fn module(
        &mut self,
        parent: ModuleId,
        item: ItemMod,
        folder: &Path,
        marks: Marks,
        read: &Read<'_>,
    ) -> Result<(), String> {
        if item.attrs.iter().any(|one| one.path().is_ident("path")) {
            return Err(format!("module {} has a path of its own", item.ident));
        }
        let (id, name) = (self.all.len(), item.ident.to_string());
        let mut path = self.all[parent].path.clone();
        path.push(name.clone());
        self.all.push(Module {
            path,
            parent: Some(parent),
            ..Module::default()
        });
        let below = folder.join(&name);
        match item.content {
            Some((_, items)) => self.items(id, items, &below, &marks, read)?,
            None => {
                let files: [PathBuf; 2] = [
                    folder.join(&name).with_extension("rs"),
                    below.join("mod.rs"),
                ];
                let file = files.iter().find(|file| read(file).is_ok());
                let file = file.ok_or_else(|| format!("module {name} has no file"))?;
                self.file(id, file, &below, &marks, read)?;
            }
        }
        let child = Child {
            id,
            public: is_public(&item.vis),
            marks,
        };
        self.all[parent].children.insert(name, child);
        Ok(())
    }

    /// Reads the items that a macro of another crate contains. Macros of this crate are listed as they are.
    fn r#macro(
        &mut self,
        id: ModuleId,
        item: ItemMacro,
        folder: &Path,
        outer: &Marks,
        marks: Marks,
        read: &Read<'_>,
    ) -> Result<(), String> {
        if let Some(name) = &item.ident {
            self.macros.insert(name.to_string(), item.clone());
            self.all[id].items.push((Item::Macro(item), marks));
            return Ok(());
        }
        let name = item.mac.path.segments.last().map(|last| &last.ident);
        match name.map(Ident::to_string).as_deref() {
            Some("pin_project") => {
                let file: syn::File =
                    syn::parse2(item.mac.tokens).map_err(|error| error.to_string())?;
                self.items(id, file.items, folder, outer, read)
            }
            // Its statics are private.
            Some("thread_local") if !text(&item.mac.tokens).contains("pub ") => Ok(()),
            _ => {
                self.all[id].items.push((Item::Macro(item), marks));
                Ok(())
            }
        }
    }
}

pub(crate) fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

/// Returns the name of an item that has one.
pub(crate) fn name(item: &Item) -> Option<&Ident> {
    Some(match item {
        Item::Const(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::Fn(item) => &item.sig.ident,
        Item::Static(item) => &item.ident,
        Item::Struct(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::Type(item) => &item.ident,
        Item::Union(item) => &item.ident,
        Item::Macro(item) => item.ident.as_ref()?,
        _ => return None,
    })
}

/// Returns the visibility of an item that has a name.
pub(crate) fn visibility(item: &Item) -> Option<&Visibility> {
    Some(match item {
        Item::Const(item) => &item.vis,
        Item::Enum(item) => &item.vis,
        Item::Fn(item) => &item.vis,
        Item::Static(item) => &item.vis,
        Item::Struct(item) => &item.vis,
        Item::Trait(item) => &item.vis,
        Item::Type(item) => &item.vis,
        Item::Union(item) => &item.vis,
        _ => return None,
    })
}

fn attributes(item: &Item) -> Result<&[Attribute], String> {
    Ok(match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        other => return Err(format!("cannot read {}", text(other.to_token_stream()))),
    })
}

/// Calls `leaf` with each name that a `use` declares and its path.
fn leaves(
    tree: &UseTree,
    path: &mut Vec<String>,
    leaf: &mut dyn FnMut(Option<String>, Vec<String>),
) {
    match tree {
        UseTree::Path(tree) => {
            path.push(tree.ident.to_string());
            leaves(&tree.tree, path, leaf);
            path.pop();
        }
        UseTree::Name(tree) if tree.ident == "self" => leaf(path.last().cloned(), path.clone()),
        UseTree::Name(tree) => {
            let mut path = path.clone();
            path.push(tree.ident.to_string());
            leaf(path.last().cloned(), path);
        }
        UseTree::Rename(tree) => {
            let mut path = path.clone();
            if tree.ident != "self" {
                path.push(tree.ident.to_string());
            }
            leaf(Some(tree.rename.to_string()), path);
        }
        UseTree::Glob(_) => leaf(None, path.clone()),
        UseTree::Group(tree) => {
            for tree in &tree.items {
                leaves(tree, path, leaf);
            }
        }
    }
}
