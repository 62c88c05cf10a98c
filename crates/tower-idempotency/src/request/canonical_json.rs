//! Canonical form of JSON documents, so that two spellings of one document get the same fingerprint.

use std::borrow::Cow;

use serde::de::IgnoredAny;

/// Returns the canonical form of a JSON document.
///
/// Two documents have the same form exactly if they differ only in white space, in the order of members and in the escapes
/// of strings. Numbers keep their spelling: `1` is not `1.0`.
///
/// Returns `None` if the bytes are not JSON, exceed a limit, name a member twice or contain half a surrogate pair. The caller
/// then uses the bytes themselves.
///
/// The form is not JSON, and a client may send the same bytes as a body. A digest must therefore include which of the two
/// it contains.
pub(crate) fn canonical_form(bytes: &[u8]) -> Option<Vec<u8>> {
    if bytes.len() > MAX_BYTES {
        return None;
    }
    let text = std::str::from_utf8(bytes).ok()?;
    serde_json::from_str::<IgnoredAny>(text).ok()?;

    let mut outline = Outline::default();
    outline.add(text, 0, MAX_DEPTH)?;
    let mut form = Vec::with_capacity(bytes.len() + bytes.len() / 4);
    outline.write(text, Position::default(), &mut form)?;
    Some(form)
}

/// Positions of the members of every object, in the order of their names.
///
/// The outline is complete before anything is written. So an object inside 60 others is copied once, not 60 times.
#[derive(Default)]
struct Outline<'a> {
    /// Objects in the order in which they begin in the text.
    objects: Vec<Object>,
    /// Members of all objects, in the order in which the objects end in the text.
    members: Vec<Member<'a>>,
    /// Members of the objects that are not closed yet.
    open: Vec<Member<'a>>,
}

#[derive(Clone, Copy, Default)]
struct Object {
    members: (u32, u32),
    end: Position,
}

struct Member<'a> {
    name: Cow<'a, str>,
    value: Position,
}

/// Position in the text, and the number of objects that begin before it.
#[derive(Clone, Copy, Default)]
struct Position {
    at: u32,
    objects: u32,
}

impl<'a> Outline<'a> {
    /// Adds the objects of the value at `at`. Returns the position after the value.
    fn add(&mut self, text: &'a str, at: usize, depth: usize) -> Option<usize> {
        let at = skip_whitespace(text, at);
        match byte_at(text, at)? {
            b'{' => self.add_object(text, at, depth.checked_sub(1)?),
            b'[' => {
                let depth = depth.checked_sub(1)?;
                let mut at = skip_whitespace(text, at + 1);
                while byte_at(text, at)? != b']' {
                    at = skip_separator(text, self.add(text, at, depth)?)?;
                }
                Some(at + 1)
            }
            b'"' => string_end(text, at),
            _ => scalar_end(text, at),
        }
    }

    fn add_object(&mut self, text: &'a str, at: usize, depth: usize) -> Option<usize> {
        let index = self.objects.len();
        self.objects.push(Object::default());
        let first = self.open.len();

        let mut at = skip_whitespace(text, at + 1);
        while byte_at(text, at)? != b'}' {
            let colon = string_end(text, at)?;
            let name = unescape(&text[at..colon])?;
            // The value begins after the colon and any white space around it.
            let value = skip_whitespace(text, skip_whitespace(text, colon) + 1);
            self.open.push(Member {
                name,
                value: self.position(value)?,
            });
            at = skip_separator(text, self.add(text, value, depth)?)?;
        }

        self.open[first..].sort_unstable_by(|a, b| a.name.cmp(&b.name));
        if self.open[first..]
            .windows(2)
            .any(|pair| pair[0].name == pair[1].name)
        {
            return None;
        }
        let start = u32::try_from(self.members.len()).ok()?;
        self.members.extend(self.open.drain(first..));
        self.objects[index] = Object {
            members: (start, u32::try_from(self.members.len()).ok()?),
            end: self.position(at + 1)?,
        };
        Some(at + 1)
    }

    fn position(&self, at: usize) -> Option<Position> {
        Some(Position {
            at: u32::try_from(at).ok()?,
            objects: u32::try_from(self.objects.len()).ok()?,
        })
    }

