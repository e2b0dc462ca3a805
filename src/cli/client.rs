//! `a2mcp tools` and `a2mcp call`: a small MCP client for people and scripts. The verbs and what they
//! print are here, the protocol is in `session`.
//!
//! Results go to stdout, everything about them to stderr. Exit codes (contract 16): 0 result,
//! 1 error, 2 usage, 3 unreachable, 4 unauthorized, 5 time-out; 130 interrupted. A time-out does not
//! cancel the call at the host: sent again in time, the bridge attaches it to the one that runs. Who
//! interrupts (^C) wants it to end: that cancels it.

mod session;
mod sse;

use std::borrow::Cow;
use std::fs::{self, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::value::RawValue;
use signal_hook::consts::SIGINT;

use super::out;
use crate::config::{Config, Token};
use crate::signals::Watch;
use crate::text;

pub use session::{Endpoint, Failure};
use session::{Lossy, Session};

/// For so long the bridge may take to hear that a call or a session is over.
const PARTING: Duration = Duration::from_secs(2);

/// Which bridge, and how to show what it says.
#[derive(Clone, Debug, clap::Args)]
pub struct ClientArgs {
    /// The bridge's URL [default: the sidecar that runs here].
    #[arg(long, requires = "token_file")]
    pub url: Option<String>,
    /// A file with the token, or an a2mcp.json; `-` is stdin.
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// How long to wait for everything together.
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub timeout: u32,
    /// Print the result as JSON, or the error object that came in its place.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `a2mcp call`.
#[derive(Clone, Debug, clap::Args)]
pub struct CallArgs {
    /// The tool's name.
    pub tool: String,
    /// Its arguments: JSON, @FILE, or - for stdin.
    #[arg(value_name = "JSON", default_value = "{}")]
    pub arguments: String,
    /// Save images and other binary blocks there.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Which bridge, and how to show what it says.
    #[command(flatten)]
    pub client: ClientArgs,
}

/// `a2mcp tools`: lists the tools; the exit code.
pub async fn tools(endpoint: &Endpoint, args: &ClientArgs) -> u8 {
    finish(list(endpoint, args).await, args.json)
}

/// `a2mcp call`: calls one tool and prints its result; the exit code.
pub async fn call(endpoint: &Endpoint, args: &CallArgs) -> u8 {
    finish(run(endpoint, args).await, args.client.json)
}

/// The exit code for `failure`. The only place that knows them.
pub fn exit_code(failure: &Failure) -> u8 {
    match failure {
        Failure::Refused { .. } => 1,
        Failure::Usage(_) => 2,
        Failure::Unreachable(_) => 3,
        Failure::Unauthorized | Failure::TokenReplaced => 4,
        Failure::TimedOut(_) => 5,
        // As a shell says that SIGINT ended a command.
        Failure::Interrupted { .. } => 130,
    }
}

/// Reads a token from a file that holds nothing else, or from an `a2mcp.json`; `-` is stdin.
pub fn read_token(path: &Path) -> Result<Token, Failure> {
    let name = text::clean(&path.to_string_lossy(), 300).into_owned();
    let failed = |error: io::Error| Failure::Usage(format!("cannot read the token file {name}: {error}"));
    let mut bytes = Vec::new();
    let limit = crate::config::MAX_BYTES as u64 + 1;
    if path == Path::new("-") {
        io::stdin().lock().take(limit).read_to_end(&mut bytes).map_err(failed)?;
    } else {
        fs::File::open(path).and_then(|file| file.take(limit).read_to_end(&mut bytes)).map_err(failed)?;
    }
    let content = String::from_utf8_lossy(&bytes);
    let token = if content.trim_start().starts_with('{') {
        let (config, _) = Config::parse(&bytes, path).map_err(|error| Failure::Usage(error.to_string()))?;
        config.token
    } else {
        Token::parse(content.trim())
    };
    token.ok_or_else(|| {
        Failure::Usage(format!("{name} must hold the token and nothing else ({})", Token::EXPECTATION))
    })
}

fn finish(result: Result<u8, Failure>, json: bool) -> u8 {
    result.unwrap_or_else(|failure| {
        out::note(&failure.to_string());
        if let Failure::Refused { error: Some(error), .. } = &failure
            && json
        {
            // Failed it has anyway.
            let _ = shown(out::print_foreign_json(error.get()));
        }
        exit_code(&failure)
    })
}

async fn list(endpoint: &Endpoint, args: &ClientArgs) -> Result<u8, Failure> {
    let result = request(endpoint, args.timeout, "tools/list", RawValue::NULL).await?;
    if args.json {
        return shown(out::print_foreign_json(result.get()));
    }
    #[derive(Deserialize)]
    struct Tools {
        tools: Vec<Tool>,
    }
    #[derive(Deserialize)]
    struct Tool {
        name: Lossy,
        #[serde(default)]
        description: Lossy,
    }
    let Tools { tools } = serde_json::from_str(result.get())
        .map_err(|_| Failure::Unreachable("no MCP endpoint: tools/list has no list of tools".into()))?;
    let width = tools.iter().map(|tool| tool.name.0.chars().count()).max().unwrap_or(0).min(32);
    let mut table = String::new();
    for Tool { name, description } in &tools {
        let first = description.0.trim().lines().next().unwrap_or("");
        let line = format!("{:width$}  {}", text::clean(&name.0, 200), text::clean(first, 120));
        table.push_str(line.trim_end());
        table.push('\n');
    }
    shown(out::print(&table))
}

async fn run(endpoint: &Endpoint, args: &CallArgs) -> Result<u8, Failure> {
    let arguments = read_arguments(&args.arguments)?;
    let name = serde_json::Value::from(args.tool.as_str());
    let params = RawValue::from_string(format!(r#"{{"name":{name},"arguments":{}}}"#, arguments.get()))
        .map_err(|error| Failure::Usage(format!("the arguments must be JSON: {error}")))?;
    let result = request(endpoint, args.client.timeout, "tools/call", &params).await?;
    let outcome: Option<Outcome<'_>> = serde_json::from_str(result.get()).ok();
    let outcome = outcome.filter(|outcome| outcome.content.is_some() || outcome.structured.is_some());
    let outcome = outcome.ok_or_else(|| {
        Failure::Unreachable("no MCP endpoint: the result of the call has no content".into())
    })?;
    let blocks = outcome.content.unwrap_or_default();
    let printed = match outcome.structured {
        _ if args.client.json => out::print_foreign_json(result.get()),
        Some(structured) if blocks.is_empty() => out::print_foreign_json(structured.get()),
        _ => blocks
            .iter()
            .enumerate()
            .try_for_each(|(at, block)| print_block(block, at + 1, args.out.as_deref())),
    };
    shown(printed).map(|code| if outcome.is_error { 1 } else { code })
}

/// One request in a session of its own, within `timeout` seconds.
async fn request(
    endpoint: &Endpoint,
    timeout: u32,
    method: &str,
    params: &RawValue,
) -> Result<Box<RawValue>, Failure> {
    // Null stands for no parameters: an object is what every server accepts.
    let empty = RawValue::from_string("{}".into()).unwrap_or_default();
    let params = if params.get() == "null" { &empty } else { params };
    let limit = Duration::from_secs(timeout.into());
    let watched = Watch::open(&[SIGINT]);
    let mut interrupts = watched.map_err(|error| Failure::Usage(format!("cannot watch for ^C: {error}")))?;
    let mut session = Session::new(endpoint, out::note);
    let waited = tokio::select! {
        waited = tokio::time::timeout(limit, session.request(method, params)) => Some(waited),
        () = interrupts.next() => None,
    };
    match waited {
        // The session stays for whoever sends the call again; it is bounded and ages at the bridge.
        Some(Err(_)) => Err(Failure::TimedOut(limit)),
        Some(Ok(result)) => {
            let _ = tokio::time::timeout(PARTING, session.close()).await;
            result
        }
        None => {
            let is_cancelled = tokio::select! {
                told = tokio::time::timeout(PARTING, session.cancel()) => told.unwrap_or(false),
                // A second one waits for nothing.
                () = interrupts.next() => false,
            };
            if is_cancelled {
                let _ = tokio::time::timeout(PARTING, session.close()).await;
            }
            Err(Failure::Interrupted { is_cancelled })
        }
    }
}

fn read_arguments(given: &str) -> Result<Box<RawValue>, Failure> {
    let failed = |error: io::Error| {
        Failure::Usage(format!(
            "cannot read the arguments from {}: {error}",
            text::clean(given.trim_start_matches('@'), 200)
        ))
    };
    let text = match given.strip_prefix('@') {
        Some(file) => fs::read_to_string(file).map_err(failed)?,
        None if given == "-" => io::read_to_string(io::stdin()).map_err(failed)?,
        None => given.to_owned(),
    };
    RawValue::from_string(text.trim().to_owned())
        .map_err(|error| Failure::Usage(format!("the arguments must be JSON: {error}")))
}

/// A `tools/call` result as far as it is printed.
#[derive(Deserialize)]
struct Outcome<'a> {
    #[serde(borrow, default)]
    content: Option<Vec<Block<'a>>>,
    #[serde(borrow, rename = "structuredContent", default)]
    structured: Option<&'a RawValue>,
    #[serde(rename = "isError", default)]
    is_error: bool,
}

#[derive(Deserialize)]
struct Block<'a> {
    #[serde(rename = "type", default)]
    kind: Lossy,
    #[serde(default)]
    text: Option<Lossy>,
    #[serde(borrow, default)]
    data: Option<Cow<'a, str>>,
    #[serde(rename = "mimeType", default)]
    mime: Lossy,
    #[serde(default)]
    uri: Lossy,
    #[serde(default)]
    name: Lossy,
    #[serde(borrow, default)]
    resource: Option<Resource<'a>>,
}

#[derive(Deserialize)]
struct Resource<'a> {
    #[serde(default)]
    text: Option<Lossy>,
    #[serde(borrow, default)]
    blob: Option<Cow<'a, str>>,
    #[serde(rename = "mimeType", default)]
    mime: Lossy,
}

fn print_block(block: &Block<'_>, number: usize, out_dir: Option<&Path>) -> io::Result<()> {
    let binary = |data: Option<&str>, mime: &str| {
        let bytes = STANDARD.decode(data.unwrap_or("")).map_err(|_| {
            io::Error::new(io::ErrorKind::InvalidData, format!("block {number} of the result is not base64"))
        })?;
        let what =
            format!("[{}, {}, {} bytes", text::clean(&block.kind.0, 40), text::clean(mime, 80), bytes.len());
        match out_dir {
            None => out::print(&format!("{what}: use --out DIR to save it]")),
            Some(dir) => {
                let path = save(dir, &block.kind.0, mime, number, &bytes)?;
                out::print(&format!("{what}: saved as {}]", text::clean(&path.to_string_lossy(), 400)))
            }
        }
    };
    match (block.kind.0.as_str(), &block.resource) {
        ("image" | "audio", _) => binary(block.data.as_deref(), &block.mime.0),
        ("resource", Some(Resource { text: Some(text), .. })) => out::print_foreign(&text.0),
        ("resource", Some(Resource { blob, mime, .. })) => binary(blob.as_deref(), &mime.0),
        ("resource_link", _) => {
            let shown = [&block.uri, &block.name].map(|text| text::clean(&text.0, 2000));
            out::print(shown.join(" ").trim_end())
        }
        _ => out::print_foreign(block.text.as_ref().map_or("", |text| &text.0)),
    }
}

/// Writes a new file whose name is ours: nothing the other side says becomes part of a path.
fn save(dir: &Path, kind: &str, mime: &str, number: usize, bytes: &[u8]) -> io::Result<PathBuf> {
    let kind = if matches!(kind, "image" | "audio") { kind } else { "resource" };
    let extension = match mime {
        "image/png" => "png",
        "image/jpeg" => "jpg",
        "image/webp" => "webp",
        "image/gif" => "gif",
        "image/svg+xml" => "svg",
        "audio/wav" => "wav",
        "audio/mpeg" => "mp3",
        "application/pdf" => "pdf",
        "application/json" => "json",
        _ => "bin",
    };
    fs::create_dir_all(dir)?;
    for taken in 0.. {
        let suffix = if taken == 0 { String::new() } else { format!("-{taken}") };
        let path = dir.join(format!("{kind}-{number}{suffix}.{extension}"));
        match OpenOptions::new().write(true).create_new(true).open(&path) {
            Ok(mut file) => return file.write_all(bytes).map(|()| path),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

/// A result that could not be shown is a failed command.
fn shown(result: io::Result<()>) -> Result<u8, Failure> {
    match result {
        Ok(()) => Ok(0),
        Err(error) => {
            out::note(&format!("cannot show or save the result: {error}"));
            Ok(1)
        }
    }
}

#[cfg(test)]
mod tests;
