//! What a person, or with `--json` a machine, is told when a host started from a terminal serves: the
//! same for `a2mcp demo` and `a2mcp wrap` (contract 16).

use std::io::{self, Write};

use crate::config::{AgentDir, store};
use crate::frame::raw;
use crate::text::clean;

/// A host that serves.
#[derive(Debug)]
pub struct Serving<'a> {
    /// Who serves, as the beginning of a sentence.
    pub what: &'a str,
    /// The endpoint.
    pub url: &'a str,
    /// The sidecar.
    pub pid: u32,
    /// The host.
    pub host_pid: u32,
    /// What the sidecar can do.
    pub features: &'a [String],
    /// Where its files are.
    pub agent_dir: &'a AgentDir,
    /// Which files those are, up to "in DIR".
    pub files: &'a str,
}

/// The token of the config, once a sidecar serves.
///
/// # Errors
/// Why there is none, for people.
pub fn token(agent_dir: &AgentDir) -> Result<String, String> {
    let (config, _) = store::load_readonly(agent_dir).map_err(|error| error.to_string())?;
    let token = config.token.ok_or("the sidecar wrote no token")?;
    Ok(token.expose().to_owned())
}

/// Prints what a client needs.
///
/// # Errors
/// As writing to `out`.
pub fn announce(serving: &Serving<'_>, token: &str, json: bool, out: &mut dyn Write) -> io::Result<()> {
    let url = clean(serving.url, 200);
    if json {
        let line = serde_json::json!({
            "url": serving.url,
            "token": token,
            "pid": serving.pid,
            "hostPid": serving.host_pid,
            "agentDir": serving.agent_dir.root(),
        });
        writeln!(out, "{line}")?;
        return out.flush();
    }
    let quoted_url = raw::quote(serving.url);
    writeln!(
        out,
        "{} at {url}\n\nmcp.json for a client on this machine:\n{{\n  \"mcpServers\": {{\n    \
         \"a2mcp\": {{\n      \"type\": \"http\",\n      \"url\": {quoted_url},\n      \
         \"headers\": {{ \"Authorization\": \"Bearer {token}\" }}\n    }}\n  }}\n}}\n",
        clean(serving.what, 200)
    )?;
    writeln!(
        out,
        "By hand (the token comes over stdin: a command line can be read by others):\n\
         curl -s {url} -H @- -H 'Content-Type: application/json' \\\n  \
         -d '{{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"initialize\",\"params\":{{\"protocolVersion\":\"2025-11-25\",\
         \"capabilities\":{{}},\"clientInfo\":{{\"name\":\"curl\",\"version\":\"0\"}}}}}}' <<'END'\n\
         Authorization: Bearer {token}\nEND\n"
    )?;
    if serving.features.iter().any(|feature| feature == "xfer") {
        let base = url.trim_end_matches('/');
        writeln!(
            out,
            "A file of an open share:\ncurl -s {base}/xfer/ -H @- <<'END'\nAuthorization: Bearer {token}\nEND\n"
        )?;
    }
    let dir = serving.agent_dir.root().to_string_lossy();
    writeln!(out, "It runs until you press ^C; {} in {}.", serving.files, clean(&dir, 400))?;
    out.flush()
}
