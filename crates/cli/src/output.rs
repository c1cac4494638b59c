//! Standard output: results only, and only what a terminal may safely show.
//!
//! Names in a volume are chosen by its publisher and not trusted. On a terminal every character
//! that could move the cursor, change colours or turn the reading direction is shown
//! escaped; into a pipe or file the bytes go as they are. A reader that goes away
//! (`atoll cat … | head`) ends the command silently.

use std::fmt::Write as _;
use std::io::{self, BufWriter, IsTerminal, StdoutLock, Write};

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use crate::failure::Failure;

/// A part of a line.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Part<'a> {
    /// The program's own words.
    Words(&'a str),
    /// A name that another person chose.
    Name(&'a [u8]),
}

/// Standard output.
pub(crate) struct Output {
    to: BufWriter<StdoutLock<'static>>,
    terminal: bool,
}

impl Output {
    /// Takes standard output for this command.
    pub(crate) fn new() -> Output {
        let stdout = io::stdout().lock();
        let terminal = stdout.is_terminal();
        Output { to: BufWriter::with_capacity(1 << 16, stdout), terminal }
    }

    /// Writes a line of our own words.
    pub(crate) fn line(&mut self, line: impl AsRef<str>) -> Result<(), Failure> {
        let line = line.as_ref();
        check(self.to.write_all(line.as_bytes()).and_then(|()| self.to.write_all(b"\n")))
    }

    /// Writes a line of several parts.
    pub(crate) fn parts(&mut self, parts: &[Part<'_>]) -> Result<(), Failure> {
        for part in parts {
            match part {
                Part::Words(words) => self.bytes(words.as_bytes())?,
                Part::Name(name) if self.terminal => self.bytes(escaped(name).as_bytes())?,
                Part::Name(name) => self.bytes(name)?,
            }
        }
        self.bytes(b"\n")
    }

    /// Writes bytes as they are.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        check(self.to.write_all(bytes))
    }

    /// Writes one JSON value on a line of its own.
    pub(crate) fn json(&mut self, value: &impl Serialize) -> Result<(), Failure> {
        let text = serde_json::to_string(value).expect("our types have string keys");
        self.line(text)
    }

    /// Flushes what was written.
    pub(crate) fn flush(&mut self) -> Result<(), Failure> {
        check(self.to.flush())
    }
}

/// Shows a command's result: as one JSON value, or as lines for people.
pub(crate) fn show(
    json: bool,
    result: &impl Serialize,
    lines: impl IntoIterator<Item = String>,
) -> Result<(), Failure> {
    let mut output = Output::new();
    if json {
        output.json(result)?;
    } else {
        lines.into_iter().try_for_each(|line| output.line(line))?;
    }
    output.flush()
}

fn check(result: io::Result<()>) -> Result<(), Failure> {
    match result {
        Ok(()) => Ok(()),
        // The reader has had enough, and there is no other to tell.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => std::process::exit(0),
        Err(error) => Err(Failure::io("cannot write to standard output", &error)),
    }
}

/// A name with everything escaped that a terminal would act on.
pub(crate) fn escaped(name: &[u8]) -> String {
    let mut out = String::with_capacity(name.len());
    for chunk in name.utf8_chunks() {
        for c in chunk.valid().chars() {
            match c {
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\t' => out.push_str("\\t"),
                c => push_safe(&mut out, c),
            }
        }
        for byte in chunk.invalid() {
            push_hex(&mut out, *byte);
        }
    }
    out
}

/// A message of ours, which may quote names: its lines stay lines.
pub(crate) fn safe_message(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c == '\n' { out.push(c) } else { push_safe(&mut out, c) }
    }
    out
}

fn push_safe(out: &mut String, c: char) {
    if c.is_control() && (c as u32) < 0x80 {
        push_hex(out, c as u8);
    } else if c.is_control() || turns_direction(c) {
        write!(out, "\\u{{{:x}}}", c as u32).expect("a String takes everything");
    } else {
        out.push(c);
    }
}

fn push_hex(out: &mut String, byte: u8) {
    write!(out, "\\x{byte:02x}").expect("a String takes everything");
}

