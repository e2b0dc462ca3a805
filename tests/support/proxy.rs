//! A loopback proxy that adds the token, for programs that cannot send one. Everything else passes as
//! it is, hostile `Host` and `Origin` headers too. One request per connection.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};

/// Starts it in front of `port`; its own port. It ends with the test process.
pub fn start(port: u16, token: &str) -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let own = listener.local_addr().unwrap().port();
    let token = token.to_owned();
    std::thread::spawn(move || {
        for caller in listener.incoming().flatten() {
            let token = token.clone();
            std::thread::spawn(move || relay(caller, port, &token));
        }
    });
    own
}

fn relay(mut caller: TcpStream, port: u16, token: &str) -> Option<()> {
    let mut head = Vec::new();
    let end = loop {
        let mut piece = [0; 8192];
        let read = caller.read(&mut piece).ok().filter(|read| *read > 0)?;
        head.extend_from_slice(&piece[..read]);
        if let Some(end) = head.windows(4).position(|four| four == b"\r\n\r\n") {
            break end + 2;
        }
    };
    let body = head.split_off(end);
    let head = String::from_utf8_lossy(&head).into_owned();
    let kept: Vec<&str> = head
        .split_inclusive("\r\n")
        .filter(|line| !line.to_ascii_lowercase().starts_with("connection:"))
        .collect();
    let head = format!("{}Authorization: Bearer {token}\r\nConnection: close\r\n", kept.concat());
    let mut server = TcpStream::connect(("127.0.0.1", port)).ok()?;
    server.set_nodelay(true).ok()?;
    caller.set_nodelay(true).ok()?;
    server.write_all(head.as_bytes()).ok()?;
    server.write_all(&body).ok()?;
    let (mut from, mut to) = (caller.try_clone().ok()?, server.try_clone().ok()?);
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut from, &mut to);
        // The caller went away, or has sent everything: the server hears of it.
        let _ = to.shutdown(Shutdown::Both);
    });
    let _ = std::io::copy(&mut server, &mut caller);
    let _ = caller.shutdown(Shutdown::Both);
    Some(())
}
