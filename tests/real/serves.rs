//! What a remote caller gets from a live omp session.

use serde_json::json;

use crate::omp::Omp;

#[test]
fn smoke() {
    let omp = Omp::start();
    println!("{:?}", omp.notices());
    let names = omp.probe(&json!({"op": "names"}));
    println!("{names}");
    let mut client = omp.client();
    let list = client.rpc("tools/list", "{}");
    for tool in list["result"]["tools"].as_array().unwrap() {
        println!("{} {}", tool["name"], tool["inputSchema"]["type"]);
        if tool["name"] == "probe_odd" {
            println!("{tool}");
        }
    }
    for (tool, args) in [
        ("probe_throw", "{}"),
        ("probe_throw_string", "{}"),
        ("probe_odd", r#"{"a":1}"#),
        ("probe_kinds", "{}"),
        ("bash", r#"{"command":"echo out; exit 3"}"#),
        ("bash", r#"{"command":"echo out"}"#),
        ("xd://bash", "{}"),
        ("read", r#"{"path":"nope.txt"}"#),
    ] {
        println!("{tool} {args} -> {}", client.call(tool, args));
    }
    println!("{:?}", omp.types("/a2mcp"));
    println!("{:?}", omp.types("/a2mcp token"));
    println!("{:?}", omp.types("/a2mcp gibberish"));
    println!("{:?}", omp.probe(&json!({"op": "register", "tool": "late"})));
    println!("{:?}", omp.probe(&json!({"op": "sub-agents", "count": 4, "shim": omp.home.agent("extensions/a2mcp/index.ts")})));
    println!("{:?}", omp.home.sidecars());
    println!("{:?}", omp.notices());
    println!("{:?}", omp.status());
}
