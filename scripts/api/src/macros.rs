//! Macros: the patterns of public macros, and macros that define public items.

use proc_macro2::{TokenStream, TokenTree};
use syn::ItemMacro;

use crate::{
    modules::{ModuleId, Modules},
    text::text,
};

/// Returns the lines of a macro: one for each pattern if it is exported. If it is a call that may define public items,
/// returns its definition.
pub(crate) fn lines(modules: &Modules, module: ModuleId, item: &ItemMacro) -> Vec<String> {
    if let Some(name) = &item.ident {
        let mut attributes = item.attrs.iter();
        if !attributes.any(|one| one.path().is_ident("macro_export")) {
            return Vec::new();
        }
        let patterns = patterns(item).into_iter();
        return patterns
            .map(|pattern| format!("macro {name}! {pattern}"))
            .collect();
    }
    let called = item.mac.path.segments.last();
    let definition = called.and_then(|last| modules.macros.get(&last.ident.to_string()));
    let definition = definition.map(|definition| text(&definition.mac.tokens));
    let defines_nothing_public = definition.as_ref().is_some_and(|definition| {
        !definition
            .split(' ')
            .any(|word| word == "pub" || word.ends_with("impl") || word.starts_with("impl<"))
    });
    if defines_nothing_public {
        return Vec::new();
    }
    let mut path = modules.get(module).path.clone();
    path.push(text(&item.mac));
    let definition = without_docs(&definition.unwrap_or_default());
    vec![format!("macro {} = {definition}", path.join("::"))]
}

/// Returns the patterns of a macro: the token before each `=>`.
fn patterns(item: &ItemMacro) -> Vec<String> {
    let tokens: Vec<TokenTree> = item.mac.tokens.clone().into_iter().collect();
    let arrows = tokens.windows(3).filter(|window| match window {
        [_, TokenTree::Punct(one), TokenTree::Punct(two)] => {
            one.as_char() == '=' && two.as_char() == '>'
        }
        _ => false,
    });
    arrows
        .map(|window| text(TokenStream::from(window[0].clone())))
        .collect()
}

/// Returns the text of a macro without its doc comments.
fn without_docs(definition: &str) -> String {
    const DOC: &str = "#[doc = \"";
    let mut parts = definition.split(DOC);
    let mut rest = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        rest += part.split_once("\"] ").map_or("", |(_, rest)| rest);
    }
    rest
}
