//! Real clients, against a live omp and against `a2mcp demo`: the public SDKs in their default modes
//! (`tests/clients`), `a2mcp tools` and `call`, and the script that `a2mcp connect python` prints.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Once, OnceLock};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::omp::{Home, run, shared};
use crate::processes;
use crate::serves::PNG;
use crate::support::{self, http};

/// The versions of the protocol that the endpoint speaks.
const VERSIONS: [&str; 4] = ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"];

/// What to connect to, and what it is known to answer.
struct Bridge<'a> {
    home: &'a Home,
    port: u16,
    token: String,
    cases: Vec<Case>,
    /// A tool that gives its arguments back.
    echo: &'static str,
    /// A call that lasts until its client gives up.
    endless: Value,
}

/// A call and its answer.
struct Case {
    call: Value,
    is_error: bool,
    /// In the text of some block; an image is asked for by `image/`.
    contains: &'static str,
}

fn case(tool: &str, arguments: Value, is_error: bool, contains: &'static str) -> Case {
    Case { call: json!({"name": tool, "arguments": arguments}), is_error, contains }
}

impl Bridge<'_> {
    fn url(&self) -> String {
        format!("http://127.0.0.1:{}/mcp", self.port)
    }

    /// The names as a client without any SDK sees them.
    fn names(&self) -> Value {
        let list = http::Client::initialize(self.port, &self.token).rpc("tools/list", "{}");
        list["result"]["tools"].as_array().unwrap().iter().map(|tool| tool["name"].clone()).collect()
    }

    /// A program with the address and the token in its environment.
    fn program(&self, mut command: Command, arguments: &[&str], stdin: &str) -> Output {
        command.args(arguments).env("A2MCP_URL", self.url()).env("A2MCP_TOKEN", &self.token);
        run(command, stdin.into())
    }
}

fn omp() -> Bridge<'static> {
    let omp = shared();
    let work = omp.home.work();
    // Once: other tests of this file read them meanwhile.
    static FILES: Once = Once::new();
    FILES.call_once(|| {
        std::fs::write(work.join("client.txt"), "for the clients\n").unwrap();
        std::fs::write(work.join("client.png"), STANDARD.decode(PNG).unwrap()).unwrap();
    });
    Bridge {
        home: &omp.home,
        port: omp.port,
        token: omp.home.token(),
        echo: "probe_odd",
        endless: json!({"name": "probe_wait", "arguments": {"file": work.join("never")}}),
        cases: vec![
            case(
                "probe_odd",
                json!({"a": "\u{4f60}\u{597d} \u{1f600}"}),
                false,
                "\u{4f60}\u{597d} \u{1f600}",
            ),
            case("read", json!({"path": "client.txt"}), false, "for the clients"),
            case("read", json!({"path": "client.png"}), false, "image/"),
            case("bash", json!({"command": "echo to-stdout; exit 3"}), true, "code 3"),
            // Longer than the endpoint waits before it answers with a stream.
            case("bash", json!({"command": "sleep 1.5; echo slept"}), false, "slept"),
            case("probe_throw", json!({}), true, "the probe threw"),
            case("no_such_tool", json!({}), true, "not exposed"),
        ],
    }
}

fn demo() -> Bridge<'static> {
    let demo = Demo::shared();
    Bridge {
        home: &demo.home,
        port: demo.port,
        token: demo.token.clone(),
        echo: "echo",
        endless: json!({"name": "sleep", "arguments": {"seconds": 3600}}),
        cases: vec![
            case("echo", json!({"a": "\u{4f60}\u{597d} \u{1f600}"}), false, "\u{4f60}\u{597d} \u{1f600}"),
            case("bash", json!({"command": "echo to-stdout"}), false, "to-stdout"),
            case("bash", json!({"command": "exit 3"}), true, "3"),
            case("image", json!({}), false, "image/png"),
            case("sleep", json!({"ms": 1500, "steps": 3}), false, ""),
            case("fail", json!({"message": "as told"}), true, "as told"),
            case("no_such_tool", json!({}), true, "not exposed"),
        ],
    }
}

