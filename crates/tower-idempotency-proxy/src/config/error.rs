//! The error of a configuration, with its line or its variable, and the nearest known name.

use std::{fmt, ops::Range};

use super::variables::Sources;

/// The reason why a configuration is rejected, as one sentence for an operator.
///
/// It quotes names of settings and routes, and no secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    place: Option<Place>,
    message: String,
}

/// The place of a wrong value.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    /// A line of the file, counted from 1.
    Line(usize),
    /// The name of an environment variable.
    Variable(String),
}

impl ConfigError {
    pub(crate) fn without_line(message: impl Into<String>) -> Self {
        let message = message.into();
        Self {
            place: None,
            message,
        }
    }

    /// Creates the error of an environment variable.
    pub(super) fn of_variable(name: &str, message: impl Into<String>) -> Self {
        let message = message.into();
        Self {
            place: Some(Place::Variable(name.to_owned())),
            message,
        }
    }

    /// Creates the error of the value with this span. An empty span at the start means that the value is neither from the
    /// file nor from a variable.
    pub(super) fn at(
        sources: &Sources<'_>,
        span: &Range<usize>,
        message: impl Into<String>,
    ) -> Self {
        let place = (*span != (0..0)).then(|| Place::new(sources, span));
        let message = message.into();
        Self { place, message }
    }

    pub(super) fn of_toml(sources: &Sources<'_>, error: &toml::de::Error) -> Self {
        let place = error.span().map(|span| Place::new(sources, &span));
        let message = in_words(error.message());
        Self { place, message }
    }

    /// Returns the line of the file, counted from 1, if the error has one.
    #[must_use]
    pub fn line(&self) -> Option<usize> {
        match self.place {
            Some(Place::Line(line)) => Some(line),
            Some(Place::Variable(_)) | None => None,
        }
    }
}

impl Place {
    fn new(sources: &Sources<'_>, span: &Range<usize>) -> Self {
        match sources.variable(span) {
            Some(name) => Self::Variable(name.to_owned()),
            None => Self::Line(line_of(sources.text, span.start)),
        }
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            Some(Place::Line(line)) => write!(f, "line {line}: ")?,
            Some(Place::Variable(name)) => write!(f, "{name}: ")?,
            None => {}
        }
        f.write_str(&self.message)
    }
}

impl std::error::Error for ConfigError {}

fn line_of(text: &str, at: usize) -> usize {
    let before = &text.as_bytes()[..at.min(text.len())];
    before.iter().filter(|byte| **byte == b'\n').count() + 1
}

/// Rewrites a message of the parser. The parser lists all names, and the result contains the nearest one.
fn in_words(message: &str) -> String {
    let message = message.lines().next().unwrap_or_default();
    for (prefix, what) in [
        ("unknown field `", "setting"),
        ("unknown variant `", "value"),
    ] {
        let Some((found, rest)) = message
            .strip_prefix(prefix)
            .and_then(|rest| rest.split_once('`'))
        else {
            continue;
        };
        // The names are every other part between backticks.
        let names: Vec<_> = rest.split('`').skip(1).step_by(2).collect();
        return format!("unknown {what} `{found}`{}", suggestion(found, &names));
    }
    // The value may be a URL with a password.
    for prefix in ["invalid type: string \"", "invalid value: string \""] {
        if let Some(rest) = message.strip_prefix(prefix) {
            let expected = rest
                .rsplit_once("\", expected ")
                .map(|(_, expected)| expected);
            return match expected {
                Some(expected) if !expected.starts_with("struct ") => {
                    format!("expected {expected}, found a text")
                }
                _ => "expected a table, found a text".to_owned(),
            };
        }
    }
    if let Some(name) = message.strip_prefix("missing field ") {
        return format!("missing setting {name}");
    }
    message.to_owned()
}

/// Returns the second half of a message about an unknown name: the nearest known name, or all of them.
pub(super) fn suggestion(found: &str, names: &[&str]) -> String {
    let nearest = names
        .iter()
        .map(|name| (strsim::damerau_levenshtein(found, name), *name))
        .min();
    match nearest {
        Some((distance, name)) if distance <= 1 + found.len() / 4 => {
            format!(", did you mean `{name}`?")
        }
        Some(_) => format!(", expected {}", names.join(", ")),
        None => String::new(),
    }
}
