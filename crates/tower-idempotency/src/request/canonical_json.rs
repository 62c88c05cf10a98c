//! The canonical form of a JSON document, so that a client which writes the same document another way is understood.

use std::borrow::Cow;

use serde::de::IgnoredAny;

/// The canonical form of a JSON document, or `None` when there is none and the bytes as they came are what counts: it is
/// not JSON, over the limits, names a member twice, or holds half a surrogate pair.
///
/// Two documents have the same form exactly when they differ only in white space, in the order of members and in how
/// strings are escaped. Numbers are what they are spelled: `1` is not `1.0`.
///
/// The form is no JSON, and any bytes may be somebody's body: whoever hashes one says which of both it is.
pub(crate) fn canonical(bytes: &[u8]) -> Option<Vec<u8>> {
    if bytes.len() > MAX_BYTES {
        return None;
    }
    let text = std::str::from_utf8(bytes).ok()?;
    serde_json::from_str::<IgnoredAny>(text).ok()?;

    let mut outline = Outline::default();
    outline.add(text, 0, MAX_DEPTH)?;
    let mut form = Vec::with_capacity(bytes.len() + bytes.len() / 4);
    outline.write(text, Place::default(), &mut form)?;
    Some(form)
}

/// Where the members of every object are, in the order of their names.
///
/// It is drawn before anything is written, so that an object inside 60 others is copied once and not 60 times.
#[derive(Default)]
struct Outline<'a> {
    /// As they begin in the text.
    objects: Vec<Object>,
    /// Of one object after the other, as they end in the text.
    members: Vec<Member<'a>>,
    /// Of the objects that have begun and not ended.
    open: Vec<Member<'a>>,
}

#[derive(Clone, Copy, Default)]
struct Object {
    members: (u32, u32),
    end: Place,
}

struct Member<'a> {
    name: Cow<'a, str>,
    value: Place,
}

/// A place in the text, and how many objects began before it.
#[derive(Clone, Copy, Default)]
struct Place {
    at: u32,
    objects: u32,
}

impl<'a> Outline<'a> {
    /// Adds the objects of the value at `at`, and says where it ends.
    fn add(&mut self, text: &'a str, at: usize, depth: usize) -> Option<usize> {
        let at = token(text, at);
        match byte(text, at)? {
            b'{' => self.add_object(text, at, depth.checked_sub(1)?),
            b'[' => {
                let depth = depth.checked_sub(1)?;
                let mut at = token(text, at + 1);
                while byte(text, at)? != b']' {
                    at = separated(text, self.add(text, at, depth)?)?;
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

        let mut at = token(text, at + 1);
        while byte(text, at)? != b'}' {
            let colon = string_end(text, at)?;
            let name = string(&text[at..colon])?;
            // Past the colon, wherever it is.
            let value = token(text, token(text, colon) + 1);
            self.open.push(Member {
                name,
                value: self.place(value)?,
            });
            at = separated(text, self.add(text, value, depth)?)?;
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
            end: self.place(at + 1)?,
        };
        Some(at + 1)
    }

    fn place(&self, at: usize) -> Option<Place> {
        Some(Place {
            at: u32::try_from(at).ok()?,
            objects: u32::try_from(self.objects.len()).ok()?,
        })
    }

    /// Writes the value at `from`, and says where it ends.
    ///
    /// Every value begins with a byte that says what it is; strings and numbers go on with their length, lists and
    /// objects end with a byte that no value begins with. So a form can be read in one way only.
    fn write(&self, text: &str, from: Place, form: &mut Vec<u8>) -> Option<Place> {
        let at = token(text, usize::try_from(from.at).ok()?);
        let end = match byte(text, at)? {
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
                let mut place = Place {
                    at: u32::try_from(token(text, at + 1)).ok()?,
                    ..from
                };
                while byte(text, usize::try_from(place.at).ok()?)? != b']' {
                    place = self.write(text, place, form)?;
                    let next = separated(text, usize::try_from(place.at).ok()?)?;
                    place.at = u32::try_from(next).ok()?;
                }
                form.push(b']');
                place.at += 1;
                return Some(place);
            }
            b'"' => {
                let end = string_end(text, at)?;
                write_bytes(b'"', string(&text[at..end])?.as_bytes(), form);
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
        Some(Place {
            at: u32::try_from(end).ok()?,
            ..from
        })
    }
}

fn write_bytes(tag: u8, bytes: &[u8], form: &mut Vec<u8>) {
    form.push(tag);
    let mut length = bytes.len();
    // Seven bits at a time, the lowest first; the last has its top bit clear.
    while length >= 0x80 {
        form.push((length & 0x7f) as u8 | 0x80);
        length >>= 7;
    }
    form.push(length as u8);
    form.extend_from_slice(bytes);
}

/// What a string says, quotes and escapes taken off.
fn string(quoted: &str) -> Option<Cow<'_, str>> {
    if quoted.contains('\\') {
        return serde_json::from_str(quoted).map(Cow::Owned).ok();
    }
    quoted.get(1..quoted.len() - 1).map(Cow::Borrowed)
}

fn byte(text: &str, at: usize) -> Option<u8> {
    text.as_bytes().get(at).copied()
}

/// The next place that is not white space.
fn token(text: &str, mut at: usize) -> usize {
    while let Some(b' ' | b'\t' | b'\n' | b'\r') = byte(text, at) {
        at += 1;
    }
    at
}

/// The next element or the closing bracket, after an element that ended at `at`.
fn separated(text: &str, at: usize) -> Option<usize> {
    let at = token(text, at);
    match byte(text, at)? {
        b',' => Some(token(text, at + 1)),
        _ => Some(at),
    }
}

/// Past the closing quote of the string that opens at `at`.
fn string_end(text: &str, at: usize) -> Option<usize> {
    let mut at = at + 1;
    loop {
        match byte(text, at)? {
            b'"' => return Some(at + 1),
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
}

/// Past a number or a literal.
fn scalar_end(text: &str, at: usize) -> Option<usize> {
    let rest = text.as_bytes().get(at..)?;
    let within = |byte: &u8| matches!(byte, b'0'..=b'9' | b'a'..=b'z' | b'E' | b'+' | b'-' | b'.');
    let length = rest.iter().take_while(|byte| within(byte)).count();
    (length > 0).then_some(at + length)
}

/// The longest document. Some twelve times as much may be held while it is put in order.
const MAX_BYTES: usize = 1024 * 1024;

/// How many arrays and objects may lie inside one another: each takes some of the stack.
const MAX_DEPTH: usize = 64;

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;
