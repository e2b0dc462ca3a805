//! `a2mcp connect`: the exact configuration of a client for one bridge. Pure: data in, text out.
//!
//! The configuration itself is what goes to stdout; which file it belongs in, and what else to do, is
//! the note for stderr. Printing the token is the point of the command (the operator asked for it);
//! it is still never put into a command line, where other users could read it. Time-outs are named
//! in each client's own key, because every client has its own short default.

use std::fmt::Write as _;

use serde_json::json;

use crate::config::Token;

/// A dependency-free client for agents that run code but speak no MCP.
pub const PYTHON: &str = include_str!("connect/call.py");

/// What stands in for a token that is not known.
const PLACEHOLDER: &str = "<TOKEN>";

/// Arguments of `a2mcp connect`.
#[derive(Clone, Debug, clap::Args)]
pub struct ConnectArgs {
    /// The client to configure.
    pub client: Client,
    /// The bridge's URL as the client reaches it [default: the running sidecar's].
    #[arg(long)]
    pub url: Option<String>,
    /// A file with the token, for a bridge elsewhere.
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<std::path::PathBuf>,
    /// How long the client shall wait for a call.
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub timeout: u32,
    /// Refer to the environment variable A2MCP_TOKEN instead of writing the token into the file
    /// (omp, cursor; the others never write it).
    #[arg(long)]
    pub env: bool,
}

/// The clients whose configuration is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Client {
    /// Oh My Pi: `mcp.json`.
    Omp,
    /// Claude Code: a `claude mcp add` command.
    Claude,
    /// Visual Studio Code: `.vscode/mcp.json`.
    Vscode,
    /// Cursor: `mcp.json`.
    Cursor,
    /// Codex: `config.toml`.
    Codex,
    /// curl, step by step.
    Curl,
    /// A Python script without dependencies.
    Python,
}

/// The bridge to connect to.
#[derive(Clone, Debug)]
pub struct Bridge {
    /// Its MCP URL as the client reaches it.
    pub url: String,
    /// Its token, if known.
    pub token: Option<Token>,
}

/// Configuration for stdout, words for stderr.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guide {
    /// Complete and pasteable as it is.
    pub config: String,
    /// Where it goes and what else to do.
    pub note: String,
}

/// What `client` needs to reach `bridge` and to wait `timeout` seconds for a call.
pub fn guide(client: Client, bridge: &Bridge, timeout: u32, env: bool) -> Guide {
    let export = format!("export A2MCP_TOKEN={}", shell(bridge.token()));
    let mut guide = match client {
        Client::Omp => {
            let header = if env { "Bearer ${A2MCP_TOKEN}".to_owned() } else { bridge.bearer() };
            let mut note = String::from(
                "Put this into ~/.omp/agent/mcp.json (or .omp/mcp.json of a project; if the file exists, add the \
                 entry to its mcpServers) and restart omp.\n\
                 `timeout` is in milliseconds; omp's default is 30000 and progress does not extend it.",
            );
            note.push_str(&file_note(env, &export));
            Guide { config: omp_json(&bridge.url, &header, timeout), note }
        }
        Client::Claude => Guide {
            config: format!(
                "{export}\nclaude mcp add --transport http a2mcp {} --header 'Authorization: Bearer ${{A2MCP_TOKEN}}'\n\
                 MCP_TOOL_TIMEOUT={} claude\n",
                shell(&bridge.url),
                u64::from(timeout) * 1000,
            ),
            note: format!(
                "Run these in a shell. Claude Code reads the variable when it starts: the token stays out of its files and \
                 command lines. Instead of MCP_TOOL_TIMEOUT (milliseconds), a .mcp.json entry may say `\"timeout\": {}`.",
                u64::from(timeout) * 1000,
            ),
        },
        Client::Vscode => Guide {
            config: pretty(&json!({
                "inputs": [{
                    "type": "promptString",
                    "id": "a2mcp-token",
                    "description": "Token of the a2mcp bridge",
                    "password": true,
                }],
                "servers": {"a2mcp": {
                    "type": "http",
                    "url": bridge.url,
                    "headers": {"Authorization": "Bearer ${input:a2mcp-token}"},
                }},
            })),
            note: format!(
                "Put this into .vscode/mcp.json of the workspace, or into the file that `MCP: Open User Configuration` \
                 opens. VS Code asks for the token once and keeps it in its secret storage:\n  {}\n\
                 VS Code has no time-out for tool calls: it waits until you cancel.",
                bridge.token(),
            ),
        },
        Client::Cursor => {
            let header = if env { "Bearer ${env:A2MCP_TOKEN}".to_owned() } else { bridge.bearer() };
            let config = json!({"mcpServers": {"a2mcp": {
                "url": bridge.url,
                "headers": {"Authorization": header},
            }}});
            let mut note = String::from(
                "Put this into ~/.cursor/mcp.json (not into a project's .cursor/mcp.json, which is easily committed) and \
                 restart Cursor. Cursor documents no time-out key for tool calls.",
            );
            note.push_str(&file_note(env, &export));
            Guide { config: pretty(&config), note }
        }
        Client::Codex => Guide {
            config: format!(
                "[mcp_servers.a2mcp]\nurl = {}\nbearer_token_env_var = \"A2MCP_TOKEN\"\n\
                 startup_timeout_sec = 30\ntool_timeout_sec = {timeout}\n",
                json!(bridge.url),
            ),
            note: format!(
                "Put this into ~/.codex/config.toml. Codex takes tokens from the environment only; before it starts:\n  \
                 {export}\n`tool_timeout_sec` is in seconds; the default is 60."
            ),
        },
        Client::Curl => Guide {
            config: curl(bridge, timeout),
            note: "Run this in a shell. The token goes into a file that only you can read, and from there to curl: on a \
                   command line, other users could see it."
                .into(),
        },
        Client::Python => Guide {
            config: PYTHON.into(),
            note: format!(
                "Save this as call.py where the agent runs (Python 3.8 or later, nothing to install), then:\n  \
                 export A2MCP_URL={}\n  {export}\n  python3 call.py --timeout {timeout} list\n  \
                 python3 call.py --timeout {timeout} call read '{{\"path\": \"README.md\"}}'",
                shell(&bridge.url),
            ),
        },
    };
    if bridge.token.is_none() {
        let _ = write!(
            guide.note,
            "\n{PLACEHOLDER} stands for the token, which is not known here: `a2mcp token` on the bridge's machine \
             prints it."
        );
    }
    guide
}

