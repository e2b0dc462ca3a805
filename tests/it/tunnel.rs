//! The operator's tunnel (contract 7, complaints H3, P5, P8, S1, U1-U6) through the stand-in for
//! cloudflared, with the way through the public name played by [`Edge`].

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::cloudflared::Standin;
use crate::support::edge::{Edge, Way};
use crate::support::http::Connection;
use crate::support::{Host, SOON, Setup, eventually};

/// A bridge, its cloudflared, and the way to it from the internet.
struct Bridge {
    host: Host,
    standin: Standin,
    edge: Edge,
}

fn setup(standin: &Standin, edge: &Edge) -> Setup {
    let config = json!({ "xfer": { "cloudflared": standin.program() } });
    let mut setup = Setup::default().config(&config.to_string());
    setup.env.extend(edge.env());
    setup
}

impl Bridge {
    fn start(scenario: Value) -> Self {
        Self::start_with(scenario, |setup| setup)
    }

    fn start_with(scenario: Value, change: impl FnOnce(Setup) -> Setup) -> Self {
        let standin = Standin::with(scenario);
        let edge = Edge::start(&standin);
        let host = change(setup(&standin, &edge)).start();
        Self { host, standin, edge }
    }

    /// `a2mcp tunnel --json`: exit code and what it says.
    fn open(&self) -> (i32, Value) {
        let (code, out, err) = self.host.cli(&["tunnel", "--json"]);
        (
            code,
            serde_json::from_str(&out).unwrap_or_else(|_| panic!("{code} {out} {err} {}", self.host.log())),
        )
    }

    /// Opened and verified; its name.
    fn opened(&self) -> String {
        let (code, tunnel) = self.open();
        assert_eq!((code, &tunnel["state"]), (0, &json!("open")), "{tunnel} {}", self.host.log());
        self.name()
    }

    fn tunnel(&self) -> Value {
        self.host.status()["tunnel"].clone()
    }

    fn name(&self) -> String {
        let url = self.tunnel()["url"].as_str().unwrap_or_default().to_owned();
        url.trim_start_matches("https://").trim_end_matches('/').to_owned()
    }

    /// Waits until the tunnel stands so.
    fn until(&self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        eventually(what, || Some(self.tunnel()).filter(|tunnel| wanted(tunnel)))
    }

    fn records(&self) -> Vec<Value> {
        self.host.audit().into_iter().filter(|record| record["tool"] == "tunnel").collect()
    }
}

#[test]
fn it_is_opened_verified_and_closed_from_a_terminal() {
    let bridge = Bridge::start(json!({}));
    let (code, out, err) = bridge.host.cli(&["tunnel"]);
    let (name, public) = bridge.standin.name();
    assert_eq!((code, out.trim()), (0, format!("https://{name}/").as_str()), "{err}");
    assert!(err.contains("open and verified") && err.contains("Whoever has the token"), "{err}");
    assert!(err.contains("opening"), "there is progress: {err}");
    let status = bridge.tunnel();
    assert_eq!((&status["state"], &status["protocol"]), (&json!("open"), &json!("quic")));
    let bearer = format!("Bearer {}", bridge.host.token);
    let ping = br#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#;
    let initialize = crate::support::http::INITIALIZE.as_bytes();
    let reply = Connection::open(public).request("POST", "/", &[("Authorization", &bearer)], initialize);
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(Connection::open(public).request("POST", "/", &[], ping).status, 401);
    let (code, out, _) = bridge.host.cli(&["tunnel", "stop"]);
    assert_eq!((code, out.trim()), (0, "the tunnel is closed"));
    assert!(bridge.standin.names().is_empty());
    assert_eq!(bridge.tunnel()["state"], "closed");
    assert_eq!(bridge.host.cli(&["tunnel", "stop"]).1.trim(), "there was no tunnel");
    let _ = (SOON, Instant::now(), Duration::ZERO, Way::Open, &bridge.edge);
    let records = bridge.records();
    let args: Vec<Value> = records
        .iter()
        .map(|record| serde_json::from_str(record["args"].as_str().unwrap()).unwrap())
        .collect();
    let url = format!("https://{name}");
    assert_eq!(args[0], json!({"action": "start", "url": url, "port": bridge.host.port}));
    assert_eq!(args[1], json!({"action": "stop", "url": url, "port": bridge.host.port}));
}
