//! The operator's tunnel (contract 7, complaints H3, P5, P8, S1, U1-U6) through the stand-in for
//! cloudflared, with the way through the public name played by [`Edge`].

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::support::assets::{Assets, Serve};
use crate::support::cloudflared::Standin;
use crate::support::edge::{Edge, Way};
use crate::support::http::Connection;
use crate::support::{Host, Setup, eventually};

/// A bridge, its cloudflared, and the way to it from the internet.
pub(crate) struct Bridge {
    pub(crate) host: Host,
    pub(crate) standin: Standin,
    pub(crate) edge: Edge,
}

pub(crate) fn setup(standin: &Standin, edge: &Edge) -> Setup {
    let config = json!({ "xfer": { "cloudflared": standin.program() } });
    let mut setup = Setup::default().config(&config.to_string());
    setup.env.extend(edge.env());
    setup
}

impl Bridge {
    pub(crate) fn start(scenario: Value) -> Self {
        Self::start_with(scenario, |setup| setup)
    }

    pub(crate) fn start_with(scenario: Value, change: impl FnOnce(Setup) -> Setup) -> Self {
        let standin = Standin::with(scenario);
        let edge = Edge::start(&standin);
        let host = change(setup(&standin, &edge)).start();
        Self { host, standin, edge }
    }

    /// `a2mcp tunnel --json`: exit code and what it says.
    pub(crate) fn open(&self) -> (i32, Value) {
        let (code, out, err) = self.host.cli(&["tunnel", "--json"]);
        (
            code,
            serde_json::from_str(&out).unwrap_or_else(|_| panic!("{code} {out} {err} {}", self.host.log())),
        )
    }

    /// Opened and verified; its name.
    pub(crate) fn opened(&self) -> String {
        let (code, tunnel) = self.open();
        assert_eq!((code, &tunnel["state"]), (0, &json!("open")), "{tunnel} {}", self.host.log());
        self.name()
    }

    pub(crate) fn tunnel(&self) -> Value {
        self.host.status()["tunnel"].clone()
    }

    pub(crate) fn name(&self) -> String {
        let url = self.tunnel()["url"].as_str().unwrap_or_default().to_owned();
        url.trim_start_matches("https://").trim_end_matches('/').to_owned()
    }

    /// Waits until the tunnel stands so.
    pub(crate) fn until(&self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        eventually(what, || Some(self.tunnel()).filter(|tunnel| wanted(tunnel)))
    }

