//! The stand-in for cloudflared against what was observed of the real program, one test per row. What
//! these rows say is what the tunnel's own tests (`tunnel`) rest on.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use serde_json::{Value, json};

use crate::support::cloudflared::Standin;
use crate::support::http::Connection;
use crate::support::{SOON, eventually};

const ARGS: [&str; 5] = ["tunnel", "--metrics", "127.0.0.1:0", "--protocol", "auto"];

/// The stand-in as a child of the test.
struct Run {
    standin: Standin,
    child: Child,
    lines: mpsc::Receiver<String>,
    seen: Vec<String>,
    metrics: Option<u16>,
}

impl Run {
    fn start(scenario: Value, args: &[&str]) -> Self {
        Self::start_in(Standin::with(scenario), args, &[])
    }

    fn start_in(standin: Standin, args: &[&str], env: &[(&str, &str)]) -> Self {
        let mut command = standin.command();
        command.args(args).envs(env.iter().copied()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let (said, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                let _ = said.send(line);
            }
        });
        Self { standin, child, lines, seen: Vec::new(), metrics: None }
    }

    /// In front of `port`, connected.
    fn connected(scenario: Value, port: u16, args: &[&str]) -> Self {
        let url = format!("http://127.0.0.1:{port}");
        let all: Vec<&str> = ARGS.into_iter().chain(["--url", &url]).chain(args.iter().copied()).collect();
        let mut run = Self::start(scenario, &all);
        run.line("Registered tunnel connection");
        run
    }

    /// The first line with `part` in it.
    fn line(&mut self, part: &str) -> String {
        if let Some(line) = self.seen.iter().find(|line| line.contains(part)) {
            return line.clone();
        }
        let end = Instant::now() + SOON;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let line =
                self.lines.recv_timeout(left).unwrap_or_else(|_| panic!("no {part:?} in {:#?}", self.seen));
            self.seen.push(line.clone());
            if line.contains(part) {
                return line;
            }
        }
    }

    fn metrics(&mut self) -> u16 {
        if self.metrics.is_none() {
            let line = self.line("Starting metrics server on");
            let port = line.split("127.0.0.1:").nth(1).unwrap().split('/').next().unwrap();
            self.metrics = Some(port.parse().unwrap());
        }
        self.metrics.unwrap()
    }

    fn ask(&mut self, path: &str) -> (u16, String) {
        let reply = Connection::open(self.metrics()).request("GET", path, &[], b"");
        (reply.status, reply.text())
    }

    fn signal(&self, signal: Signal) {
        rustix::process::kill_process(Pid::from_raw(self.child.id().cast_signed()).unwrap(), signal).unwrap();
    }

    /// Its exit code (or the negative signal), its last line of stderr, its stdout.
    fn end(&mut self) -> (i32, String, String) {
        let status = eventually("its end", || self.child.try_wait().unwrap());
        self.seen.extend(self.lines.iter());
        let mut stdout = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut stdout).unwrap();
        let code = status.code().unwrap_or_else(|| -status.signal().unwrap());
        (code, self.seen.last().cloned().unwrap_or_default(), stdout)
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An origin that answers every connection by `answer`; what it was sent is told.
fn origin(answer: impl Fn(&mut TcpStream, &str) + Send + 'static) -> (u16, mpsc::Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (told, heads) = mpsc::channel();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut head = Vec::new();
            let mut byte = [0];
            while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|read| read > 0) {
                head.push(byte[0]);
            }
            let head = String::from_utf8_lossy(&head).into_owned();
            let _ = told.send(head.clone());
            answer(&mut stream, &head);
        }
    });
    (port, heads)
}

fn ok(stream: &mut TcpStream, _: &str) {
    let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
}

// ── usage, environment, config ──────────────────────────────────────────────────────────────────

#[test]
fn an_unknown_flag_is_usage_on_stdout_and_exit_code_0() {
    let mut run = Run::start(json!({}), &["tunnel", "--nonsense", "x"]);
    let (code, err, out) = run.end();
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(out.starts_with("Incorrect Usage. flag provided but not defined: -nonsense\n"), "{out}");
}

