//! Conditions of items, evaluated for a build with all features and without tests.

use syn::{Attribute, Meta, Token, punctuated::Punctuated};

use crate::text::text;

/// Conditions under which an item exists, and attributes that callers notice.
#[derive(Clone, Debug, Default)]
pub(crate) struct Marks {
    /// Attributes, such as `#[must_use]`.
    pub(crate) attributes: Vec<String>,
    /// Conditions on features.
    pub(crate) conditions: Vec<String>,
}

impl Marks {
    /// Returns the marks of an item inside of one with these marks, or [`None`] if the build has no such item.
    pub(crate) fn of_item(&self, attributes: &[Attribute]) -> Result<Option<Self>, String> {
        let mut marks = self.inherited();
        for attribute in attributes {
            let path = text(attribute.path());
            match path.as_str() {
                "cfg" => {
                    let condition: Meta =
                        attribute.parse_args().map_err(|error| error.to_string())?;
                    if !holds(&condition)? {
                        return Ok(None);
                    }
                    let condition = text(&condition);
                    if condition.contains("feature") && !marks.conditions.contains(&condition) {
                        marks.conditions.push(condition);
                    }
                }
                "must_use" | "deprecated" | "non_exhaustive" => {
                    marks.attributes.push(format!("#[{path}]"));
                }
                "doc" if text(attribute) == HIDDEN && !marks.is_hidden() => {
                    marks.attributes.push(HIDDEN.to_owned());
                }
                _ => {}
            }
        }
        Ok(Some(marks))
    }

    fn is_hidden(&self) -> bool {
        self.attributes.iter().any(|one| one == HIDDEN)
    }

    /// Returns the marks that an item passes on to its parts: a hidden module hides its contents.
    pub(crate) fn inherited(&self) -> Self {
        let hidden = self.attributes.iter().filter(|one| *one == HIDDEN);
        Self {
            attributes: hidden.cloned().collect(),
            conditions: self.conditions.clone(),
        }
    }

    /// Returns the marks of an item that has these and `other`.
    pub(crate) fn joined_with(&self, other: &Self) -> Self {
        let join = |one: &[String], two: &[String]| {
            let mut joined = one.to_vec();
            joined.extend(two.iter().filter(|mark| !one.contains(mark)).cloned());
            joined
        };
        Self {
            attributes: join(&self.attributes, &other.attributes),
            conditions: join(&self.conditions, &other.conditions),
        }
    }

    /// Adds the marks to a line.
    pub(crate) fn mark_line(&self, line: &str) -> String {
        let mut marked = String::new();
        for attribute in &self.attributes {
            marked += attribute;
            marked += " ";
        }
        marked += line;
        for condition in &self.conditions {
            marked += &format!(" [{condition}]");
        }
        marked
    }
}

const HIDDEN: &str = "#[doc(hidden)]";

fn holds(condition: &Meta) -> Result<bool, String> {
    let name = text(condition.path());
    match condition {
        Meta::Path(_) => match name.as_str() {
            "unix" => Ok(true),
            "test" | "shuttle" | "docsrs" | "doctest" => Ok(false),
            _ => Err(format!("unknown condition {name}")),
        },
        Meta::NameValue(_) if name == "feature" => Ok(true),
        Meta::NameValue(_) => Err(format!("unknown condition {name}")),
        Meta::List(list) => {
            let parse = Punctuated::<Meta, Token![,]>::parse_terminated;
            let parts = list.parse_args_with(parse);
            let parts = parts.map_err(|error| error.to_string())?;
            let parts: Vec<bool> = parts.iter().map(holds).collect::<Result<_, _>>()?;
            match (name.as_str(), &*parts) {
                ("not", [part]) => Ok(!part),
                ("all", _) => Ok(parts.iter().all(|part| *part)),
                ("any", _) => Ok(parts.iter().any(|part| *part)),
                _ => Err(format!("unknown condition {name}")),
            }
        }
    }
}
