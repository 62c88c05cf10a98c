//! Environment variables that replace settings of the file.

use std::{borrow::Cow, ffi::OsString, ops::Range};

use toml::{
    Spanned,
    de::{DeString, DeTable, DeValue},
};

use super::{ConfigError, error::suggestion};

/// The start of the names of all variables. It has two underscores, because Kubernetes sets variables with one, such as
/// `IDEMPOTENCY_PROXY_PORT` for a service `idempotency-proxy`.
const PREFIX: &str = "IDEMPOTENCY_PROXY__";

/// A variable of the proxy. The value may be a secret.
pub(super) struct Variable {
    name: String,
    value: String,
}

/// The sources of settings: the text of the file and the variables.
///
/// Each value has a span. The span of a variable is empty. It begins after the text, at the length of the text + 1 + the index of
/// the variable.
pub(super) struct Sources<'a> {
    pub(super) text: &'a str,
    pub(super) variables: &'a [Variable],
}

impl Variable {
    /// Selects the variables of the proxy, in the order of their names.
    pub(super) fn select(
        variables: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<Vec<Self>, ConfigError> {
        let mut selected = Vec::new();
        for (name, value) in variables {
            let name = name.to_string_lossy();
            if !name.starts_with(PREFIX) {
                continue;
            }
            let Ok(value) = value.into_string() else {
                return Err(ConfigError::of_variable(&name, "the value is not UTF-8"));
            };
            // The value may be a private key in place of its file. An error about the file would quote it.
            if value.contains(['\n', '\r']) {
                return Err(ConfigError::of_variable(
                    &name,
                    "the value has a line break",
                ));
            }
            // A template may leave the value empty. An empty namespace, for example, would replace that of the file, and the
            // proxy would no longer find its records.
            if value.is_empty() {
                return Err(ConfigError::of_variable(
                    &name,
                    "the value is empty: set a value or remove the variable",
                ));
            }
            let name = name.into_owned();
            selected.push(Self { name, value });
        }
        selected.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(selected)
    }

    /// Returns the names of the tables around the setting, and that of the setting.
    fn path(&self, file: &DeTable<'_>) -> Result<Vec<String>, String> {
        let name = self.name.strip_prefix(PREFIX).unwrap_or_default();
        if name.bytes().any(|byte| byte.is_ascii_lowercase()) {
            return Err("expected a name in capital letters".to_owned());
        }
        let name = name.to_ascii_lowercase();
        let (table, setting) = name.split_once("__").unwrap_or((name.as_str(), ""));
        match (table, setting.rsplit_once("__")) {
            ("route", _) => Err("variables cannot set a route, set it in the file".to_owned()),
            ("upstream", Some((upstream, setting))) => {
                let upstream = upstream_name(file, upstream)?;
                Ok(vec![table.to_owned(), upstream, setting.to_owned()])
            }
            ("upstream", None) => Err(format!(
                "expected an upstream and a setting, as in {PREFIX}UPSTREAM__APP__URL"
            )),
            (_, None) if setting.is_empty() => Err(format!(
                "expected a table and a setting, as in {PREFIX}LISTEN__ADDRESS"
            )),
            (_, _) => Ok(name.split("__").map(str::to_owned).collect()),
        }
    }

    /// Returns the value in the type of the setting.
    fn value(&self, setting: &str) -> Result<DeValue<'_>, String> {
        let text = self.value.as_str();
        match setting {
            "max_connections" | "max_idle" | "max_in_flight" => {
                let value = DeValue::parse(text).ok().map(Spanned::into_inner);
                let number = value.filter(DeValue::is_integer);
                number.ok_or_else(|| "expected a whole number".to_owned())
            }
            "audit_table" | "http2" => match text {
                "true" => Ok(DeValue::Boolean(true)),
                "false" => Ok(DeValue::Boolean(false)),
                _ => Err("expected true or false".to_owned()),
            },
            _ => Ok(DeValue::String(Cow::Borrowed(text))),
        }
    }
}

impl<'a> Sources<'a> {
    /// Returns the name of the variable with this span, or `None` for a span of the file.
    pub(super) fn variable(&self, span: &Range<usize>) -> Option<&'a str> {
        let index = span.start.checked_sub(self.text.len() + 1)?;
        let variable = self.variables.get(index)?;
        Some(&variable.name)
    }

    /// Sets the values of the variables in the table of the file. A variable without a setting gets an error when the table is
    /// deserialized, as an unknown name of the file does.
    pub(super) fn replace_settings(&self, file: &mut DeTable<'a>) -> Result<(), ConfigError> {
        for (index, variable) in self.variables.iter().enumerate() {
            let at = self.text.len() + 1 + index;
            let replaced = self.replace(file, variable, at..at);
            replaced.map_err(|message| ConfigError::of_variable(&variable.name, message))?;
        }
        Ok(())
    }

    fn replace(
        &self,
        file: &mut DeTable<'a>,
        variable: &'a Variable,
        span: Range<usize>,
    ) -> Result<(), String> {
        let path = variable.path(file)?;
        let (setting, tables) = path.split_last().ok_or("expected a setting")?;
        let value = variable.value(setting)?;
        let key = |name: &str| -> Spanned<DeString<'a>> {
            Spanned::new(span.clone(), Cow::Owned(name.to_owned()))
        };
        let mut table = file;
        for name in tables {
            let new = || Spanned::new(span.clone(), DeValue::Table(DeTable::new()));
            let found = table.entry(key(name)).or_insert_with(new);
            let DeValue::Table(inner) = found.get_mut() else {
                return Err(format!("`{name}` is no table"));
            };
            table = inner;
        }
        // The file may have the alternative, and settings of two variables exclude each other.
        let alternative = match (tables, setting.as_str()) {
            ([table], "url") if table == "store" => Some("url_file"),
            ([table], "url_file") if table == "store" => Some("url"),
            _ => None,
        };
        if let Some(other) = alternative
            && let Some(found) = table.get(other)
            && self.variable(&found.span()).is_none()
        {
            table.remove(other);
        }
        table.insert(key(setting), Spanned::new(span.clone(), value));
        Ok(())
    }
}

/// Returns the upstream of the file with this name. A variable has capital letters, digits and underscores only. So the comparison
/// ignores the letter case, and treats other characters as underscores.
fn upstream_name(file: &DeTable<'_>, name: &str) -> Result<String, String> {
    let upstreams = file.get("upstream").map(Spanned::get_ref);
    let upstreams = upstreams.and_then(DeValue::as_table);
    let names: Vec<&str> = upstreams
        .into_iter()
        .flat_map(|upstreams| upstreams.keys())
        .map(|key| key.get_ref().as_ref())
        .collect();
    let found: Vec<&str> = names
        .iter()
        .copied()
        .filter(|upstream| in_variable(upstream) == name)
        .collect();
    match found[..] {
        [upstream] => Ok(upstream.to_owned()),
        [] => Err(format!(
            "unknown upstream `{name}`{}",
            suggestion(name, &names)
        )),
        _ => Err(format!(
            "the upstreams {} have this name, expected one",
            found.join(" and ")
        )),
    }
}

/// Returns the name of an upstream as a variable contains it, but with small letters.
fn in_variable(upstream: &str) -> String {
    let characters = upstream.chars().map(|character| {
        if character.is_ascii_alphanumeric() {
            character.to_ascii_lowercase()
        } else {
            '_'
        }
    });
    characters.collect()
}
