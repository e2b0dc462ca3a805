//! Who dies with whom: however the host ends, nothing of the bridge outlives it, and every call that
//! was started is accounted for.

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::omp::{Home, Omp};
use crate::support::http::{Client, Connection};

/// Ends a host with a call in flight; what the audit says of that call.
fn end_with_a_call_in_flight(omp: &Omp, end: impl Fn(&Omp)) -> Value {
    let mut client = omp.client();
    let never = omp.home.path().join("never");
    client.start_call("1", "probe_wait", &json!({ "file": never }).to_string());
    omp.line("the call did not reach the host", |line| {
        line["type"] == "tool_execution_start" && line["toolName"] == "probe_wait"
    });

    end(omp);
    omp.assert_all_gone();
    assert!(Connection::try_open(omp.port).is_err(), "somebody still listens");
    omp.home.assert_every_call_has_its_end();
    let audit = omp.home.audit();
    let ends: Vec<_> =
        audit.iter().filter(|it| it["phase"] == "done" && it["tool"] == "probe_wait").collect();
    assert_eq!(ends.len(), 1, "{audit:#?}");
    assert_eq!(ends[0]["isError"], true, "{}", ends[0]);
    ends[0].clone()
}

#[test]
fn a_killed_host_takes_everything_with_it() {
    let omp = Omp::start();
    let end = end_with_a_call_in_flight(&omp, |omp| omp.kill(Signal::KILL));
    assert_eq!(end["outcome"], "unknown", "{end}");
}

#[test]
fn a_terminated_host_takes_everything_with_it() {
    let omp = Omp::start();
    let end = end_with_a_call_in_flight(&omp, |omp| omp.kill(Signal::TERM));
    assert!(end["outcome"] == "unknown" || end["outcome"] == "cancelled", "{end}");
}

/// The end of omp's stdin is its orderly end. The URL that was handed out works again when omp comes
/// back in the same directory, with the sessions that were there.
#[test]
fn an_orderly_end_takes_everything_with_it_and_the_url_comes_back() {
    let omp = Omp::start();
    let before: Client = omp.client();
    let end = end_with_a_call_in_flight(&omp, Omp::close_stdin);
    assert!(end["outcome"] == "unknown" || end["outcome"] == "cancelled", "{end}");
    assert!(omp.wait().success());

    let again = Omp::setup(omp.home.clone()).bridged();
    assert_eq!(again.port, omp.port, "the URL is another one");
    assert_eq!(again.home.token(), before.token);
    assert_eq!(before.again().call_text("probe_odd", r#"{"a":"b"}"#), r#"{"a":"b"}"#);
    drop(omp);
}

/// The end of omp before it has come up: the sidecar starts with the extension, a second earlier than
/// the session.
#[test]
fn a_host_that_ends_while_it_starts_leaves_nothing() {
    let home = Home::with_shim();
    // A provider of the placeholder's name, and without a model: the operator's own affair.
    home.models("providers:\n  a2mcp:\n    baseUrl: http://a2mcp.invalid/v1\n");
    let mut command = home.command(crate::parts::installed("omp/node_modules/.bin/omp"));
    command.args(["--mode", "rpc"]);
    // Without a model omp says so and ends: after it has loaded its extensions.
    let output = crate::omp::run(command, Vec::new());
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let left = crate::processes::until_gone(home.path());
    assert!(left.is_ok(), "{left:#?}");
}