#[test]
fn a_flag_newer_than_the_version_is_unknown() {
    let (code, _, out) = Run::start(json!({"version": "2025.5.0"}), &["tunnel", "--output", "json"]).end();
    assert!(code == 0 && out.contains("not defined: -output"), "{code} {out}");
    let (code, _, out) = Run::start(json!({"version": "2025.5.0"}), &["--version"]).end();
    assert!(code == 0 && out.starts_with("cloudflared version 2025.5.0 (built "), "{out}");
}

#[test]
fn a_bad_boolean_in_the_environment_is_usage_and_exit_code_0() {
    let (code, _, out) = Run::start_in(Standin::new(), &ARGS, &[("NO_AUTOUPDATE", "x")]).end();
    assert!(code == 0 && out.starts_with("Incorrect Usage."), "{code} {out}");
}

#[test]
fn tunnel_variables_act() {
    let (code, ..) = Run::start_in(Standin::new(), &ARGS, &[("TUNNEL_NAME", "mine")]).end();
    assert_eq!(code, 1);
    let (code, ..) = Run::start_in(Standin::new(), &ARGS, &[("TUNNEL_GRACE_PERIOD", "10m")]).end();
    assert_eq!(code, 1);
}

#[test]
fn a_config_file_in_the_home_acts_unless_another_is_named() {
    for (text, code) in [("name: x\n", 1), ("a: [b\n", 1)] {
        let standin = Standin::new();
        std::fs::create_dir(standin.dir.path().join(".cloudflared")).unwrap();
        std::fs::write(standin.dir.path().join(".cloudflared/config.yml"), text).unwrap();
        assert_eq!(Run::start_in(standin, &ARGS, &[]).end().0, code, "{text}");
    }
    let standin = Standin::new();
    std::fs::create_dir(standin.dir.path().join(".cloudflared")).unwrap();
    let rules = "ingress:\n  - service: http_status:418\n";
    std::fs::write(standin.dir.path().join(".cloudflared/config.yml"), rules).unwrap();
    let (port, _) = origin(ok);
    let url = format!("http://127.0.0.1:{port}");
    let mut args = vec!["tunnel", "--metrics", "127.0.0.1:0", "--url", &url];
    let mut run = Run::start_in(standin, &args, &[]);
    run.line("Registered");
    assert_eq!(run.ask("/ready").0, 200, "it looks fine");
    assert_eq!(run.standin.public().request("GET", "/", &[], b"").status, 418, "and serves the user's rules");
    let own = run.standin.dir.path().join("own.yml");
    std::fs::write(&own, "{}").unwrap();
    let own = own.display().to_string();
    args.extend(["--config", &own]);
    run.child.kill().unwrap();
    run.child.wait().unwrap();
    let standin = std::mem::replace(&mut run.standin, Standin::new());
    let mut run = Run::start_in(standin, &args, &[]);
    run.line("Registered");
    assert_eq!(run.standin.public().request("GET", "/", &[], b"").status, 200);
}

#[test]
fn a_named_config_must_exist_and_an_empty_one_is_said() {
    let (code, ..) = Run::start(json!({}), &["tunnel", "--config", "/nonexistent/x.yml"]).end();
    assert_eq!(code, 1);
    let mut run = Run::start(json!({}), &["tunnel", "--config", "/dev/null", "--url", "http://127.0.0.1:1"]);
    run.line("Configuration file /dev/null was empty");
    run.line("Registered");
}

// ── the name ────────────────────────────────────────────────────────────────────────────────────

#[test]
fn the_name_stands_in_a_box_on_stderr_before_anything_is_connected() {
    let mut run = Run::start(json!({"metricsDelay": 0.3, "connectDelay": 600}), &ARGS);
    let line = run.line(".trycloudflare.com  ");
    assert!(line.contains(" INF |  https://") && line.trim_end().ends_with('|'), "{line}");
    assert!(run.standin.names().is_empty());
    assert!(!run.seen.iter().any(|line| line.contains("metrics server")), "that port opens later");
    let name = line.split("https://").nth(1).unwrap().split(' ').next().unwrap().to_owned();
    assert_eq!(run.ask("/quicktunnel"), (200, json!({ "hostname": name }).to_string()));
    assert_eq!(run.ask("/ready").0, 503);
}