/// Characters that reorder or hide the ones around them.
fn turns_direction(c: char) -> bool {
    matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}')
}

/// Bytes in hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut out, byte| {
        write!(out, "{byte:02x}").expect("a String takes everything");
        out
    })
}

/// Bytes in JSON: text, and the bytes in hexadecimal where text cannot hold them.
pub(crate) fn json_text(bytes: &[u8]) -> (String, Option<String>) {
    let bytes_hex = std::str::from_utf8(bytes).is_err().then(|| hex(bytes));
    (String::from_utf8_lossy(bytes).into_owned(), bytes_hex)
}

/// A list of names as a field of a JSON object, which flattens it: texts, and if one of them cannot hold its bytes, the
/// bytes of all in hexadecimal in a second field, `FIELD_hex`.
pub(crate) fn json_list<'a, S: Serializer>(
    field: &str,
    names: impl Iterator<Item = &'a [u8]> + Clone,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let mut map = serializer.serialize_map(None)?;
    let texts: Vec<_> = names.clone().map(String::from_utf8_lossy).collect();
    map.serialize_entry(field, &texts)?;
    if names.clone().any(|name| std::str::from_utf8(name).is_err()) {
        map.serialize_entry(&format!("{field}_hex"), &names.map(hex).collect::<Vec<_>>())?;
    }
    map.end()
}

/// A name in JSON: text, and the exact bytes in hexadecimal where text cannot hold them.
#[derive(Serialize)]
pub(crate) struct JsonName {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    name_hex: Option<String>,
}

impl JsonName {
    /// Of these bytes.
    pub(crate) fn of(name: &[u8]) -> JsonName {
        let (name, name_hex) = json_text(name);
        JsonName { name, name_hex }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hostile_name_cannot_steer_a_terminal() {
        let cases: [(&[u8], &str); 8] = [
            (b"plain name.txt", "plain name.txt"),
            ("\u{e9}t\u{e9}".as_bytes(), "\u{e9}t\u{e9}"),
            (b"\x1b[2J\x1b]0;owned\x07", "\\x1b[2J\\x1b]0;owned\\x07"),
            (b"two\nlines\r", "two\\nlines\\x0d"),
            (b"not\xffutf8", "not\\xffutf8"),
            ("c1\u{9b}31m".as_bytes(), "c1\\u{9b}31m"),
            ("txt.\u{202e}exe".as_bytes(), "txt.\\u{202e}exe"),
            (b"back\\slash\x7f", "back\\\\slash\\x7f"),
        ];
        for (name, shown) in cases {
            assert_eq!(escaped(name), shown);
        }
    }

    #[test]
    fn a_message_keeps_its_lines_and_nothing_else() {
        assert_eq!(safe_message("a \\ b:\x1b[2J\nnext"), "a \\ b:\\x1b[2J\nnext");
    }

    #[test]
    fn json_keeps_the_bytes_of_lists_of_names() {
        #[derive(Serialize)]
        struct Shown(#[serde(serialize_with = "list")] Vec<&'static [u8]>);
        fn list<S: Serializer>(names: &[&[u8]], serializer: S) -> Result<S::Ok, S::Error> {
            json_list("names", names.iter().copied(), serializer)
        }
        let text = |names| serde_json::to_string(&Shown(names)).expect("serialises");
        assert_eq!(text(vec![]), r#"{"names":[]}"#);
        assert_eq!(text(vec![b"a", b"b"]), r#"{"names":["a","b"]}"#);
        let both = "{\"names\":[\"a\u{fffd}\",\"b\"],\"names_hex\":[\"61ff\",\"62\"]}";
        assert_eq!(text(vec![b"a\xff", b"b"]), both);
    }

    #[test]
    fn json_keeps_the_bytes_of_names_that_are_not_text() {
        let text = serde_json::to_string(&JsonName::of(b"a\xff")).expect("serialises");
        assert_eq!(text, "{\"name\":\"a\u{fffd}\",\"name_hex\":\"61ff\"}");
        let text = serde_json::to_string(&JsonName::of(b"a\"b")).expect("serialises");
        assert_eq!(text, r#"{"name":"a\"b"}"#);
    }
}
