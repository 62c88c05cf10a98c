//! Public items as lines.

use std::collections::BTreeSet;

use quote::ToTokens;
use syn::{
    Fields, FnArg, GenericParam, Generics, ImplItem, Item, ItemImpl, ItemTrait, Pat, Path,
    ReceiverKind, Signature, TraitItem,
};

use crate::{
    cfg::Marks,
    macros,
    modules::{ModuleId, Modules, is_public, name},
    paths::{Part, Paths, names, private_path},
    public::{ItemId, PublicItems},
    resolve::Target,
    text::text,
};

/// Returns a line for each public item, sorted by path.
pub(crate) fn lines(modules: &Modules, public: &PublicItems) -> Result<Vec<String>, String> {
    let mut writer = Writer {
        modules,
        public,
        lines: public.lines.iter().cloned().collect(),
        private: BTreeSet::new(),
    };
    for ((module, of), (path, marks)) in &public.paths {
        for (item, own) in &modules.get(*module).items {
            if name(item).is_some_and(|name| name == of) {
                writer.item(*module, item, &path.join("::"), &marks.joined_with(own))?;
            }
        }
    }
    for (module, content) in modules.iter() {
        for (item, marks) in &content.items {
            match item {
                Item::Impl(item) => writer.implementation(module, item, marks)?,
                Item::Macro(item) => {
                    for line in macros::lines(modules, module, item) {
                        writer.line(marks, &line);
                    }
                }
                _ => {}
            }
        }
    }
    writer.aliases();
    let mut lines: Vec<String> = writer.lines.into_iter().collect();
    // The definition of a type is before its traits.
    lines.sort_by_cached_key(|line| (path_of(line), line.starts_with("impl"), line.clone()));
    Ok(lines)
}

/// Returns the path by which a line is sorted: of the item itself, or of the type that an `impl` is for.
pub(crate) fn path_of(line: &str) -> String {
    let mut rest = line;
    while let Some(after) = rest.strip_prefix("#[") {
        rest = after.split_once("] ").map_or("", |(_, rest)| rest);
    }
    if rest.starts_with("impl") {
        rest = rest.split_once(" for ").map_or(rest, |(_, rest)| rest);
    }
    let path = rest
        .split(' ')
        .find(|word| !KEYWORDS.contains(word))
        .unwrap_or_default();
    let end = path.find(['<', '(', '{', '=']).unwrap_or(path.len());
    path[..end].trim_end_matches(':').to_owned()
}

const KEYWORDS: [&str; 15] = [
    "async", "const", "enum", "field", "fn", "impl", "macro", "mod", "static", "struct", "trait",
    "type", "unsafe", "use", "variant",
];

struct Writer<'a> {
    modules: &'a Modules,
    public: &'a PublicItems,
    lines: BTreeSet<String>,
    /// Private items in public signatures.
    private: BTreeSet<ItemId>,
}

