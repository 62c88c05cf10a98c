//! Paths in signatures, replaced by the public paths of their items.

use std::collections::HashSet;

use proc_macro2::Span;
use syn::{
    Fields, Generics, Ident, Path, PathArguments, PathSegment, Signature, Token, Type,
    TypeParamBound, TypePath, WhereClause,
    punctuated::Punctuated,
    visit_mut::{self, VisitMut},
};

use crate::{
    modules::{ModuleId, Modules},
    public::{ItemId, PublicItems},
    resolve::Target,
};

/// Replaces paths in a part of a signature.
pub(crate) struct Paths<'a> {
    pub(crate) modules: &'a Modules,
    pub(crate) public: &'a PublicItems,
    /// The module that contains the signature.
    pub(crate) module: ModuleId,
    /// Names of parameters, which are not items.
    pub(crate) parameters: HashSet<String>,
    /// Items of the crate that no path leads to from outside.
    pub(crate) private: Vec<ItemId>,
}

/// A part of a signature.
pub(crate) trait Part {
    fn replace(&mut self, paths: &mut Paths<'_>);
}

macro_rules! parts {
    ($($part:ty: $visit:ident),* $(,)?) => { $(
        impl Part for $part {
            fn replace(&mut self, paths: &mut Paths<'_>) {
                paths.$visit(self);
            }
        }
    )* };
}

parts! {
    Fields: visit_fields_mut,
    Generics: visit_generics_mut,
    Path: visit_path_mut,
    Signature: visit_signature_mut,
    Type: visit_type_mut,
    WhereClause: visit_where_clause_mut,
}

impl Part for Punctuated<TypeParamBound, Token![+]> {
    fn replace(&mut self, paths: &mut Paths<'_>) {
        for bound in self {
            paths.visit_type_param_bound_mut(bound);
        }
    }
}

impl VisitMut for Paths<'_> {
    fn visit_type_path_mut(&mut self, ty: &mut TypePath) {
        let Some(own) = &mut ty.qself else {
            self.visit_path_mut(&mut ty.path);
            return;
        };
        // `<Type as Trait>::Name`: the trait is the beginning of the path.
        self.visit_type_mut(&mut own.ty);
        let segments: Vec<PathSegment> = ty.path.segments.iter().cloned().collect();
        let (of_trait, rest) = segments.split_at(own.position);
        let mut of_trait = Path {
            leading_colon: ty.path.leading_colon,
            segments: of_trait.iter().cloned().collect(),
        };
        self.visit_path_mut(&mut of_trait);
        own.position = of_trait.segments.len();
        ty.path.leading_colon = of_trait.leading_colon;
        ty.path.segments = of_trait
            .segments
            .into_iter()
            .chain(rest.iter().cloned())
            .collect();
    }

    fn visit_path_mut(&mut self, path: &mut Path) {
        visit_mut::visit_path_mut(self, path);
        let names = names(path);
        if self.parameters.contains(&names[0]) || names[0] == "Self" {
            return;
        }
        let (replacement, rest) = match self.modules.resolve(self.module, &names) {
            Target::Item { module, name, rest } => match self.public.path(module, &name) {
                Some(public) => (public.split("::").map(str::to_owned).collect(), rest),
                None => {
                    self.private.push((module, name.clone()));
                    (private_path(self.modules, module, &name), rest)
                }
            },
            Target::External(path) => (without_prelude(path), 0),
            Target::Module(_) | Target::Unknown => return,
        };
        let segments: Vec<PathSegment> = path.segments.iter().cloned().collect();
        let (replaced, rest) = segments.split_at(segments.len() - rest);
        let mut new: Vec<PathSegment> = replacement
            .iter()
            .map(|name| PathSegment::from(Ident::new(name, Span::call_site())))
            .collect();
        if let (Some(new), Some(last)) = (new.last_mut(), replaced.last()) {
            new.arguments = last.arguments.clone();
        }
        debug_assert!(
            replaced
                .iter()
                .rev()
                .skip(1)
                .all(|segment| matches!(segment.arguments, PathArguments::None))
        );
        path.leading_colon = None;
        path.segments = new.into_iter().chain(rest.iter().cloned()).collect();
    }
}

/// Returns the names of a path. The first one is empty if the path begins with `::`.
pub(crate) fn names(path: &Path) -> Vec<String> {
    let start = path.leading_colon.map(|_| String::new());
    let segments = path
        .segments
        .iter()
        .map(|segment| segment.ident.to_string());
    start.into_iter().chain(segments).collect()
}

/// Returns the path of an item that is not public.
pub(crate) fn private_path(modules: &Modules, module: ModuleId, name: &str) -> Vec<String> {
    let mut path = vec!["crate".to_owned()];
    path.extend(modules.get(module).path.iter().cloned());
    path.push(name.to_owned());
    path
}

/// Returns the last name of an item that the prelude has, so that an import makes no difference.
fn without_prelude(path: Vec<String>) -> Vec<String> {
    const PRELUDE: [&str; 20] = [
        "AsRef",
        "Box",
        "Clone",
        "Copy",
        "Default",
        "Drop",
        "Eq",
        "Fn",
        "FnMut",
        "FnOnce",
        "From",
        "Future",
        "Into",
        "Iterator",
        "Option",
        "Ord",
        "PartialEq",
        "Send",
        "String",
        "Sync",
    ];
    let of_std = matches!(
        path.first().map(String::as_str),
        Some("std" | "core" | "alloc")
    );
    match path.last() {
        Some(last) if of_std && PRELUDE.contains(&last.as_str()) => vec![last.clone()],
        _ => path,
    }
}
