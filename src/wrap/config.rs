//! What is to be wrapped: a command from the command line, or a server of the `mcpServers` JSON that
//! MCP clients share (`command`, `args`, `env`, `cwd`). Pure but for reading the file.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io::Read as _;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use crate::text::clean;

/// The largest file that is read.
const MAX_FILE: u64 = 4 << 20;

/// How to start a server. What it shows of itself holds no argument and no environment: both may be
/// secret.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Spec {
    /// The program and its arguments; never empty.
    pub command: Vec<OsString>,
    /// Further environment.
    pub env: Vec<(String, String)>,
    /// Its working directory; ours when absent.
    pub cwd: Option<PathBuf>,
}

impl std::fmt::Debug for Spec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Spec").field("program", &self.program()).finish_non_exhaustive()
    }
}

/// Why there is nothing to start; for people.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// The arguments make no sense together.
    #[error("{0}")]
    Usage(String),
    /// The file cannot be used.
    #[error("{file}: {what}")]
    File {
        /// Which one.
        file: String,
        /// What is wrong with it.
        what: String,
    },
}

impl Spec {
    /// From the command line: either a command, or a file and the name of a server in it.
    ///
    /// # Errors
    /// [`SpecError`].
    pub fn choose(
        command: &[OsString],
        file: Option<&Path>,
        server: Option<&str>,
    ) -> Result<Self, SpecError> {
        let usage = |text: &str| Err(SpecError::Usage(text.to_owned()));
        match (command.is_empty(), file) {
            (false, None) if command[0].is_empty() => usage("the command behind `--` is empty"),
            (false, None) if server.is_none() => Ok(Self { command: command.to_vec(), ..Self::default() }),
            (false, None) => usage("--server names a server of a file: give --config FILE too"),
            (false, Some(_)) => {
                usage("give a command behind `--`, or --config FILE with --server NAME, not both")
            }
            (true, Some(file)) => Self::load(file, server),
            (true, None) => usage(
                "what is to be wrapped? `a2mcp wrap -- COMMAND ARGS…`, or `a2mcp wrap --config FILE --server NAME`",
            ),
        }
    }

    fn load(file: &Path, server: Option<&str>) -> Result<Self, SpecError> {
        let wrong =
            |what: String| SpecError::File { file: clean(&file.to_string_lossy(), 400).into_owned(), what };
        let mut text = String::new();
        std::fs::File::open(file)
            .and_then(|file| file.take(MAX_FILE).read_to_string(&mut text))
            .map_err(|error| wrong(error.to_string()))?;
        // Some editors write a byte order mark.
        Self::parse(text.trim_start_matches('\u{feff}'), server).map_err(wrong)
    }

    fn parse(text: &str, server: Option<&str>) -> Result<Self, String> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct File {
            mcp_servers: BTreeMap<String, Value>,
        }
        #[derive(Deserialize)]
        struct Entry {
            command: String,
            #[serde(default)]
            args: Vec<String>,
            #[serde(default)]
            env: BTreeMap<String, String>,
            #[serde(default)]
            cwd: Option<PathBuf>,
        }
        let file: File = serde_json::from_str(text)
            .map_err(|error| format!("expected JSON with an object \"mcpServers\": {error}"))?;
        let names = || {
            let names: Vec<_> = file.mcp_servers.keys().map(|name| clean(name, 60)).collect();
            if names.is_empty() { "none".to_owned() } else { names.join(", ") }
        };
        let name = match server {
            Some(name) => name,
            None => return Err(format!("which server? name one with --server NAME; it has: {}", names())),
        };
        let shown = clean(name, 60);
        let entry = file
            .mcp_servers
            .get(name)
            .ok_or_else(|| format!("it has no server \"{shown}\"; it has: {}", names()))?;
        if entry.get("command").is_none() && entry.get("url").is_some() {
            return Err(format!(
                "\"{shown}\" has a \"url\": it is served over HTTP already; only a \"command\" can be wrapped"
            ));
        }
        let entry = Entry::deserialize(entry).map_err(|error| {
            format!("\"{shown}\": expected \"command\" (a string), \"args\" (strings) and \"env\" (strings): {error}")
        })?;
        if entry.command.is_empty() {
            return Err(format!("\"{shown}\": \"command\" is empty"));
        }
        if let Some(name) = entry.env.keys().find(|name| name.is_empty() || name.contains(['=', '\0'])) {
            return Err(format!(
                "\"{shown}\": \"{}\" in \"env\" cannot be a variable's name",
                clean(name, 60)
            ));
        }
        let command = std::iter::once(entry.command).chain(entry.args).map(OsString::from).collect();
        Ok(Self { command, env: entry.env.into_iter().collect(), cwd: entry.cwd })
    }

    /// The program as a person knows it.
    pub fn program(&self) -> String {
        let program = self.command.first().map(OsString::as_os_str).unwrap_or_else(|| OsStr::new(""));
        clean(&program.to_string_lossy(), 200).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"{"mcpServers":{
        "files":{"command":"npx","args":["-y","a b","\"q\""],"env":{"KEY":"v"},"disabled":false},
        "far":{"type":"http","url":"https://example.org/mcp"},
        "named":{"command":"x","env":{"A=B":"c"}},
        "odd":{"command":"x","args":[7]}}, "other": 1}"#;

    #[test]
    fn the_named_server_is_taken_with_arguments_as_they_are() {
        let spec = Spec::parse(FILE, Some("files")).unwrap();
        assert_eq!(spec.command, ["npx", "-y", "a b", "\"q\""]);
        assert_eq!(spec.env, [("KEY".to_owned(), "v".to_owned())]);
        assert!(!format!("{spec:?}").contains("a b"), "arguments may be secret");
    }

    #[test]
    fn what_cannot_be_wrapped_is_said() {
        for (server, expected) in [
            (None, "which server? name one with --server NAME; it has: far, files, named, odd"),
            (Some("x\u{1b}"), "it has no server \"x\\u{1b}\"; it has: far, files, named, odd"),
            (Some("far"), "has a \"url\""),
            (Some("named"), "\"named\": \"A=B\" in \"env\" cannot be a variable's name"),
            (Some("odd"), "\"odd\": expected \"command\""),
        ] {
            let error = Spec::parse(FILE, server).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        for text in ["", "[]", "{}", "{\"mcpServers\":[]}"] {
            assert!(Spec::parse(text, Some("a")).unwrap_err().contains("expected JSON with an object"));
        }
    }

    #[test]
    fn a_command_and_a_file_exclude_each_other() {
        let command = [OsString::from("cat")];
        let file = Path::new("f.json");
        assert!(matches!(Spec::choose(&command, Some(file), Some("a")), Err(SpecError::Usage(_))));
        assert!(matches!(Spec::choose(&command, None, Some("a")), Err(SpecError::Usage(_))));
        assert!(matches!(Spec::choose(&[], None, None), Err(SpecError::Usage(_))));
        let empty = [OsString::new(), OsString::from("x")];
        assert!(matches!(Spec::choose(&empty, None, None), Err(SpecError::Usage(_))));
        assert_eq!(Spec::choose(&command, None, None).unwrap().command, command);
    }
}