/// `a2mcp demo --json`, one for all tests; it ends with the test binary.
struct Demo {
    home: Home,
    child: Child,
    port: u16,
    token: String,
}

impl Demo {
    fn shared() -> &'static Demo {
        static SHARED: OnceLock<Demo> = OnceLock::new();
        SHARED.get_or_init(|| {
            let demo = Self::start();
            // It is interrupted as a person would do it when the test binary is gone.
            let mut watcher = Command::new("/bin/sh");
            watcher.args(["-c", r#"cat; kill -INT "$1"; rm -rf "$2""#, "sh", &demo.child.id().to_string()]);
            watcher.arg(demo.home.path()).stdin(Stdio::piped());
            std::os::unix::process::CommandExt::process_group(&mut watcher, 0);
            std::mem::forget(watcher.spawn().expect("sh can be started"));
            demo
        })
    }

    fn start() -> Self {
        let home = Home::bare();
        let mut command = home.command(support::binary());
        let mut child = command.args(["demo", "--json"]).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let said: Value = serde_json::from_str(&line).unwrap_or_else(|_| panic!("the demo said {line:?}"));
        let url = said["url"].as_str().unwrap();
        let port = url.trim_start_matches("http://127.0.0.1:").split('/').next().unwrap().parse().unwrap();
        Self { home, child, port, token: said["token"].as_str().unwrap().to_owned() }
    }
}

/// How to start the program of one SDK.
fn sdk(bridge: &Bridge<'_>, name: &str) -> Command {
    let of = |path: &str| crate::parts::root().join("tests/clients").join(path);
    let (program, script): (PathBuf, Option<PathBuf>) = match name {
        "ts-sdk-v1" | "ts-sdk-v2" => (crate::parts::program("node"), Some(of(&format!("{name}/client.mjs")))),
        "rmcp" => (crate::parts::installed("rmcp/debug/rmcp-client"), None),
        python => (
            crate::parts::installed(&format!("{python}/bin/python")),
            Some(of(&format!("{python}/client.py"))),
        ),
    };
    let mut command = bridge.home.command(program);
    command.args(script);
    command
}

/// Runs one scenario; what the program found.
fn scenario(bridge: &Bridge<'_>, name: &str, scenario: &str, parameters: &Value) -> Value {
    let output = bridge.program(sdk(bridge, name), &[scenario, "-"], &parameters.to_string());
    assert!(output.status.success(), "{name} {scenario}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{name} {scenario}: {output:?}"))
}

/// Everything a client does in a life: lists, calls of every kind, ping, the end; then many calls at
/// once.
fn check_sdk(bridge: &Bridge<'_>, name: &str) {
    let calls: Vec<_> = bridge.cases.iter().map(|case| case.call.clone()).collect();
    let found = scenario(bridge, name, "basics", &json!({ "calls": calls }));
    assert_eq!(found["serverInfo"]["name"], "a2mcp", "{name}: {found}");
    let version = found["protocolVersion"].as_str().unwrap_or_default();
    assert!(VERSIONS.contains(&version), "{name}: {version:?}");
    assert_eq!(found["ping"], true, "{name}");
    assert_eq!(found["tools"], bridge.names(), "{name}");
    let results = found["results"].as_array().unwrap();
    assert_eq!(results.len(), bridge.cases.len(), "{name}: {found}");
    for (result, case) in results.iter().zip(&bridge.cases) {
        assert_eq!(result["isError"], case.is_error, "{name}: {} -> {result}", case.call);
        assert!(result["content"].to_string().contains(case.contains), "{name}: {} -> {result}", case.call);
    }
    if let Some(http) = found["http"].as_array() {
        let passed = |what: &str| http.iter().filter(|line| *line == what).count();
        assert_eq!(passed("POST tools/call 200"), calls.len(), "{name}: {http:?}");
        assert_eq!(passed("POST initialize 200"), 1, "{name}: {http:?}");
        assert_eq!(passed("DELETE 204"), 1, "{name}: {http:?}");
    }

    let calls: Vec<_> = (0..32)
        .map(|index| json!({"name": bridge.echo, "arguments": {"a": format!("answer-{index}-")}}))
        .collect();
    let found = scenario(bridge, name, "parallel", &json!({ "calls": calls }));
    let results = found["results"].as_array().unwrap();
    assert_eq!(results.len(), calls.len());
    for (index, result) in results.iter().enumerate() {
        assert!(result.to_string().contains(&format!("answer-{index}-")), "{name}: {index}: {result}");
    }
}

