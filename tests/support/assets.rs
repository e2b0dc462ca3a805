//! A server of release assets on loopback, well-behaved or not, plain or over TLS; and a proxy.

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

/// What the server does when it is asked for a path.
#[derive(Clone)]
pub enum Serve {
    /// These bytes, in order, with their length.
    Bytes(Vec<u8>),
    /// As [`Serve::Bytes`], once the gate is open; the head comes at once.
    Behind(Arc<Gate>, Vec<u8>),
    /// Only this much of the promised bytes, then the end.
    Part(Vec<u8>, usize),
    /// Only this much of the promised bytes, then nothing more.
    Stall(Vec<u8>, usize),
    /// One byte at a time, with this pause, for ever; no length is said.
    Drip(Duration),
    /// Zeros without an end; no length is said.
    Endless,
    /// No answer at all.
    Silence,
    /// No HTTP.
    Garbage,
    /// An empty answer of this status.
    Status(&'static str),
    /// A redirect.
    Redirect(String),
}

/// Closed until somebody opens it.
#[derive(Default)]
pub struct Gate {
    is_open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    pub fn open(&self) {
        *self.is_open.lock().unwrap() = true;
        self.opened.notify_all();
    }

    fn pass(&self) {
        let limit = Duration::from_secs(60);
        let is_open = self.is_open.lock().unwrap();
        let _ = self.opened.wait_timeout_while(is_open, limit, |is_open| !*is_open).unwrap();
    }
}

/// What a server needs to be `name`, and the certificate that trusts it, PEM.
pub fn certificate(name: &str) -> (Arc<rustls::ServerConfig>, String) {
    let rcgen::CertifiedKey { cert, signing_key } =
        rcgen::generate_simple_self_signed([name.to_owned()]).unwrap();
    let key = rustls::pki_types::PrivateKeyDer::try_from(signing_key.serialize_der()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![cert.der().clone()], key)
        .unwrap();
    let pem = base64_lines(cert.der());
    (Arc::new(config), format!("-----BEGIN CERTIFICATE-----\n{pem}-----END CERTIFICATE-----\n"))
}

/// The server. Its threads end with the test's process.
#[derive(Clone)]
pub struct Assets {
    pub port: u16,
    pages: Arc<Mutex<HashMap<String, Serve>>>,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Assets {
    pub fn start() -> Assets {
        Assets::with(|socket, assets| assets.answer(&socket, &socket))
    }

    /// The same over TLS, with a certificate for `127.0.0.1`; and the certificate, PEM.
    pub fn start_tls() -> (Assets, String) {
        let (config, pem) = certificate("127.0.0.1");
        let assets = Assets::with(move |socket, assets| {
            let session = rustls::ServerConnection::new(config.clone()).unwrap();
            let stream = Mutex::new(rustls::StreamOwned::new(session, socket));
            assets.answer(Shared(&stream), Shared(&stream));
            let mut stream = stream.into_inner().unwrap();
            stream.conn.send_close_notify();
            let _ = stream.flush();
        });
        (assets, pem)
    }

    fn with(serve: impl Fn(TcpStream, &Assets) + Send + Sync + 'static) -> Assets {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let assets = Assets { port, pages: Arc::default(), asked: Arc::default() };
        let (shared, serve) = (assets.clone(), Arc::new(serve));
        thread::spawn(move || {
            for socket in listener.incoming().flatten() {
                let (assets, serve) = (shared.clone(), serve.clone());
                thread::spawn(move || serve(socket, &assets));
            }
        });
        assets
    }

    /// What `path` (without its query) gives from now on.
    pub fn put(&self, path: &str, serve: Serve) -> &Assets {
        self.pages.lock().unwrap().insert(path.to_owned(), serve);
        self
    }

    pub fn base(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Everything asked for so far, queries included.
    pub fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }

    fn answer(&self, input: impl Read, mut output: impl Write) {
        let mut lines = BufReader::new(input).lines().map_while(Result::ok);
        let first = lines.next().unwrap_or_default();
        for line in lines.by_ref() {
            if line.is_empty() {
                break;
            }
        }
        let Some(path) = first.split(' ').nth(1) else { return };
        self.asked.lock().unwrap().push(path.to_owned());
        let page = self.pages.lock().unwrap().get(path.split('?').next().unwrap()).cloned();
        // The client may leave at any time.
        let _ = serve(page.unwrap_or(Serve::Status("404 Not Found")), &mut output);
    }
}

fn serve(page: Serve, output: &mut impl Write) -> std::io::Result<()> {
    let head = |length: usize| format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n");
    let unbounded = "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n";
    let mut write = |bytes: &[u8]| output.write_all(bytes).and_then(|()| output.flush());
    // Nobody asks for more than a minute of nothing.
    let forever = Duration::from_secs(60);
    match page {
        Serve::Bytes(bytes) => write(&[head(bytes.len()).as_bytes(), &bytes].concat()),
        Serve::Behind(gate, bytes) => {
            write(head(bytes.len()).as_bytes())?;
            gate.pass();
            write(&bytes)
        }
        Serve::Part(bytes, length) => write(&[head(bytes.len()).as_bytes(), &bytes[..length]].concat()),
        Serve::Stall(bytes, length) => {
            write(&[head(bytes.len()).as_bytes(), &bytes[..length]].concat())?;
            thread::sleep(forever);
            Ok(())
        }
        Serve::Drip(pause) => {
            write(unbounded.as_bytes())?;
            loop {
                write(b"x")?;
                thread::sleep(pause);
            }
        }
        Serve::Endless => {
            write(unbounded.as_bytes())?;
            loop {
                write(&[0; 65536])?;
            }
        }
        Serve::Silence => {
            thread::sleep(forever);
            Ok(())
        }
        Serve::Garbage => write(b"220 mail.example ESMTP\r\n"),
        Serve::Status(status) => write(format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n").as_bytes()),
        Serve::Redirect(to) => {
            write(format!("HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n").as_bytes())
        }
    }
}

/// Both halves of a TLS connection, for one thread.
struct Shared<'a>(&'a Mutex<rustls::StreamOwned<rustls::ServerConnection, TcpStream>>);

impl Read for Shared<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().read(buffer)
    }
}

