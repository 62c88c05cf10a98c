use std::fmt;

/// The table that leases and records live in, checked once: an identifier, with or without a schema in front.
///
/// Each part is 1 to 48 of `a` to `z`, `0` to `9` and `_`, and does not begin with a digit. Statements quote it, so that
/// it may be a reserved word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Table {
    schema: Option<String>,
    name: String,
}

impl Table {
    pub(crate) fn parse(text: &str) -> Result<Self, TableNameError> {
        let (schema, name) = match text.split_once('.') {
            Some((schema, name)) => (Some(schema), name),
            None => (None, text),
        };
        if schema.is_some_and(|schema| !is_identifier(schema)) || !is_identifier(name) {
            return Err(TableNameError::of(text));
        }
        Ok(Self {
            schema: schema.map(str::to_owned),
            name: name.to_owned(),
        })
    }

    /// As [`parse`](Self::parse), where there is no schema to choose.
    #[cfg(feature = "sqlite")]
    pub(crate) fn parse_name(text: &str) -> Result<Self, TableNameError> {
        let table = Self::parse(text)?;
        match table.schema {
            None => Ok(table),
            Some(_) => Err(TableNameError::of(text)),
        }
    }

    /// As it stands in a statement.
    pub(crate) fn quoted(&self, quote: char) -> String {
        match &self.schema {
            Some(schema) => format!("{quote}{schema}{quote}.{quote}{}{quote}", self.name),
            None => format!("{quote}{}{quote}", self.name),
        }
    }

    /// The name without its schema.
    #[cfg(feature = "postgres")]
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// A migration as it is shipped, for this table instead of the one it names.
    pub(crate) fn in_migration(&self, sql: &str, quote: char) -> String {
        let table = format!("{quote}{DEFAULT}{quote}");
        let index = format!("{quote}{DEFAULT}_");
        let sql = sql
            // By way of what is in no name: the new one may begin as the default one does, and be taken for an index.
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
    (1..=LONGEST).contains(&text.len())
        && !text.starts_with(|c: char| c.is_ascii_digit())
        && text
            .bytes()
            .all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_'))
}

/// The name of the table is not one that can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableNameError {
    found: String,
}

impl TableNameError {
    fn of(text: &str) -> Self {
        Self {
            found: text.chars().take(SHOWN).collect(),
        }
    }
}

impl fmt::Display for TableNameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "expected the name of a table, or, but for SQLite, of a schema and a table with a dot between, each of 1 to \
             {LONGEST} of a-z, 0-9 and _ and without a digit in front, found {:?}",
            self.found
        )
    }
}

impl std::error::Error for TableNameError {}

const DEFAULT: &str = "tower_idempotency";
/// The shortest limit is 63 bytes, and names of indexes are longer than that of their table.
const LONGEST: usize = 48;
const SHOWN: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_tables_are_identifiers_with_or_without_a_schema() {
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
    fn hostile_names_of_tables_are_refused() {
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
            let refused = Table::parse(name).unwrap_err();
            assert!(refused.to_string().len() < 600, "{refused}");
        }
    }

    #[test]
    fn a_migration_is_for_the_table_it_is_given() {
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
