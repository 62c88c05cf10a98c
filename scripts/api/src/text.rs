//! Formats tokens as one line of text.

use proc_macro2::{Delimiter, Spacing, TokenStream, TokenTree};
use quote::ToTokens;

/// Returns the tokens as one line, spaced like formatted code.
pub(crate) fn text(tokens: impl ToTokens) -> String {
    let mut flat = Vec::new();
    flatten(tokens.to_token_stream(), &mut flat);
    let mut line = String::new();
    for (at, token) in flat.iter().enumerate() {
        let before = at.checked_sub(1).map(|at| flat[at].as_str());
        let after = flat.get(at + 1).map(String::as_str);
        // Of a list on several lines.
        if token == "," && matches!(after, Some(")" | ">" | "]" | "}")) {
            continue;
        }
        let before = match before {
            Some(",") if matches!(token.as_str(), ")" | ">" | "]" | "}") => flat.get(at - 2),
            _ => at.checked_sub(1).map(|at| &flat[at]),
        };
        if before.is_some_and(|before| is_spaced(before, token)) {
            line.push(' ');
        }
        line += token;
    }
    line
}

fn flatten(tokens: TokenStream, flat: &mut Vec<String>) {
    let mut joint = false;
    for token in tokens {
        match token {
            TokenTree::Group(group) => {
                let (open, close) = match group.delimiter() {
                    Delimiter::Parenthesis => ("(", ")"),
                    Delimiter::Brace => ("{", "}"),
                    Delimiter::Bracket => ("[", "]"),
                    Delimiter::None => ("", ""),
                };
                flat.extend((!open.is_empty()).then(|| open.to_owned()));
                flatten(group.stream(), flat);
                flat.extend((!close.is_empty()).then(|| close.to_owned()));
                joint = false;
            }
            TokenTree::Punct(punct) => {
                let sign = punct.as_char();
                match flat.last_mut() {
                    Some(last) if joint && is_operator(last, sign) => last.push(sign),
                    _ => flat.push(sign.to_string()),
                }
                joint = punct.spacing() == Spacing::Joint;
            }
            TokenTree::Ident(ident) => {
                match flat.last_mut() {
                    Some(last) if joint && last == "'" => *last += &ident.to_string(),
                    _ => flat.push(ident.to_string()),
                }
                joint = false;
            }
            TokenTree::Literal(literal) => {
                flat.push(literal.to_string());
                joint = false;
            }
        }
    }
}

fn is_operator(first: &str, second: char) -> bool {
    matches!(
        (first, second),
        (":", ':') | ("-", '>') | ("=", '>') | ("=", '=') | (".", '.') | ("..", '.' | '=')
    )
}

/// Returns `true` if there is a space between two tokens.
fn is_spaced(before: &str, token: &str) -> bool {
    // The type that has no value, and a macro.
    if token == "!" {
        return before == "->";
    }
    if matches!(token, "," | ";" | ":" | "::" | ")" | "]" | ">" | ".")
        || matches!(
            before,
            "(" | "[" | "&" | "::" | "<" | "." | "?" | "#" | "!" | "$" | ".."
        )
    {
        return false;
    }
    match token {
        "}" => before != "{",
        // An argument list, or a tuple after one of these.
        "(" | "[" => {
            matches!(
                before,
                "," | ":"
                    | "->"
                    | "="
                    | "=>"
                    | "+"
                    | "|"
                    | "dyn"
                    | "impl"
                    | "in"
                    | "where"
                    | "for"
                    | "as"
                    | "mut"
            ) || before.starts_with('\'')
        }
        "<" => matches!(
            before,
            "," | ":" | "->" | "=" | "+" | "as" | "dyn" | "where"
        ),
        _ => true,
    }
}