impl Write for Shared<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.0.lock().unwrap().flush()
    }
}

fn base64_lines(bytes: &[u8]) -> String {
    use base64::Engine as _;
    let text = base64::engine::general_purpose::STANDARD.encode(bytes);
    text.as_bytes().chunks(64).map(|line| format!("{}\n", std::str::from_utf8(line).unwrap())).collect()
}

/// A proxy that lets everybody through; the heads it was sent.
pub fn proxy(answer: &'static str) -> (u16, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let heads = Arc::new(Mutex::new(Vec::new()));
    let seen = heads.clone();
    thread::spawn(move || {
        for mut client in listener.incoming().flatten() {
            let seen = seen.clone();
            thread::spawn(move || {
                let mut head = Vec::new();
                let mut byte = [0];
                while !head.ends_with(b"\r\n\r\n") && client.read(&mut byte).is_ok_and(|n| n == 1) {
                    head.push(byte[0]);
                }
                let head = String::from_utf8(head).unwrap();
                let to = head.split(' ').nth(1).unwrap_or_default().to_owned();
                seen.lock().unwrap().push(head);
                client.write_all(format!("HTTP/1.1 {answer}\r\n\r\n").as_bytes()).unwrap();
                if !answer.starts_with("200") {
                    return;
                }
                let server = TcpStream::connect(to).unwrap();
                let copy = |mut from: TcpStream, mut to: TcpStream| {
                    thread::spawn(move || {
                        let _ = std::io::copy(&mut from, &mut to);
                        let _ = to.shutdown(Shutdown::Write);
                    })
                };
                copy(client.try_clone().unwrap(), server.try_clone().unwrap());
                copy(server, client);
            });
        }
    });
    (port, heads)
}