    pub(crate) fn records(&self) -> Vec<Value> {
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
    let records = bridge.records();
    let args: Vec<Value> = records
        .iter()
        .map(|record| serde_json::from_str(record["args"].as_str().unwrap()).unwrap())
        .collect();
    let url = format!("https://{name}");
    assert_eq!(args[0], json!({"action": "start", "url": url, "port": bridge.host.port}));
    assert_eq!(args[1], json!({"action": "stop", "url": url, "port": bridge.host.port}));
}

/// Answers `/a2mcp WORDS` as the host.
pub(crate) fn command(host: &Host, id: &str, words: &[&str]) -> Value {
    host.ask(id, "bridge/command", &json!({ "argv": words }).to_string())["result"].clone()
}

#[test]
fn it_is_opened_and_closed_in_the_host_and_one_sentence_says_what_is_reachable() {
    let bridge = Bridge::start(json!({}));
    let answer = command(&bridge.host, "open", &["tunnel"]);
    let url = format!("https://{}/", bridge.standin.name().0);
    let text = answer["text"].as_str().unwrap();
    assert_eq!(answer["level"], "info", "{text}");
    for part in ["is open", "From the internet", "token", "all 6 tools", &url, "/xfer/", "tunnel stop"] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    assert_eq!(bridge.host.count("bridge/notify"), 0, "said once");
    let again = command(&bridge.host, "again", &["tunnel"]);
    assert_eq!(again["text"], answer["text"], "the same URL");
    assert_eq!(bridge.standin.starts().len(), 1);
    assert_eq!(command(&bridge.host, "close", &["tunnel", "stop"])["text"], "the tunnel is closed");
    assert_eq!(command(&bridge.host, "odd", &["tunnel", "up"])["level"], "warning");
}

#[test]
fn two_openings_in_flight_make_one_process() {
    let bridge = Bridge::start(json!({"connectDelay": 1}));
    std::thread::scope(|scope| {
        let both = [scope.spawn(|| bridge.open()), scope.spawn(|| bridge.open())];
        let urls = both.map(|opening| opening.join().unwrap().1["url"].clone());
        assert!(urls[0].is_string() && urls[0] == urls[1], "{urls:?}");
    });
    assert_eq!(bridge.standin.starts().len(), 1);
}

#[test]
fn the_operator_of_a_terminal_is_heard_of_in_the_host() {
    let bridge = Bridge::start(json!({}));
    let name = bridge.opened();
    let notice = bridge.host.notice(&name);
    assert_eq!(notice["level"], "info");
    assert!(notice["text"].as_str().unwrap().starts_with("a2mcp: the tunnel is open."), "{notice}");
}

#[test]
fn no_caller_opens_it() {
    let bridge = Bridge::start(json!({}));
    let mut client = bridge.host.client();
    let listed = client.rpc("tools/list", "{}").to_string();
    assert!(!listed.contains("tunnel"), "{listed}");
    assert!(client.call_text("tunnel", "{}").contains("not exposed"));
    for path in ["/tunnel", "/a2mcp/tunnel", "/xfer/tunnel"] {
        let reply = bridge.host.http("POST", path, &[], br#"{"verb":"tunnel"}"#);
        assert!(reply.status >= 400, "{path} {}", reply.status);
    }
    assert_eq!(bridge.tunnel()["state"], "closed");
    assert!(bridge.standin.starts().is_empty());
}

#[test]
fn the_child_gets_no_secret_and_nothing_of_the_users_own_cloudflared() {
    let bridge = Bridge::start_with(json!({}), |setup| {
        setup
            .env("TUNNEL_NAME", "mine")
            .env("TUNNEL_HTTP_HOST_HEADER", "other.example")
            .env("NO_AUTOUPDATE", "x")
            .env("NO_TLS_VERIFY", "x")
            .env("KEPT", "yes")
    });
    // U4: whatever lies in the home directory has no effect.
    let home = tempfile::tempdir().unwrap();
    std::fs::create_dir(home.path().join(".cloudflared")).unwrap();
    for config in ["ingress:\n  - service: http_status:418\n", "name: x\n", "a: [b\n"] {
        std::fs::write(home.path().join(".cloudflared/config.yml"), config).unwrap();
        let standin = Standin::new();
        let edge = Edge::start(&standin);
        let host = setup(&standin, &edge).env("HOME", home.path().to_str().unwrap()).start();
        let other = Bridge { host, standin, edge };
        other.opened();
        assert_eq!(other.standin.public().request("GET", "/livez", &[], b"").status, 200, "{config}");
    }
    bridge.opened();
    let start = &bridge.standin.starts()[0];
    let text = start.to_string();
    assert!(!text.contains(&bridge.host.token), "{text}");
    let env = start["env"].as_object().unwrap();
    let kept: Vec<&String> = env
        .keys()
        .filter(|name| {
            name.starts_with("TUNNEL_") || name.starts_with("NO_AUTO") || name.starts_with("NO_TLS")
        })
        .collect();
    assert_eq!(kept, ["TUNNEL_NO_PRECHECKS"]);
    assert_eq!(env["KEPT"], "yes");
    let argv: Vec<&str> =
        start["argv"].as_array().unwrap().iter().map(|word| word.as_str().unwrap()).collect();
    let origin = format!("http://127.0.0.1:{}", bridge.host.port);
    for pair in [
        ["--url", origin.as_str()],
        ["--protocol", "auto"],
        ["--retries", "1"],
        ["--max-edge-addr-retries", "1"],
        ["--grace-period", "1s"],
        ["--metrics", "127.0.0.1:0"],
    ] {
        assert!(argv.windows(2).any(|two| two == pair), "{pair:?} is not in {argv:?}");
    }
    assert!(argv.contains(&"--no-autoupdate") && argv.contains(&"--management-diagnostics=false"));
    let config = argv[argv.iter().position(|word| *word == "--config").unwrap() + 1];
    assert_eq!(std::fs::read_to_string(config).unwrap(), "{}\n");
}

#[test]
fn an_older_cloudflared_is_started_with_what_it_knows() {
    let bridge = Bridge::start(json!({"version": "2022.11.0"}));
    bridge.opened();
    let starts = bridge.standin.starts();
    assert_eq!(starts.len(), 4, "output, management-diagnostics and max-edge-addr-retries one by one");
    let last = starts[3]["argv"].to_string();
    assert!(
        !last.contains("--output") && !last.contains("diagnostics") && last.contains("--protocol"),
        "{last}"
    );
}

/// U1: named at once, connected later.
#[test]
fn the_url_is_not_given_before_the_edge_is_connected_nor_called_verified_before_the_probe() {
    let bridge = Bridge::start(json!({"connectDelay": 600}));
    bridge.edge.set(Way::Forgotten);
    std::thread::scope(|scope| {
        let opening = scope.spawn(|| command(&bridge.host, "open-it", &["tunnel"]));
        let shown = bridge
            .until("a name", |tunnel| tunnel["why"].as_str().is_some_and(|why| why.contains("connecting ")));
        assert_eq!((&shown["state"], &shown["url"]), (&json!("opening"), &Value::Null));
        bridge.standin.scenario(json!({}));
        let shown = bridge.until("a connection", |tunnel| tunnel["state"] != "opening");
        assert_eq!(shown["state"], "open, not verified");
        assert!(shown["url"].as_str().unwrap().starts_with("https://"));
        let answer = opening.join().unwrap();
        let text = answer["text"].as_str().unwrap();
        assert!(text.contains("open, not verified: Cloudflare does not reach the tunnel (530"), "{text}");
        assert_eq!(answer["level"], "warning");
    });
    bridge.edge.set(Way::Open);
    let text = bridge.host.notice("the tunnel is verified now")["text"].clone();
    assert!(text.as_str().unwrap().contains(&bridge.name()), "{text}");
    assert_eq!(bridge.tunnel()["state"], "open");
}

#[test]
fn what_this_machine_cannot_verify_is_open_and_says_why() {
    let bridge = Bridge::start(json!({}));
    bridge.edge.set(Way::Blocked);
    for (way, why) in [
        (Way::Blocked, "no way to it from this machine"),
        (Way::Unresolved, "no such host"),
        (Way::Resigned, "re-signs TLS"),
        (Way::Usurped, "something else answers"),
        (Way::Forgotten, "does not reach the tunnel (530"),
    ] {
        bridge.edge.set(way);
        let (code, tunnel) = bridge.open();
        assert_eq!((code, &tunnel["state"]), (0, &json!("open, not verified")), "{way:?} {tunnel}");
        assert!(tunnel["why"].as_str().unwrap().contains(why), "{way:?} {tunnel}");
        assert!(tunnel["url"].is_string(), "it is given all the same");
    }
    assert_eq!(bridge.standin.starts().len(), 1, "no new name for that");
    let (code, out, _) = bridge.host.cli(&["doctor"]);
    assert!(code == 1 && out.contains("open, not verified") && out.contains("fix:"), "{out}");
    bridge.edge.set(Way::Open);
    assert_eq!(bridge.open().1["state"], "open");
    assert!(bridge.host.cli(&["doctor"]).1.contains("reachable from the internet at https://"));
}

/// U2 and the rest of what the quick service can do.
#[test]
fn each_failure_to_open_has_its_reason_and_advice() {
    for (scenario, why, advice) in [
        (json!({"service": "html"}), "a page (500", "sign-in page"),
        (json!({"service": "html200"}), "a page (200", "sign-in page"),
        (json!({"service": "errors"}), "an error instead of a tunnel", "try again later"),
        (json!({"service": "reset"}), "closed the connection", "HTTPS_PROXY does not help"),
        (json!({"service": "refused"}), "connection refused", "443"),
        (json!({"service": "nxdomain"}), "cannot be resolved", "DNS"),
        (json!({"service": "silent", "serviceTimeout": 0.1}), "did not answer in time", "network"),
        (json!({"edge": "hangs", "edgePatience": 0.1}), "edge closed the connection", "7844"),
        (json!({"edge": "error"}), "refused the tunnel", "open it again"),
        (json!({"metricsTaken": true}), "ended with exit code 1: Error opening metrics server", "logs"),
    ] {
        let bridge = Bridge::start(scenario.clone());
        let (code, tunnel) = bridge.open();
        assert_eq!((code, &tunnel["state"]), (1, &json!("failed")), "{scenario} {tunnel}");
        assert!(tunnel["why"].as_str().unwrap().contains(why), "{scenario} {tunnel}");
        assert!(tunnel["advice"].as_str().unwrap().contains(advice), "{scenario} {tunnel}");
        assert!(tunnel["url"].is_null());
        let record = bridge.records().pop().unwrap();
        assert_eq!(record["isError"], true);
        assert!(record["args"].as_str().unwrap().contains("\"error\""), "{record}");
        let (_, _, err) = bridge.host.cli(&["tunnel"]);
        assert!(err.contains("failed(") && err.contains(why), "{err}");
    }
}

#[test]
fn a_refused_creation_is_not_tried_again_within_a_minute() {
    let bridge = Bridge::start(json!({"service": "429"}));
    let (code, tunnel) = bridge.open();
    assert!(code == 1 && tunnel["why"].as_str().unwrap().contains("429, error 1015"), "{tunnel}");
    bridge.standin.scenario(json!({}));
    let (code, _, err) = bridge.host.cli(&["tunnel"]);
    assert!(code == 1 && err.contains("not asked again for") && err.contains("SSH"), "{err}");
    let answer = command(&bridge.host, "again", &["tunnel"]);
    assert!(
        answer["level"] == "error" && answer["text"].as_str().unwrap().contains("not asked again"),
        "{answer}"
    );
    assert_eq!(bridge.standin.starts().len(), 1);
}

#[test]
fn a_program_that_is_no_cloudflared_is_given_up_at_once() {
    let bridge = Bridge::start(json!({}));
    for _ in 0..5 {
        bridge.standin.install("#!/bin/sh\n[ \"$1\" != tunnel ] || { echo not me >&2; exit 3; }\n");
        let (code, tunnel) = bridge.open();
        assert_eq!(
            (code, &tunnel["why"]),
            (1, &json!("cloudflared ended with exit code 3: not me")),
            "{tunnel}"
        );
    }
}

#[test]
fn without_a_program_it_says_so() {
    let bridge = Bridge::start(json!({}));
    std::fs::remove_file(bridge.standin.program()).unwrap();
    let (code, tunnel) = bridge.open();
    assert_eq!((code, &tunnel["state"]), (1, &json!("failed")), "{tunnel}");
    assert!(tunnel["why"].as_str().unwrap().contains("cloudflared"), "{tunnel}");
}

/// U3.
#[test]
fn blocked_udp_is_shown_and_costs_no_name() {
    let bridge = Bridge::start(json!({"udpBlocked": true, "fallbackAfter": 0.6, "retryPause": 0.2}));
    bridge.opened();
    let tunnel = bridge.tunnel();
    assert_eq!((&tunnel["protocol"], &tunnel["udpBlocked"]), (&json!("http2"), &json!(true)));
    let (_, screen, _) = bridge.host.cli(&["status"]);
    assert!(screen.contains("http2 (UDP port 7844 is blocked)"), "{screen}");
    assert_eq!(bridge.standin.starts().len(), 1);
}

/// H3, also in `Origin`.
#[test]
fn its_name_is_allowed_from_its_naming_until_it_closes() {
    let bridge = Bridge::start(json!({"connectDelay": 600}));
    std::thread::scope(|scope| {
        scope.spawn(|| bridge.open());
        let shown = bridge
            .until("a name", |tunnel| tunnel["why"].as_str().is_some_and(|why| why.contains("connecting ")));
        let why = shown["why"].as_str().unwrap();
        let name = why.split(' ').nth(1).unwrap().to_owned();
        let ask = |header: &str, value: &str| {
            let body = crate::support::http::INITIALIZE.as_bytes();
            bridge.host.http("POST", "/", &[(header, value)], body).status
        };
        assert_eq!((ask("Host", &name), ask("Host", &name.to_uppercase())), (200, 200));
        assert_eq!(ask("Origin", &format!("https://{name}")), 200);
        assert_eq!((ask("Host", "other.trycloudflare.com"), ask("Host", &format!("x.{name}"))), (403, 403));
        bridge.host.cli(&["tunnel", "stop"]);
        assert_eq!((ask("Host", &name), ask("Origin", &format!("https://{name}"))), (403, 403));
    });
}

#[test]
fn the_nonce_answers_nobody_else() {
    let bridge = Bridge::start(json!({}));
    bridge.opened();
    for path in ["/livez/", "/livez/x", "/livez/00000000000000000000000000000000"] {
        assert_eq!(bridge.host.http("GET", path, &[], b"").status, 404, "{path}");
    }
    assert!(bridge.edge.asked() >= 1);
}

/// Contract 14 and 11: what is fetched is pinned, and recorded before it is started. U5: what vanishes
/// after that is not fetched again and again.
#[test]
fn a_program_that_is_not_there_is_fetched_once_and_what_vanishes_is_named() {
    let (standin, mirror) = (Standin::new(), Assets::start());
    let edge = Edge::start(&standin);
    let home = tempfile::tempdir().unwrap();
    let program = std::fs::read(standin.program()).unwrap();
    let pins = home.path().join("pins.json");
    let sha256: String = Sha256::digest(&program).iter().map(|byte| format!("{byte:02x}")).collect();
    let pin = json!([{"tool": "cloudflared", "version": "2026.8.2", "folder": "some/2026.8.2", "asset": "cloudflared-test",
        "sha256": sha256, "bytes": program.len(), "format": "bare"}]);
    std::fs::write(&pins, pin.to_string()).unwrap();
    let host = setup(&standin, &edge)
        .config("{}")
        .env("HOME", home.path().to_str().unwrap())
        .env("A2MCP_TEST_PINS", pins.to_str().unwrap())
        .env("A2MCP_DOWNLOAD_BASE", &mirror.base())
        .before("PATH=/nonexistent")
        .start();
    let bridge = Bridge { host, standin, edge };
    let (code, tunnel) = bridge.open();
    assert_eq!((code, &tunnel["state"]), (1, &json!("failed")), "{tunnel}");
    let why = tunnel["why"].as_str().unwrap();
    assert!(why.contains("cannot download cloudflared-test") && why.contains("404"), "{why}");
    assert!(tunnel["advice"].is_null(), "the reason has its own");
    mirror.put("/some/2026.8.2/cloudflared-test", Serve::Bytes(program));
    bridge.opened();
    let installed = home.path().join(".local/share/a2mcp/bin/cloudflared");
    let about = bridge.tunnel()["program"].clone();
    assert_eq!(about, format!("{} (2026.8.2)", installed.display()));
    let records = bridge.host.audit();
    let records: Vec<(Value, Value)> = records
        .iter()
        .map(|record| {
            (record["tool"].clone(), serde_json::from_str(record["args"].as_str().unwrap()).unwrap())
        })
        .collect();
    let shown: Vec<(&str, &str, bool)> = records
        .iter()
        .map(|(tool, args)| {
            (tool.as_str().unwrap(), args["action"].as_str().unwrap(), args["error"].is_string())
        })
        .collect();
    let fetch = ("xfer", "install", false);
    let failed = [fetch, ("xfer", "install", true), ("tunnel", "start", true)];
    assert_eq!(shown, [&failed[..], &[fetch, ("tunnel", "start", false)]].concat());
    assert_eq!(records[0].1["sha256"], sha256);
    assert_eq!(bridge.host.cli(&["tunnel", "stop"]).0, 0);
    std::fs::remove_file(&installed).unwrap();
    let asked = mirror.asked().len();
    for _ in 0..2 {
        let (code, tunnel) = bridge.open();
        let why = tunnel["why"].as_str().unwrap();
        assert!(code == 1 && why.contains("binary vanished") && why.contains(&sha256), "{tunnel}");
    }
    assert_eq!(mirror.asked().len(), asked, "nothing is fetched again");
}
