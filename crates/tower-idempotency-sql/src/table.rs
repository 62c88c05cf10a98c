use std::fmt;

/// Validated name of the store's table, optionally with a schema.
///
/// Each part is 1 to 48 of `a` to `z`, `0` to `9` and `_`, and does not begin with a digit. Statements quote the name,
/// so it may be a reserved word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    schema: Option<String>,
    name: String,
}

impl Table {
    /// Parses a name, such as `payments.idempotency`.
    ///
    /// # Errors
    ///
    /// If a part of the name is not 1 to 48 of `a` to `z`, `0` to `9` and `_`, or begins with a digit.
    pub fn parse(text: &str) -> Result<Self, TableNameError> {
        let (schema, name) = match text.split_once('.') {
            Some((schema, name)) => (Some(schema), name),
            None => (None, text),
        };
        if schema.is_some_and(|schema| !is_identifier(schema)) || !is_identifier(name) {
            return Err(TableNameError::new(text));
        }
        Ok(Self {
            schema: schema.map(str::to_owned),
            name: name.to_owned(),
        })
    }

    /// Parses a name without a schema, for a database that has none.
    ///
    /// # Errors
    ///
    /// Those of [`parse`](Self::parse), and if there is a schema.
    pub fn parse_name(text: &str) -> Result<Self, TableNameError> {
        let table = Self::parse(text)?;
        match table.schema {
            None => Ok(table),
            Some(_) => Err(TableNameError::new(text)),
        }
    }

    /// Returns the name as it appears in statements.
    #[must_use]
    pub fn quoted(&self, quote: char) -> String {
        match &self.schema {
            Some(schema) => format!("{quote}{schema}{quote}.{quote}{}{quote}", self.name),
            None => format!("{quote}{}{quote}", self.name),
        }
    }

    /// Returns the name without its schema.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the name of the audit table.
    #[must_use]
    pub fn audit(&self) -> Self {
        Self {
            schema: self.schema.clone(),
            name: format!("{}_audit", self.name),
        }
    }

    /// Returns the SQL of a shipped migration, or of a constant statement, with this table in place of the default one.
    #[must_use]
    pub fn in_migration(&self, sql: &str, quote: char) -> String {
        let table = format!("{quote}{DEFAULT}{quote}");
        let index = format!("{quote}{DEFAULT}_");
        let sql = sql
            // NUL, which no name contains, is a placeholder. Without it, a new name that begins with the default one
            // would be mistaken for an index.
            .replace(&index, "\0")
            .replace(&table, &self.quoted(quote))
            .replace('\0', &format!("{quote}{}_", self.name))
            .replace(&format!("'{DEFAULT}'"), &format!("'{}'", self.name));
        match &self.schema {
            Some(schema) => sql.replace("database()", &format!("'{schema}'")),
            None => sql,
        }
    }
}

impl Default for Table {
    fn default() -> Self {
        Self {
            schema: None,
            name: DEFAULT.to_owned(),
        }
    }
}

fn is_identifier(text: &str) -> bool {
    (1..=MAX_LENGTH).contains(&text.len())
        && !text.starts_with(|c: char| c.is_ascii_digit())
        && text
            .bytes()
            .all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_'))
}

/// Invalid name of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableNameError {
    name: String,
}

impl TableNameError {
    fn new(text: &str) -> Self {
        Self {
            name: text.chars().take(MAX_SHOWN).collect(),
        }
    }
}

impl fmt::Display for TableNameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "expected a table name, or a schema and a table name separated by a dot (not in SQLite), each 1 to {MAX_LENGTH} \
             of a-z, 0-9 and _ without a leading digit, found {:?}",
            self.name
        )
    }
}

impl std::error::Error for TableNameError {}

const DEFAULT: &str = "tower_idempotency";
/// The lowest limit of the databases is 63 bytes. The names of indexes are longer than the name of their table.
const MAX_LENGTH: usize = 48;
const MAX_SHOWN: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_name_may_have_schema() {
        for (name, quoted) in [
            ("tower_idempotency", "\"tower_idempotency\""),
            ("_1", "\"_1\""),
            ("select", "\"select\""),
            ("payments.keys", "\"payments\".\"keys\""),
        ] {
            assert_eq!(Table::parse(name).unwrap().quoted('"'), quoted);
        }
        assert!(Table::parse(&"a".repeat(48)).is_ok());
    }

    #[test]
    fn hostile_table_names_are_rejected() {
        for name in [
            "",
            ".",
            "a.",
            ".a",
            "a.b.c",
            "1a",
            "Keys",
            "a b",
            "a;drop table users",
            "a\"; drop table users; --",
            "a`",
            "a'",
            "a\0",
            "a\n",
            "a--",
            "a/*",
            "schlüssel",
            "ａ",
            &"a".repeat(49),
            &"a".repeat(100_000),
        ] {
            let error = Table::parse(name).unwrap_err();
            assert!(error.to_string().len() < 600, "{error}");
        }
    }

    #[test]
    fn migration_applies_to_given_table() {
        let sql = "create table \"tower_idempotency\" (); create index \"tower_idempotency_x\" on \"tower_idempotency\";";
        assert_eq!(Table::default().in_migration(sql, '"'), sql);
        assert_eq!(
            Table::parse("a.b").unwrap().in_migration(sql, '"'),
            "create table \"a\".\"b\" (); create index \"b_x\" on \"a\".\"b\";"
        );
        for (name, expected) in [
            (
                "tower_idempotency_a",
                "create table \"tower_idempotency_a\" (); \
                 create index \"tower_idempotency_a_x\" on \"tower_idempotency_a\";",
            ),
            (
                "tower_idempotency_eu.keys",
                "create table \"tower_idempotency_eu\".\"keys\" (); \
                 create index \"keys_x\" on \"tower_idempotency_eu\".\"keys\";",
            ),
        ] {
            assert_eq!(Table::parse(name).unwrap().in_migration(sql, '"'), expected);
        }
        let sql = "where table_schema = database() and table_name = 'tower_idempotency'";
        assert_eq!(Table::default().in_migration(sql, '`'), sql);
        assert_eq!(
            Table::parse("a.b").unwrap().in_migration(sql, '`'),
            "where table_schema = 'a' and table_name = 'b'"
        );
    }
}