#[test]
fn ts_sdk_v1_with_omp() {
    check_sdk(&omp(), "ts-sdk-v1");
}

#[test]
fn ts_sdk_v1_with_the_demo() {
    check_sdk(&demo(), "ts-sdk-v1");
}

#[test]
fn ts_sdk_v2_with_omp() {
    check_sdk(&omp(), "ts-sdk-v2");
}

#[test]
fn ts_sdk_v2_with_the_demo() {
    check_sdk(&demo(), "ts-sdk-v2");
}

/// It probes `server/discover` first, which nobody here knows.
#[test]
fn py_2_with_omp() {
    check_sdk(&omp(), "py-2");
}

#[test]
fn py_2_with_the_demo() {
    check_sdk(&demo(), "py-2");
}

#[test]
fn py_1_with_omp() {
    check_sdk(&omp(), "py-1");
}

#[test]
fn py_1_with_the_demo() {
    check_sdk(&demo(), "py-1");
}

#[test]
fn rmcp_with_omp() {
    check_sdk(&omp(), "rmcp");
}

#[test]
fn rmcp_with_the_demo() {
    check_sdk(&demo(), "rmcp");
}

/// The two clients of our own share their verbs, options and exit codes.
fn check_own(
    bridge: &Bridge<'_>,
    client: impl Fn() -> Command,
    list: &str,
    with_file: impl Fn(&str, &Path) -> Vec<String>,
) {
    let token = bridge.home.path().join(format!("token-{list}"));
    let wrong = bridge.home.path().join(format!("wrong-{list}"));
    std::fs::write(&token, &bridge.token).unwrap();
    std::fs::write(&wrong, "wrong".repeat(10)).unwrap();
    let at = |url: &str, file: &Path, arguments: &[&str], stdin: &str| {
        let mut command = client();
        let named = with_file(url, file);
        // Its options stand before the verb of one and behind the verb of the other.
        if list == "list" {
            command.args(named).args(arguments)
        } else {
            command.args(arguments).args(named)
        };
        run(command, stdin.into())
    };
    let ask = |arguments: &[&str], stdin: &str| at(&bridge.url(), &token, arguments, stdin);
    let out = |output: &Output| String::from_utf8_lossy(&output.stdout).into_owned();

    let output = ask(&[list], "");
    assert!(output.status.success(), "{output:?}");
    let listed = out(&output);
    for name in bridge.names().as_array().unwrap() {
        assert!(listed.lines().any(|line| line.starts_with(name.as_str().unwrap())), "no {name} in {listed}");
    }
    let images = bridge.home.path().join(format!("images-{list}"));
    for case in &bridge.cases {
        let tool = case.call["name"].as_str().unwrap();
        let arguments = case.call["arguments"].to_string();
        let output = ask(&["call", tool, "-", "--out", images.to_str().unwrap()], &arguments);
        assert_eq!(output.status.code(), Some(i32::from(case.is_error)), "{}: {output:?}", case.call);
        assert!(out(&output).contains(case.contains), "{}: {output:?}", case.call);
        assert!(!format!("{output:?}").contains(&bridge.token), "the token was shown");
    }
    let saved: Vec<_> = std::fs::read_dir(&images).unwrap().flatten().collect();
    assert_eq!(saved.len(), 1, "{saved:?}");
    assert!(saved[0].metadata().unwrap().len() > 50);

    // The exit codes say what went wrong.
    let code = |output: Output| output.status.code();
    assert_eq!(code(ask(&["call", bridge.echo, "{no json"], "")), Some(2));
    assert_eq!(code(at(&bridge.url(), &wrong, &["call", bridge.echo], "")), Some(4));
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    assert_eq!(code(at(&format!("http://{closed}/mcp"), &token, &["call", bridge.echo], "")), Some(3));
    let mut endless = client();
    let named = with_file(&bridge.url(), &token);
    let tool = bridge.endless["name"].as_str().unwrap();
    let arguments = bridge.endless["arguments"].to_string();
    if list == "list" {
        endless.args(named).args(["--timeout", "1", "call", tool, &arguments]);
    } else {
        endless.args(["call", tool, &arguments, "--timeout", "1"]).args(named);
    }
    assert_eq!(code(run(endless, Vec::new())), Some(5));
}

