//! Canonical form of JSON documents, so that two spellings of one document get the same fingerprint.

use std::borrow::Cow;

use serde::de::IgnoredAny;
use smallvec::SmallVec;

use crate::request::json_fingerprint::{JsonFingerprint, Token};

/// Returns the canonical form of a JSON document.
///
/// Two documents have the same form exactly if they differ only in white space, in the order of members and in the escapes
/// of strings. Numbers keep their spelling, unless `by` compares their values. Members that `by` leaves out do not count.
///
/// Returns `None` if the bytes are not JSON, exceed a limit, name a member twice or contain half a surrogate pair. Names that
/// differ only in their letter case count as one: parsers of some languages ignore the case, and the last member wins there.
/// The caller then uses the bytes themselves.
///
/// The form is not JSON, and a client may send the same bytes as a body. A digest must therefore include which of the two
/// it contains.
pub(crate) fn canonical_form(bytes: &[u8], by: &JsonFingerprint) -> Option<Vec<u8>> {
    if bytes.len() > MAX_BYTES {
        return None;
    }
    let text = std::str::from_utf8(bytes).ok()?;
    serde_json::from_str::<IgnoredAny>(text).ok()?;

    let mut outline = Outline::default();
    outline.add(text, 0, MAX_DEPTH)?;
    let mut form = Vec::with_capacity(bytes.len() + bytes.len() / 4);
    let left_out = by.pointers().iter().map(|pointer| &**pointer).collect();
    let writer = Writer {
        text,
        outline: &outline,
        numbers_by_value: by.is_by_value(),
    };
    writer.write(JsonPosition::default(), &left_out, &mut form)?;
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
    end: JsonPosition,
}

struct Member<'a> {
    name: Cow<'a, str>,
    value: JsonPosition,
}

/// Position in the text, and the number of objects that begin before it.
#[derive(Clone, Copy, Default)]
struct JsonPosition {
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
        if has_duplicates(&self.open[first..]) {
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

    fn position(&self, at: usize) -> Option<JsonPosition> {
        Some(JsonPosition {
            at: u32::try_from(at).ok()?,
            objects: u32::try_from(self.objects.len()).ok()?,
        })
    }
}

/// Remaining tokens of the pointers whose first tokens lead to a value.
type Pointers<'a> = SmallVec<[&'a [Token]; 2]>;

/// Returns the remaining tokens of the pointers after a step, or `None` if a pointer ends there.
fn step<'a>(pointers: &Pointers<'a>, is_step: impl Fn(&Token) -> bool) -> Option<Pointers<'a>> {
    let mut rests = Pointers::new();
    for pointer in pointers {
        match pointer.split_first() {
            Some((token, [])) if is_step(token) => return None,
            Some((token, rest)) if is_step(token) => rests.push(rest),
            Some(_) | None => {}
        }
    }
    Some(rests)
}

/// Writes the form of a document whose outline is complete.
struct Writer<'a> {
    text: &'a str,
    outline: &'a Outline<'a>,
    numbers_by_value: bool,
}

impl Writer<'_> {
    /// Writes the value at `from`, without the values at `left_out`. Returns the position after the value.
    ///
    /// The first byte of a value is its type. Strings and numbers continue with their length. Lists and objects end with a
    /// byte that is not a type. So documents with the same form differ only in values that are left out. An item that is
    /// left out is written as one byte, so that the other items keep their positions.
    fn write(
        &self,
        from: JsonPosition,
        left_out: &Pointers<'_>,
        form: &mut Vec<u8>,
    ) -> Option<JsonPosition> {
        let text = self.text;
        let at = skip_whitespace(text, usize::try_from(from.at).ok()?);
        let end = match byte_at(text, at)? {
            b'{' => {
                let object = self
                    .outline
                    .objects
                    .get(usize::try_from(from.objects).ok()?)?;
                let (start, end) = object.members;
                let members = usize::try_from(start).ok()?..usize::try_from(end).ok()?;
                form.push(b'{');
                for member in self.outline.members.get(members)? {
                    let Some(inside) = step(left_out, |token| token.is_member(&member.name)) else {
                        continue;
                    };
                    write_bytes(b'"', member.name.as_bytes(), form);
                    self.write(member.value, &inside, form)?;
                }
                form.push(b'}');
                return Some(object.end);
            }
            b'[' => return self.write_list(at, from, left_out, form),
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
                let number = text.get(at..end)?;
                if self.numbers_by_value {
                    write_bytes(b'#', number::value(number)?.as_bytes(), form);
                } else {
                    write_bytes(b'#', number.as_bytes(), form);
                }
                end
            }
        };
        Some(JsonPosition {
            at: u32::try_from(end).ok()?,
            ..from
        })
    }

    fn write_list(
        &self,
        at: usize,
        from: JsonPosition,
        left_out: &Pointers<'_>,
        form: &mut Vec<u8>,
    ) -> Option<JsonPosition> {
        let text = self.text;
        form.push(b'[');
        let mut position = JsonPosition {
            at: u32::try_from(skip_whitespace(text, at + 1)).ok()?,
            ..from
        };
        let mut index = 0;
        while byte_at(text, usize::try_from(position.at).ok()?)? != b']' {
            let written = form.len();
            let inside = step(left_out, |token| token.is_item(index));
            position = self.write(position, inside.as_ref().unwrap_or(&Pointers::new()), form)?;
            if inside.is_none() {
                form.truncate(written);
                form.push(LEFT_OUT);
            }
            let next = skip_separator(text, usize::try_from(position.at).ok()?)?;
            position.at = u32::try_from(next).ok()?;
            index += 1;
        }
        form.push(b']');
        position.at += 1;
        Some(position)
    }
}

/// The form of an item that is left out.
const LEFT_OUT: u8 = b'-';

/// Returns `true` if two of the sorted members have the same name, or names that differ only in their letter case.
fn has_duplicates(members: &[Member<'_>]) -> bool {
    if members.windows(2).any(|pair| pair[0].name == pair[1].name) {
        return true;
    }
    let has_case = |byte: u8| byte.is_ascii_uppercase() || !byte.is_ascii();
    if !members
        .iter()
        .any(|member| member.name.bytes().any(has_case))
    {
        return false;
    }
    // Two steps: only upper case makes the long s equal to s, and only lower case makes the Kelvin sign equal to k.
    let fold = |member: &Member<'_>| member.name.to_uppercase().to_lowercase();
    let mut folded: Vec<String> = members.iter().map(fold).collect();
    folded.sort_unstable();
    folded.windows(2).any(|pair| pair[0] == pair[1])
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

mod number;

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod value_tests;