impl Writer<'_> {
    fn line(&mut self, marks: &Marks, line: &str) {
        self.lines.insert(marks.mark_line(line));
    }

    fn item(
        &mut self,
        module: ModuleId,
        item: &Item,
        path: &str,
        marks: &Marks,
    ) -> Result<(), String> {
        match item {
            Item::Const(item) => {
                let ty = self.show(module, &[], &*item.ty);
                self.line(marks, &format!("const {path}: {ty}"));
            }
            Item::Static(item) => {
                let ty = self.show(module, &[], &*item.ty);
                self.line(marks, &format!("static {path}: {ty}"));
            }
            Item::Fn(item) => {
                let signature = self.signature(module, &[], &item.sig, path);
                self.line(marks, &signature);
            }
            Item::Type(item) => {
                let (generics, bounds) = self.generics(module, &item.generics);
                let ty = self.show(module, &[&item.generics], &*item.ty);
                self.line(marks, &format!("type {path}{generics} = {ty}{bounds}"));
            }
            Item::Struct(item) => {
                let (generics, bounds) = self.generics(module, &item.generics);
                let private = item.fields.iter().any(|field| !is_public(&field.vis));
                let form = match (&item.fields, private) {
                    (Fields::Named(_), true) => " { .. }",
                    (Fields::Unnamed(_), true) => "(..)",
                    (Fields::Named(_), false) => " {}",
                    (Fields::Unnamed(_), false) => "()",
                    (Fields::Unit, _) => "",
                };
                let line = format!("struct {path}{generics}{bounds}{form}");
                self.line(marks, &line);
                self.derives(module, &item.attrs, &item.generics, path, marks)?;
                for (at, field) in item.fields.iter().enumerate() {
                    if is_public(&field.vis)
                        && let Some(marks) = marks.of_item(&field.attrs)?
                    {
                        let name = field.ident.as_ref();
                        let name = name.map_or_else(|| at.to_string(), ToString::to_string);
                        let ty = self.show(module, &[&item.generics], &field.ty);
                        self.line(&marks, &format!("field {path}::{name}: {ty}"));
                    }
                }
            }
            Item::Enum(item) => {
                let (generics, bounds) = self.generics(module, &item.generics);
                self.line(marks, &format!("enum {path}{generics}{bounds}"));
                self.derives(module, &item.attrs, &item.generics, path, marks)?;
                for variant in &item.variants {
                    if let Some(marks) = marks.of_item(&variant.attrs)? {
                        let mut fields = variant.fields.clone();
                        for field in &mut fields {
                            field.attrs.clear();
                        }
                        let fields = self.show(module, &[&item.generics], &fields);
                        let space = if fields.starts_with('{') { " " } else { "" };
                        let line = format!("variant {path}::{}{space}{fields}", variant.ident);
                        self.line(&marks, &line);
                    }
                }
            }
            Item::Trait(item) => self.r#trait(module, item, path, marks)?,
            other => return Err(format!("cannot list {}", text(other))),
        }
        Ok(())
    }

    fn r#trait(
        &mut self,
        module: ModuleId,
        item: &ItemTrait,
        path: &str,
        marks: &Marks,
    ) -> Result<(), String> {
        let (generics, bounds) = self.generics(module, &item.generics);
        let supertraits = self.show(module, &[&item.generics], &item.supertraits);
        let colon = if supertraits.is_empty() { "" } else { ": " };
        let unsafety = if item.unsafety.is_some() {
            "unsafe "
        } else {
            ""
        };
        let line = format!("{unsafety}trait {path}{generics}{colon}{supertraits}{bounds}");
        self.line(marks, &line);
        let outer = [&item.generics];
        for item in &item.items {
            let (attributes, line) = match item {
                TraitItem::Fn(item) => {
                    let signature = self.signature(
                        module,
                        &outer,
                        &item.sig,
                        &format!("{path}::{}", item.sig.ident),
                    );
                    let body = if item.default.is_some() {
                        " { .. }"
                    } else {
                        ""
                    };
                    (&item.attrs, format!("{signature}{body}"))
                }
                TraitItem::Const(item) => {
                    let ty = self.show(module, &outer, &item.ty);
                    let default = if item.default.is_some() { " = .." } else { "" };
                    (
                        &item.attrs,
                        format!("const {path}::{}: {ty}{default}", item.ident),
                    )
                }
                TraitItem::Type(item) => {
                    let bounds = self.show(module, &outer, &item.bounds);
                    let colon = if bounds.is_empty() { "" } else { ": " };
                    (
                        &item.attrs,
                        format!("type {path}::{}{colon}{bounds}", item.ident),
                    )
                }
                other => return Err(format!("cannot list {}", text(other))),
            };
            if let Some(marks) = marks.of_item(attributes)? {
                self.line(&marks, &line);
            }
        }
        Ok(())
    }

    /// Adds the traits that a type derives.
    fn derives(
        &mut self,
        module: ModuleId,
        attributes: &[syn::Attribute],
        generics: &Generics,
        path: &str,
        marks: &Marks,
    ) -> Result<(), String> {
        for attribute in attributes {
            if !attribute.path().is_ident("derive") {
                continue;
            }
            let parse = syn::punctuated::Punctuated::<Path, syn::Token![,]>::parse_terminated;
            let derived = attribute.parse_args_with(parse);
            for derived in derived.map_err(|error| error.to_string())? {
                let derived = match text(&derived).as_str() {
                    "Debug" => "std::fmt::Debug".to_owned(),
                    "Hash" => "std::hash::Hash".to_owned(),
                    _ => self.show(module, &[], &derived),
                };
                let (parameters, bounds) = self.generics(module, generics);
                let names = arguments(generics);
                let line = format!("impl{parameters} {derived} for {path}{names}{bounds}");
                self.line(&marks.inherited(), &line);
            }
        }
        Ok(())
    }

    fn implementation(
        &mut self,
        module: ModuleId,
        item: &ItemImpl,
        marks: &Marks,
    ) -> Result<(), String> {
        let outer = [&item.generics];
        let own = match &*item.self_ty {
            syn::Type::Path(ty) if ty.qself.is_none() => {
                self.modules.resolve(module, &names(&ty.path))
            }
            _ => Target::Unknown,
        };
        let path = match &own {
            Target::Item { module, name, .. } => match self.public.path(*module, name) {
                Some(path) => Some(path),
                None => return Ok(()),
            },
            _ => None,
        };
        let marks = match &own {
            // A hidden type hides its methods.
            Target::Item { module, name, .. } => {
                let (_, of_type) = &self.public.paths[&(*module, name.clone())];
                of_type.inherited().joined_with(marks)
            }
            _ => marks.clone(),
        };
        let ty = self.show(module, &outer, &*item.self_ty);
        let (parameters, bounds) = self.generics(module, &item.generics);
        if let Some((implemented, _)) = &item.trait_ {
            if let Target::Item { module, name, .. } =
                self.modules.resolve(module, &names(implemented))
                && self.public.path(module, &name).is_none()
            {
                return Ok(());
            }
            let private = self.private.len();
            let implemented = self.show(module, &outer, implemented);
            if self.private.len() > private {
                // Of a type that other crates cannot name, such as `From<Private>`.
                return Ok(());
            }
            let line = format!("impl{parameters} {implemented} for {ty}{bounds}");
            self.line(&marks, &line);
            for item in &item.items {
                if let ImplItem::Type(item) = item
                    && let Some(path) = &path
                {
                    let ty = self.show(module, &outer, &item.ty);
                    let line = format!("type {path}::{} = {ty} in {implemented}", item.ident);
                    self.line(&marks, &line);
                }
            }
            return Ok(());
        }
        let path = path.ok_or_else(|| format!("cannot find the type of impl {ty}"))?;
        let generic = match &*parameters {
            "" => String::new(),
            _ => format!(" in impl{parameters} {ty}{bounds}"),
        };
        for item in &item.items {
            let (visibility, attributes) = match item {
                ImplItem::Fn(item) => (&item.vis, &item.attrs),
                ImplItem::Const(item) => (&item.vis, &item.attrs),
                other => return Err(format!("cannot list {}", text(other))),
            };
            let Some(marks) = marks.of_item(attributes)? else {
                continue;
            };
            if !is_public(visibility) {
                continue;
            }
            let line = match item {
                ImplItem::Fn(item) => {
                    let name = format!("{path}::{}", item.sig.ident);
                    self.signature(module, &outer, &item.sig, &name)
                }
                ImplItem::Const(item) => {
                    let ty = self.show(module, &outer, &item.ty);
                    format!("const {path}::{}: {ty}", item.ident)
                }
                _ => continue,
            };
            self.line(&marks, &format!("{line}{generic}"));
        }
        Ok(())
    }

    /// Adds the private type aliases that public signatures contain, and those that these contain.
    fn aliases(&mut self) {
        let mut done = BTreeSet::new();
        while let Some((module, of)) = self.private.difference(&done).next().cloned() {
            done.insert((module, of.clone()));
            let found = self.modules.get(module).items.iter();
            for (item, _) in found.filter(|(item, _)| name(item).is_some_and(|name| *name == of)) {
                if let Item::Type(item) = item {
                    let (generics, bounds) = self.generics(module, &item.generics);
                    let ty = self.show(module, &[&item.generics], &*item.ty);
                    let path = private_path(self.modules, module, &of).join("::");
                    let line = format!("type {path}{generics} = {ty}{bounds}");
                    self.line(&Marks::default(), &line);
                }
            }
        }
    }

    fn signature(
        &mut self,
        module: ModuleId,
        outer: &[&Generics],
        signature: &Signature,
        path: &str,
    ) -> String {
        let mut signature = signature.clone();
        for input in &mut signature.inputs {
            match input {
                // `mut self` is `self` for callers.
                FnArg::Receiver(receiver) if matches!(receiver.kind, ReceiverKind::Value) => {
                    receiver.mutability = None;
                }
                FnArg::Receiver(_) => {}
                FnArg::Typed(input) => {
                    input.attrs.clear();
                    if let Pat::Ident(name) = &mut *input.pat {
                        name.mutability = None;
                    }
                }
            }
        }
        let generics = signature.generics.clone();
        let scopes = [outer, &[&generics]].concat();
        let shown = self.show(module, &scopes, &signature);
        let plain = format!("fn {}", signature.ident);
        shown.replacen(&plain, &format!("fn {path}"), 1)
    }

    /// Returns the parameters with their bounds, and the `where` clause.
    fn generics(&mut self, module: ModuleId, generics: &Generics) -> (String, String) {
        let scopes = [generics];
        let parameters = self.show(module, &scopes, generics);
        let bounds = generics.where_clause.as_ref();
        let bounds = bounds.map(|bounds| format!(" {}", self.show(module, &scopes, bounds)));
        let bounds = bounds.unwrap_or_default();
        (parameters, bounds.trim_end_matches(',').to_owned())
    }

    /// Returns the text of a part of a signature, with the public path of each type.
    fn show<T: ToTokens + Part + Clone>(
        &mut self,
        module: ModuleId,
        scopes: &[&Generics],
        part: &T,
    ) -> String {
        let mut part = part.clone();
        let parameters = scopes.iter().flat_map(|generics| &generics.params);
        let parameters = parameters.filter_map(|parameter| match parameter {
            GenericParam::Type(parameter) => Some(parameter.ident.to_string()),
            GenericParam::Const(parameter) => Some(parameter.ident.to_string()),
            GenericParam::Lifetime(_) => None,
        });
        let mut paths = Paths {
            modules: self.modules,
            public: self.public,
            module,
            parameters: parameters.collect(),
            private: Vec::new(),
        };
        part.replace(&mut paths);
        self.private.extend(paths.private);
        text(&part).trim_end_matches(',').to_owned()
    }
}

/// Returns the arguments with which a type of these parameters is named.
fn arguments(generics: &Generics) -> String {
    let names: Vec<String> = generics
        .params
        .iter()
        .map(|parameter| match parameter {
            GenericParam::Type(parameter) => parameter.ident.to_string(),
            GenericParam::Const(parameter) => parameter.ident.to_string(),
            GenericParam::Lifetime(parameter) => parameter.lifetime.to_string(),
        })
        .collect();
    match &*names {
        [] => String::new(),
        names => format!("<{}>", names.join(", ")),
    }
}
