//! Complaint S1: what stands between a caller and the bridge may close what is silent, or hold the
//! replies of GETs back until they end.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::Duration;

use serde_json::json;

use crate::streams::{call_id, streaming};
use crate::support::Host;
use crate::support::http::{Client, INITIALIZE};
use crate::support::result_of;
use crate::support::sse::{Item, Stream};

#[derive(Clone, Copy)]
enum Nature {
    /// Closes a connection on which the server says nothing for so long.
    ClosesWhatIsSilentFor(Duration),
    /// Passes nothing of a GET's reply on before its end.
    HoldsGetsBack,
}

/// A proxy in front of `port`; its own port. It ends with the test process.
fn proxy(port: u16, nature: Nature) -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let own = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for caller in listener.incoming().flatten() {
            std::thread::spawn(move || pass(caller, port, nature));
        }
    });
    own
}

fn pass(mut caller: TcpStream, port: u16, nature: Nature) -> Option<()> {
    let mut server = TcpStream::connect(("127.0.0.1", port)).ok()?;
    server.set_nodelay(true).ok()?;
    caller.set_nodelay(true).ok()?;
    let mut first = [0; 4];
    caller.read_exact(&mut first).ok()?;
    server.write_all(&first).ok()?;
    let (mut from, mut to) = (caller.try_clone().ok()?, server.try_clone().ok()?);
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Both);
    });
    match nature {
        Nature::ClosesWhatIsSilentFor(limit) => {
            server.set_read_timeout(Some(limit)).ok()?;
            let _ = std::io::copy(&mut server, &mut caller);
        }
        Nature::HoldsGetsBack if &first == b"GET " => {
            let mut held = Vec::new();
            server.read_to_end(&mut held).ok()?;
            caller.write_all(&held).ok()?;
        }
        Nature::HoldsGetsBack => {
            let _ = std::io::copy(&mut server, &mut caller);
        }
    }
    let _ = caller.shutdown(Shutdown::Both);
    Some(())
}

fn client(host: &Host, nature: Nature) -> Client {
    Client::initialize_with(proxy(host.port, nature), &host.token, INITIALIZE)
}

/// So many comments: the stream was silent for so many times 14 s and lives.
fn outlives(stream: &mut Stream, comments: usize) {
    for _ in 0..comments {
        assert!(matches!(stream.next(), Some(Item::Comment(_))), "nothing but comments");
    }
}

/// In real time: twice as long as the proxy bears.
#[test]
fn silent_streams_stay_open_through_a_proxy_that_closes_what_is_silent() {
    let host = streaming().start();
    let client = client(&host, Nature::ClosesWhatIsSilentFor(Duration::from_secs(20)));
    let mut listening = client.listen();
    let mut call = client.ask_call("1", "hang", "{}", None).stream();
    call.priming();
    let frame = host.call_frame("hang");
    outlives(&mut call, 3);
    outlives(&mut listening, 3);
    host.answer(&frame, &result_of("late", false));
    assert_eq!(call.message().unwrap()["result"]["content"][0]["text"], "late");
    host.set_tools(r#"[{"name":"other"}]"#);
    assert_eq!(listening.message().unwrap()["method"], "notifications/tools/list_changed");
}

#[test]
fn everything_works_through_a_proxy_that_holds_gets_back() {
    let host = streaming().start();
    let mut client = client(&host, Nature::HoldsGetsBack);
    // Two server streams, of which this caller never sees a byte.
    let _unseen = [client.get(None), client.get(None)];
    let mut call = client.ask_call("1", "hang", "{}", Some("7")).stream();
    let frame = host.call_frame("hang");
    host.notify("notifications/progress", &json!({"progressToken": call_id(&frame), "progress": 1}));
    assert_eq!(call.notification("notifications/progress")["params"]["progressToken"], 7);
    host.set_tools(r#"[{"name":"other"},{"name":"hang"},{"name":"echo"}]"#);
    host.answer(&frame, &result_of("done", false));
    assert_eq!(call.message().unwrap()["result"]["content"][0]["text"], "done");
    crate::support::eventually("the new list", || {
        let list = client.rpc("tools/list", "{}");
        (list["result"]["tools"][0]["name"] == "other").then_some(())
    });
    let mut cancelled = client.ask_call("2", "hang", r#"{"n":2}"#, None).stream();
    host.call_with("n", 2);
    client.cancel("2");
    assert!(cancelled.rest().is_empty(), "it ends without a response");
    assert_eq!(client.rpc("ping", "{}")["result"], json!({}));
}