fn check_cli(bridge: &Bridge<'_>) {
    let named = |url: &str, file: &Path| {
        ["--url", url, "--token-file", file.to_str().unwrap()].map(str::to_owned).to_vec()
    };
    check_own(bridge, || bridge.home.command(support::binary()), "tools", named);
}

fn check_python(bridge: &Bridge<'_>) {
    let mut command = bridge.home.command(support::binary());
    command.args(["connect", "python", "--url", &bridge.url()]);
    let printed = run(command, Vec::new());
    assert!(printed.status.success(), "{printed:?}");
    let script = bridge.home.path().join("call.py");
    std::fs::write(&script, &printed.stdout).unwrap();
    let python = crate::parts::program("python3");
    let named = |url: &str, file: &Path| {
        ["--url", url, "--token-file", file.to_str().unwrap()].map(str::to_owned).to_vec()
    };
    let client = || {
        let mut command = bridge.home.command(&python);
        command.arg(&script);
        command
    };
    check_own(bridge, client, "list", named);
}

#[test]
fn the_command_line_with_omp() {
    check_cli(&omp());
    // Without an address, the sidecar that runs here is meant.
    let output = shared().home.a2mcp(&["call", "read", r#"{"path":"client.txt"}"#]);
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("for the clients"), "{output:?}");
}

#[test]
fn the_command_line_with_the_demo() {
    check_cli(&demo());
}

#[test]
fn the_printed_script_with_omp() {
    check_python(&omp());
}

#[test]
fn the_printed_script_with_the_demo() {
    check_python(&demo());
}

/// The configuration for curl, run as it is printed.
#[test]
fn the_printed_curl_lines_with_omp() {
    crate::parts::program("curl");
    let omp = shared();
    std::fs::write(omp.home.work().join("README.md"), "read by curl\n").unwrap();
    let printed = omp.home.a2mcp(&["connect", "curl"]);
    assert!(printed.status.success(), "{printed:?}");
    let output = run(omp.home.command("/bin/sh"), printed.stdout);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("inputSchema") && said.contains("read by curl"),
        "{output:?}"
    );
}

/// ^C ends a demo, and nothing of it stays.
#[test]
fn an_interrupted_demo_leaves_nothing() {
    let mut demo = Demo::start();
    let text = http::Client::initialize(demo.port, &demo.token).call_text("echo", r#"{"a":1}"#);
    assert_eq!(text, r#"{"a":1}"#);
    processes::kill(demo.child.id(), Signal::INT);
    let status = support::eventually("the demo's end", || demo.child.try_wait().unwrap());
    assert!(status.success(), "{status}");
    let left = processes::until_gone(demo.home.path());
    assert!(left.is_ok(), "{left:#?}");
}
