//! What the command line shows. Results go to stdout through [`print()`], everything said *about* them
//! to stderr through [`note`]; so `a2mcp … > file` always gets the result alone. Never used by a
//! sidecar, whose stdout is the frame protocol.

use std::borrow::Cow;
use std::io::{self, IsTerminal, Write};

use crate::app::lossy;
use crate::text;

/// Writes `text` and a line feed (unless it ends in one) to stdout. A reader that went away (`| head`)
/// is no error; a full disk is.
pub fn print(text: &str) -> io::Result<()> {
    let end: &[u8] = if text.is_empty() || text.ends_with('\n') { b"" } else { b"\n" };
    let mut stdout = io::stdout().lock();
    let result =
        stdout.write_all(text.as_bytes()).and_then(|()| stdout.write_all(end)).and_then(|()| stdout.flush());
    match result {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}

/// Like [`print()`], for text that somebody else wrote: harmless on a terminal, verbatim in a pipe.
pub fn print_foreign(text: &str) -> io::Result<()> {
    print_clean(text, text::clean_block)
}

/// Like [`print_foreign`], for JSON: it stays JSON.
pub fn print_foreign_json(json: &str) -> io::Result<()> {
    print_clean(json, text::clean_json)
}

/// Stdout for a module below this one that prints when the time has come.
pub struct Stdout;

impl Write for Stdout {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        io::stdout().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stdout().flush()
    }
}

/// Says something to the person on stderr, as one line. Nothing can be done when that fails.
pub fn note(message: &str) {
    lossy::line(format!("a2mcp: {}\n", text::clean(message, 2000)));
}

/// Like [`note`], for a text of our own with several lines.
pub fn explain(message: &str) {
    lossy::line(format!("{}\n", text::clean_block(message)));
}

/// Shows a line on a terminal's stderr that the next one replaces; an empty one clears it.
pub fn line(text: &str) {
    let mut stderr = io::stderr().lock();
    let _ = write!(stderr, "\r\x1b[K{}", text::clean(text, 70)).and_then(|()| stderr.flush());
}

/// How far something is, on stderr: a line that changes on a terminal, a line for each change elsewhere.
#[derive(Default)]
pub struct Progress {
    shown: String,
}

impl Progress {
    /// The present state.
    pub fn show(&mut self, state: &str) {
        if state == self.shown {
            return;
        }
        if io::stderr().is_terminal() {
            line(state)
        } else {
            note(state)
        }
        self.shown = state.to_owned();
    }
}

impl Drop for Progress {
    /// The line makes way for what comes next.
    fn drop(&mut self) {
        if !self.shown.is_empty() && io::stderr().is_terminal() {
            line("");
        }
    }
}

fn print_clean(text: &str, clean: fn(&str) -> Cow<'_, str>) -> io::Result<()> {
    if io::stdout().is_terminal() { print(&clean(text)) } else { print(text) }
}