#[test]
fn every_start_gets_another_name() {
    let (first, second) = (Run::connected(json!({}), 1, &[]), Run::connected(json!({}), 1, &[]));
    assert_ne!(first.standin.name().0, second.standin.name().0);
}

#[test]
fn a_nameless_tunnel_is_up_all_the_same() {
    let mut run = Run::connected(json!({"service": "nameless"}), 1, &[]);
    assert_eq!(run.ask("/quicktunnel").1, r#"{"hostname":""}"#);
    assert_eq!(run.ask("/ready").0, 200);
}

#[test]
fn the_log_is_json_when_asked_for() {
    let mut run = Run::connected(json!({}), 1, &["--output", "json"]);
    let line: Value = serde_json::from_str(&run.line("Registered")).unwrap();
    assert_eq!((&line["level"], &line["protocol"]), (&json!("info"), &json!("quic")));
    assert_eq!(line["message"], "Registered tunnel connection");
}

#[test]
fn each_failure_of_the_quick_service_has_its_last_words() {
    for (service, words) in [
        ("429", "failed to unmarshal quick Tunnel: invalid character 'e' looking for beginning of value"),
        ("html", "failed to unmarshal quick Tunnel: invalid character '<' looking for beginning of value"),
        ("html200", "failed to unmarshal quick Tunnel: invalid character '<' looking for beginning of value"),
        ("errors", "failed to parse quick Tunnel ID: invalid UUID length: 0"),
        ("reset", r#"failed to request quick Tunnel: Post "https://api.trycloudflare.com/tunnel": EOF"#),
        ("refused", "connect: connection refused"),
        ("nxdomain", "no such host"),
        ("silent", "net/http: timeout awaiting response headers"),
    ] {
        let mut run = Run::start(json!({"service": service, "serviceTimeout": 0.1}), &ARGS);
        let (code, last, _) = run.end();
        assert_eq!(code, 1, "{service}");
        assert!(last.ends_with(words), "{service}: {last}");
        let status = run.seen.iter().any(|line| line.contains("429 Too Many Requests"));
        assert_eq!(status, service == "429");
    }
    let (_, last, _) = Run::start(json!({"service": "429"}), &["tunnel", "--output", "json"]).end();
    assert!(last.starts_with("failed to unmarshal"), "the last line is plain text also then: {last}");
}

// ── metrics, connection ─────────────────────────────────────────────────────────────────────────

#[test]
fn a_taken_metrics_port_ends_it_after_the_name_was_consumed() {
    let mut run = Run::start(json!({"metricsTaken": true}), &ARGS);
    let (code, last, _) = run.end();
    assert!(code == 1 && last.contains("address already in use"), "{last}");
    assert!(run.seen.iter().any(|line| line.contains(".trycloudflare.com  ")));
}

#[test]
fn the_metrics_port_tells_what_it_tells() {
    let mut run = Run::connected(json!({}), 1, &[]);
    let ready: Value = serde_json::from_str(&run.ask("/ready").1).unwrap();
    assert_eq!((&ready["status"], &ready["readyConnections"]), (&json!(200), &json!(1)));
    assert!(ready["connectorId"].as_str().unwrap().len() == 36);
    assert_eq!(run.ask("/healthcheck"), (200, "OK\n".into()));
    assert!(run.ask("/metrics").1.contains("cloudflared_tunnel_total_requests 0"));
    assert_eq!(run.ask("/nothing").0, 404);
}

#[test]
fn an_edge_that_refuses_or_does_not_know_it_is_tried_for_ever() {
    for (edge, words) in
        [("refuses", "connection refused"), ("unauthorized", "Unauthorized: Invalid tunnel secret")]
    {
        let mut run = Run::start(json!({"edge": edge, "retryPause": 0.05}), &ARGS);
        run.line(words);
        assert_eq!(run.ask("/ready").0, 503);
        run.standin.scenario(json!({}));
        run.line("Registered");
        assert_eq!(run.ask("/ready").0, 200, "it connects by itself later");
    }
}

#[test]
fn an_edge_that_closes_or_fails_before_the_first_success_ends_it() {
    for (edge, words) in
        [("hangs", "connection with edge closed"), ("error", "initial tunnel connection failed")]
    {
        let (code, last, _) = Run::start(json!({"edge": edge, "edgePatience": 0.1}), &ARGS).end();
        assert!(code == 1 && last.contains(words), "{edge}: {last}");
    }
}

#[test]
fn a_drop_shows_at_once_and_the_name_comes_back() {
    let mut run = Run::connected(json!({"retryPause": 0.05}), 1, &[]);
    let name = run.standin.name();
    run.standin.scenario(json!({"edge": "dropped", "retryPause": 0.05}));
    run.line("Connection terminated");
    eventually("503", || (run.ask("/ready").0 == 503).then_some(()));
    run.standin.scenario(json!({}));
    eventually("200", || (run.ask("/ready").0 == 200).then_some(()));
    assert_eq!(run.standin.name(), name);
}

#[test]
fn a_tunnel_deleted_on_the_other_side_is_tried_for_ever() {
    let mut run = Run::connected(json!({}), 1, &[]);
    run.standin.scenario(json!({"edge": "deleted", "retryPause": 0.02}));
    let line = run.line("Unauthorized: Tunnel not found");
    assert!(line.contains("Register tunnel error from server side"), "{line}");
    run.metrics();
    for _ in 0..3 {
        run.seen.clear();
        run.line("Unauthorized: Tunnel not found");
    }
    assert_eq!(run.ask("/ready").0, 503);
    assert!(run.child.try_wait().unwrap().is_none());
}

#[test]
fn a_silent_loss_leaves_it_ready() {
    let (port, heads) = origin(ok);
    let mut run = Run::connected(json!({}), port, &[]);
    run.standin.scenario(json!({"edge": "silent", "firstByte": 0.1}));
    let mut caller = run.standin.public();
    caller.send("GET", "/", &[], b"").unwrap();
    assert!(caller.is_closed());
    assert!(heads.try_recv().is_err());
    assert_eq!(run.ask("/ready").0, 200);
}

#[test]
fn blocked_udp_falls_back_with_auto_and_never_without() {
    let weather = json!({"udpBlocked": true, "fallbackAfter": 0.2, "retryPause": 0.05});
    let mut run = Run::start(weather.clone(), &ARGS);
    run.line("Failed to dial a quic connection");
    run.line("Switching to fallback protocol http2");
    assert!(run.line("Registered").contains("protocol=http2"));
    let mut run = Run::start(weather, &["tunnel", "--metrics", "127.0.0.1:0"]);
    run.metrics();
    for _ in 0..8 {
        run.seen.clear();
        run.line("Failed to dial a quic connection");
    }
    assert_eq!(run.ask("/ready").0, 503);
}

// ── the end ─────────────────────────────────────────────────────────────────────────────────────

#[test]
fn sigterm_before_the_quick_service_answered_kills_it() {
    let mut run = Run::start(json!({"serviceDelay": 600}), &ARGS);
    run.line("Requesting new quick Tunnel");
    run.signal(Signal::TERM);
    assert_eq!(run.end().0, -15);
}

#[test]
fn sigterm_while_idle_ends_it_with_0_soon() {
    let mut run = Run::connected(json!({}), 1, &[]);
    let began = Instant::now();
    run.signal(Signal::TERM);
    assert_eq!(run.end().0, 0);
    assert!(began.elapsed() >= Duration::from_millis(400) && began.elapsed() < Duration::from_secs(5));
    assert!(run.standin.names().is_empty());
}

#[test]
fn an_edge_that_lingers_or_a_backoff_costs_the_whole_grace_period() {
    for (at_start, later) in [
        (json!({"edgeLingers": true}), json!({"edgeLingers": true})),
        (json!({}), json!({"edge": "dropped", "retryPause": 600})),
    ] {
        let mut run = Run::connected(at_start, 1, &["--grace-period", "1s"]);
        run.standin.scenario(later.clone());
        if later["edge"] == "dropped" {
            run.line("Connection terminated");
        }
        let began = Instant::now();
        run.signal(Signal::TERM);
        assert_eq!(run.end().0, 0);
        assert!(began.elapsed() >= Duration::from_millis(950), "{:?}", began.elapsed());
    }
}

#[test]
fn sigterm_while_first_connecting_ends_it_at_once_and_a_second_one_kills() {
    let mut run = Run::start(json!({"connectDelay": 600}), &ARGS);
    run.metrics();
    eventually("its handler", || {
        run.signal(Signal::TERM);
        run.child.try_wait().unwrap()
    });
    let mut run = Run::connected(json!({"edgeLingers": true}), 1, &[]);
    run.signal(Signal::TERM);
    run.line("graceful shutdown");
    run.signal(Signal::TERM);
    assert_eq!(run.end().0, -15);
}

#[test]
fn sighup_kills_it() {
    let mut run = Run::connected(json!({}), 1, &[]);
    run.signal(Signal::HUP);
    assert_eq!(run.end().0, -1);
}

#[test]
fn a_request_in_flight_is_waited_for_and_cut_after_the_grace_period() {
    let (port, heads) = origin(|stream, _| {
        let _ = stream.read(&mut [0; 1]);
    });
    let mut run = Run::connected(json!({}), port, &["--grace-period", "1s"]);
    let mut caller = run.standin.public();
    caller.send("GET", "/", &[], b"").unwrap();
    heads.recv_timeout(SOON).unwrap();
    run.signal(Signal::TERM);
    assert_eq!(caller.read_head().unwrap().status, 502);
    assert_eq!(run.end().0, 0);
}

// ── requests ────────────────────────────────────────────────────────────────────────────────────

#[test]
fn a_request_reaches_the_origin_with_the_public_name_and_the_edges_headers() {
    let (port, heads) = origin(ok);
    let run = Run::connected(json!({}), port, &[]);
    let (name, public) = run.standin.name();
    let reply =
        Connection::open(public).request("GET", "/a?b=c", &[("Host", "whatever"), ("X-Own", "1")], b"");
    assert_eq!((reply.status, reply.text().as_str()), (200, "ok"));
    let head = heads.recv_timeout(SOON).unwrap();
    assert!(head.starts_with("GET /a?b=c HTTP/1.1\r\n"), "{head}");
    for line in [
        format!("Host: {name}"),
        "Cf-Connecting-Ip: 203.0.113.9".into(),
        "X-Forwarded-For: 203.0.113.9".into(),
        "X-Forwarded-Proto: https".into(),
        "Connection: keep-alive".into(),
        "X-Own: 1".into(),
    ] {
        assert!(head.contains(&format!("{line}\r\n")), "{line} is not in {head}");
    }
    assert!(head.contains("Cf-Ray: ") && head.contains("Cf-Warp-Tag-Id: ") && !head.contains("whatever"));
}

#[test]
fn a_dead_origin_is_its_502_and_it_stays_ready() {
    let mut run = Run::connected(json!({}), 1, &[]);
    assert_eq!(run.standin.public().request("GET", "/", &[], b"").status, 502);
    assert_eq!(run.ask("/ready").0, 200);
}

/// Sends a reply head, then a byte a piece when told to.
fn slow_origin(head: &'static str) -> (u16, mpsc::Sender<&'static str>, mpsc::Receiver<String>) {
    let (go, pieces) = mpsc::channel::<&'static str>();
    let (port, heads) = origin(move |stream, _| {
        let _ = stream.write_all(head.as_bytes());
        while let Ok(piece) = pieces.recv() {
            let _ = stream.write_all(piece.as_bytes());
        }
    });
    (port, go, heads)
}

#[test]
fn what_has_no_length_or_is_an_event_stream_is_flushed_at_once() {
    for head in [
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 1000\r\n\r\n",
    ] {
        let (port, go, _heads) = slow_origin(head);
        let run = Run::connected(json!({}), port, &[]);
        let mut caller = run.standin.public();
        caller.send("POST", "/", &[], b"").unwrap();
        assert_eq!(caller.read_head().unwrap().status, 200);
        go.send("2\r\nhi\r\n").unwrap();
        assert_eq!(caller.read_exactly(7).unwrap(), b"2\r\nhi\r\n");
    }
}

#[test]
fn what_has_a_length_sits_in_a_buffer_of_4_kib() {
    let (port, go, _heads) = slow_origin("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n");
    let run = Run::connected(json!({}), port, &[]);
    let mut caller = run.standin.public();
    caller.send("GET", "/", &[], b"").unwrap();
    caller.read_head().unwrap();
    go.send("hi").unwrap();
    caller.socket().set_read_timeout(Some(Duration::from_millis(150))).unwrap();
    assert!(caller.read_exactly(2).is_err(), "nothing comes before the end");
    go.send("all").unwrap();
    caller.socket().set_read_timeout(Some(SOON)).unwrap();
    assert_eq!(caller.read_exactly(5).unwrap(), b"hiall");
}

#[test]
fn a_caller_that_leaves_ends_the_origins_request() {
    let (told, left) = mpsc::channel();
    let (port, heads) = origin(move |stream, _| {
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n:\n");
        let _ = told.send(stream.read(&mut [0; 1]).unwrap_or(0));
    });
    let run = Run::connected(json!({}), port, &[]);
    let mut caller = run.standin.public();
    caller.send("POST", "/", &[], b"").unwrap();
    heads.recv_timeout(SOON).unwrap();
    caller.read_head().unwrap();
    drop(caller);
    assert_eq!(left.recv_timeout(SOON).unwrap(), 0);
}

#[test]
fn uploads_pass_whole_chunked_or_not() {
    let (port, _heads) = origin(|stream, head| {
        let mut body = Vec::new();
        let mut piece = [0; 4096];
        let is_chunked = head.to_ascii_lowercase().contains("chunked");
        while body.len() < 300_000 && !(is_chunked && body.ends_with(b"0\r\n\r\n")) {
            let read = stream.read(&mut piece).unwrap();
            body.extend_from_slice(&piece[..read]);
        }
        let length = body.len().to_string();
        let _ = write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{length}", length.len());
    });
    let run = Run::connected(json!({}), port, &[]);
    let body = vec![b'x'; 300_000];
    assert_eq!(run.standin.public().request("POST", "/", &[], &body).text(), "300000");
    let chunked = [&b"186a0\r\n"[..], &body[..100_000], b"\r\n0\r\n\r\n"].concat();
    let reply = run.standin.public().request("POST", "/", &[("Transfer-Encoding", "chunked")], &chunked);
    assert_eq!(reply.text(), chunked.len().to_string());
}

#[test]
fn cloudflares_own_limits_can_be_switched_on() {
    let (port, go, heads) =
        slow_origin("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 2\r\n\r\n");
    let weather = json!({"sseGetHeld": true, "inFlight": 1, "maxUpload": 10});
    let run = Run::connected(weather, port, &[]);
    let mut held = run.standin.public();
    held.send("GET", "/", &[], b"").unwrap();
    heads.recv_timeout(SOON).unwrap();
    assert_eq!(run.standin.public().request("GET", "/", &[], b"").status, 429, "one too many");
    held.socket().set_read_timeout(Some(Duration::from_millis(150))).unwrap();
    assert!(held.read_head().is_err(), "a GET's stream is held back");
    held.socket().set_read_timeout(Some(SOON)).unwrap();
    go.send("hi").unwrap();
    assert_eq!(held.read().unwrap().text(), "hi");
    // The place is given back a moment after the answer is read.
    let status = eventually("the place", || {
        let status = run.standin.public().request("POST", "/", &[], b"more than ten").status;
        (status != 429).then_some(status)
    });
    assert_eq!(status, 413);
}

#[test]
fn it_survives_its_parent() {
    let standin = Standin::new();
    let log = standin.dir.path().join("log");
    let script = format!(
        "'{}' tunnel --metrics 127.0.0.1:0 2>'{}' </dev/null >/dev/null & echo $!",
        standin.program().display(),
        log.display()
    );
    let output = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
    let pid: i32 = String::from_utf8(output.stdout).unwrap().trim().parse().unwrap();
    standin.name();
    rustix::process::kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
}