    /// Writes the value at `from`. Returns the position after the value.
    ///
    /// The first byte of a value is its type. Strings and numbers continue with their length. Lists and objects end with a
    /// byte that is not a type. So no two documents have the same form.
    fn write(&self, text: &str, from: Position, form: &mut Vec<u8>) -> Option<Position> {
        let at = skip_whitespace(text, usize::try_from(from.at).ok()?);
        let end = match byte_at(text, at)? {
            b'{' => {
                let object = self.objects.get(usize::try_from(from.objects).ok()?)?;
                let (start, end) = object.members;
                let members = usize::try_from(start).ok()?..usize::try_from(end).ok()?;
                form.push(b'{');
                for member in self.members.get(members)? {
                    write_bytes(b'"', member.name.as_bytes(), form);
                    self.write(text, member.value, form)?;
                }
                form.push(b'}');
                return Some(object.end);
            }
            b'[' => {
                form.push(b'[');
                let mut position = Position {
                    at: u32::try_from(skip_whitespace(text, at + 1)).ok()?,
                    ..from
                };
                while byte_at(text, usize::try_from(position.at).ok()?)? != b']' {
                    position = self.write(text, position, form)?;
                    let next = skip_separator(text, usize::try_from(position.at).ok()?)?;
                    position.at = u32::try_from(next).ok()?;
                }
                form.push(b']');
                position.at += 1;
                return Some(position);
            }
            b'"' => {
                let end = string_end(text, at)?;
                write_bytes(b'"', unescape(&text[at..end])?.as_bytes(), form);
                end
            }
            literal @ (b't' | b'f' | b'n') => {
                form.push(literal);
                scalar_end(text, at)?
            }
            _ => {
                let end = scalar_end(text, at)?;
                write_bytes(b'#', text.as_bytes().get(at..end)?, form);
                end
            }
        };
        Some(Position {
            at: u32::try_from(end).ok()?,
            ..from
        })
    }
}

fn write_bytes(tag: u8, bytes: &[u8], form: &mut Vec<u8>) {
    form.push(tag);
    let mut length = bytes.len();
    // Seven bits per byte, the lowest first. The top bit of the last byte is clear.
    while length >= 0x80 {
        form.push((length & 0x7f) as u8 | 0x80);
        length >>= 7;
    }
    form.push(length as u8);
    form.extend_from_slice(bytes);
}

/// Returns the content of a string without quotes and escapes.
fn unescape(quoted: &str) -> Option<Cow<'_, str>> {
    if quoted.contains('\\') {
        return serde_json::from_str(quoted).map(Cow::Owned).ok();
    }
    quoted.get(1..quoted.len() - 1).map(Cow::Borrowed)
}

fn byte_at(text: &str, at: usize) -> Option<u8> {
    text.as_bytes().get(at).copied()
}

/// Returns the next position that is not white space.
fn skip_whitespace(text: &str, mut at: usize) -> usize {
    while let Some(b' ' | b'\t' | b'\n' | b'\r') = byte_at(text, at) {
        at += 1;
    }
    at
}

/// Returns the position of the next element or the closing bracket, after an element that ends at `at`.
fn skip_separator(text: &str, at: usize) -> Option<usize> {
    let at = skip_whitespace(text, at);
    match byte_at(text, at)? {
        b',' => Some(skip_whitespace(text, at + 1)),
        _ => Some(at),
    }
}

/// Returns the position after the string that begins at `at`.
fn string_end(text: &str, at: usize) -> Option<usize> {
    let mut at = at + 1;
    loop {
        match byte_at(text, at)? {
            b'"' => return Some(at + 1),
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
}

/// Returns the position after the number or literal at `at`.
fn scalar_end(text: &str, at: usize) -> Option<usize> {
    let rest = text.as_bytes().get(at..)?;
    let is_scalar =
        |byte: &u8| matches!(byte, b'0'..=b'9' | b'a'..=b'z' | b'E' | b'+' | b'-' | b'.');
    let length = rest.iter().take_while(|byte| is_scalar(byte)).count();
    (length > 0).then_some(at + length)
}

/// Size of the largest document. Sorting its members may take about twelve times as much memory.
const MAX_BYTES: usize = 1024 * 1024;

/// Deepest nesting of arrays and objects. Each level takes space on the stack.
const MAX_DEPTH: usize = 64;

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;