/// A ready-to-paste omp `mcp.json`. `authorization` is the whole header value.
pub fn omp_json(url: &str, authorization: &str, timeout: u32) -> String {
    pretty(&json!({"mcpServers": {"a2mcp": {
        "type": "http",
        "url": url,
        "headers": {"Authorization": authorization},
        "timeout": u64::from(timeout) * 1000,
    }}}))
}

impl Bridge {
    fn token(&self) -> &str {
        self.token.as_ref().map_or(PLACEHOLDER, Token::expose)
    }

    fn bearer(&self) -> String {
        format!("Bearer {}", self.token())
    }
}

fn file_note(env: bool, export: &str) -> String {
    match env {
        false => "\nThe file then holds the token: keep it to yourself (chmod 600), or use --env.".into(),
        true => format!("\nBefore the client starts:\n  {export}"),
    }
}

/// `initialize`, `tools/list` and one call, with JSON answers. printf is a shell builtin, so the
/// token is in no process's arguments.
fn curl(bridge: &Bridge, timeout: u32) -> String {
    let header = shell(&format!("Authorization: {}", bridge.bearer()));
    let url = shell(&bridge.url);
    let post = format!(
        "curl -sS --max-time {timeout} -H @\"$A2MCP_HEADER\" -H 'Content-Type: application/json' \
         -H 'Accept: application/json'"
    );
    format!(
        r#"A2MCP_URL={url}
A2MCP_HEADER="${{XDG_RUNTIME_DIR:-$HOME}}/.a2mcp-header"
(umask 077; printf '%s\n' {header} > "$A2MCP_HEADER")
A2MCP_SESSION=$({post} -D - -o /dev/null \
  -d '{{"jsonrpc":"2.0","id":1,"method":"initialize","params":{{"protocolVersion":"2025-11-25","capabilities":{{}},"clientInfo":{{"name":"curl","version":"1"}}}}}}' \
  "$A2MCP_URL" | tr -d '\r' | awk 'tolower($1) == "mcp-session-id:" {{print $2}}')
{post} -H "Mcp-Session-Id: $A2MCP_SESSION" \
  -d '{{"jsonrpc":"2.0","id":2,"method":"tools/list"}}' "$A2MCP_URL"; echo
{post} -H "Mcp-Session-Id: $A2MCP_SESSION" \
  -d '{{"jsonrpc":"2.0","id":3,"method":"tools/call","params":{{"name":"read","arguments":{{"path":"README.md"}}}}}}' "$A2MCP_URL"; echo
"#
    )
}

fn pretty(value: &serde_json::Value) -> String {
    // Serializing a Value cannot fail; its alternate form is the indented one.
    format!("{value:#}\n")
}

/// `text` as one word of a POSIX shell.
fn shell(text: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_./:=@%+,".contains(&b);
    if !text.is_empty() && text.bytes().all(plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    const TOKEN: &str = "AbCdEfGhIjKlMnOpQrStUvWxYz0123456789-_AbCdE";
    const URL: &str = "http://127.0.0.1:8765/mcp";

    fn bridge() -> Bridge {
        Bridge { url: URL.into(), token: Token::parse(TOKEN) }
    }

    fn parsed(client: Client, env: bool) -> Value {
        serde_json::from_str(&guide(client, &bridge(), 600, env).config).unwrap()
    }

    #[test]
    fn omp_gets_its_keys_and_milliseconds() {
        let expected = json!({"mcpServers": {"a2mcp": {
            "type": "http", "url": URL, "headers": {"Authorization": format!("Bearer {TOKEN}")}, "timeout": 600_000,
        }}});
        assert_eq!(parsed(Client::Omp, false), expected);
        let env = parsed(Client::Omp, true);
        assert_eq!(env["mcpServers"]["a2mcp"]["headers"]["Authorization"], "Bearer ${A2MCP_TOKEN}");
    }

    #[test]
    fn vscode_asks_for_the_token_instead_of_storing_it() {
        let config = parsed(Client::Vscode, false);
        assert_eq!(config["servers"]["a2mcp"]["headers"]["Authorization"], "Bearer ${input:a2mcp-token}");
        assert_eq!(config["inputs"][0]["id"], "a2mcp-token");
        assert_eq!(config["inputs"][0]["password"], true);
        assert!(!config.to_string().contains(TOKEN));
    }

    #[test]
    fn cursor_gets_an_entry_of_mcp_servers() {
        let config = parsed(Client::Cursor, false);
        assert_eq!(config["mcpServers"]["a2mcp"]["headers"]["Authorization"], format!("Bearer {TOKEN}"));
        let env = parsed(Client::Cursor, true);
        assert_eq!(env["mcpServers"]["a2mcp"]["headers"]["Authorization"], "Bearer ${env:A2MCP_TOKEN}");
    }

    #[test]
    fn claude_and_codex_take_the_token_from_the_environment() {
        let claude = guide(Client::Claude, &bridge(), 600, false).config;
        assert!(claude.contains("claude mcp add --transport http a2mcp http://127.0.0.1:8765/mcp --header"));
        assert!(claude.contains("MCP_TOOL_TIMEOUT=600000 claude"));
        let command = claude.lines().find(|line| line.starts_with("claude ")).unwrap();
        assert!(!command.contains(TOKEN), "{command}");
        let codex = guide(Client::Codex, &bridge(), 90, false);
        assert!(codex.config.contains("bearer_token_env_var = \"A2MCP_TOKEN\"\n"));
        assert!(codex.config.contains("tool_timeout_sec = 90\n"));
        assert!(!codex.config.contains(TOKEN) && codex.note.contains(TOKEN));
    }

    #[test]
    fn curl_never_carries_the_token_on_a_command_line() {
        let text = guide(Client::Curl, &bridge(), 600, false).config;
        let with_token: Vec<_> = text.lines().filter(|line| line.contains(TOKEN)).collect();
        assert_eq!(with_token.len(), 1);
        assert!(with_token[0].starts_with("(umask 077; printf "), "{with_token:?}");
    }

    #[test]
    fn an_unknown_token_is_a_placeholder_and_said_so() {
        let bridge = Bridge { url: URL.into(), token: None };
        for client in [Client::Omp, Client::Claude, Client::Cursor, Client::Curl] {
            let guide = guide(client, &bridge, 600, false);
            assert!(guide.config.contains("<TOKEN>"), "{client:?}");
            assert!(guide.note.contains("a2mcp token"), "{client:?}");
        }
    }

    #[test]
    fn odd_tokens_and_urls_are_quoted() {
        assert_eq!(shell("a'b $x"), r"'a'\''b $x'");
        let odd = "'\"\\$(id)`aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
        let bridge = Bridge { url: "http://[::1]:1/\"x".into(), token: Token::parse(odd) };
        let omp: Value = serde_json::from_str(&guide(Client::Omp, &bridge, 1, false).config).unwrap();
        assert_eq!(omp["mcpServers"]["a2mcp"]["headers"]["Authorization"], format!("Bearer {odd}"));
        let claude = guide(Client::Claude, &bridge, 1, false).config;
        assert!(claude.starts_with("export A2MCP_TOKEN=''\\''\"\\$(id)`a"), "{claude}");
    }
}
