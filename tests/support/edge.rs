//! What stands between this machine and a public name, as far as a program here can tell: a proxy
//! (`HTTPS_PROXY`), behind it Cloudflare's edge, which proves with a certificate that it is the name
//! and passes requests to whatever serves it. The roots to trust stand in a file (`SSL_CERT_FILE`).

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;

use super::assets::certificate;
use super::cloudflared::Standin;

/// How the way is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// As it should be.
    Open,
    /// The proxy lets nobody through.
    Blocked,
    /// The proxy finds no address for the name yet.
    Unresolved,
    /// Somebody on the way shows a certificate of their own.
    Resigned,
    /// Somebody else answers under the name.
    Usurped,
    /// Connections are taken, and nothing comes back.
    Mute,
    /// The edge does not know the tunnel, whatever its process says.
    Forgotten,
}

pub struct Edge {
    port: u16,
    roots: PathBuf,
    way: Arc<Mutex<Way>>,
    asked: Arc<AtomicUsize>,
    _dir: tempfile::TempDir,
    _end: tokio::sync::oneshot::Sender<()>,
}

impl Edge {
    /// In front of what `standin` serves.
    pub fn start(standin: &Standin) -> Self {
        let ((own, roots), (foreign, _)) =
            (certificate("*.trycloudflare.com"), certificate("*.trycloudflare.com"));
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("roots.pem");
        std::fs::write(&file, roots).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let port = listener.local_addr().unwrap().port();
        let (way, asked) = (Arc::new(Mutex::new(Way::Open)), Arc::new(AtomicUsize::new(0)));
        let (names, weather, count) = (standin.dir.path().join("names"), way.clone(), asked.clone());
        let accept = async move {
            while let Ok((socket, _)) = listener.accept().await {
                count.fetch_add(1, Ordering::SeqCst);
                let way = *weather.lock().unwrap();
                let config = if way == Way::Resigned { foreign.clone() } else { own.clone() };
                let names = names.clone();
                tokio::spawn(async move { pass(socket, way, config, names).await });
            }
        };
        let (end, ended) = tokio::sync::oneshot::channel::<()>();
        std::thread::spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    () = accept => {}
                    _ = ended => {}
                }
            });
            runtime.shutdown_background();
        });
        Self { port, roots: file, way, asked, _dir: dir, _end: end }
    }

    /// What a program needs in its environment to come this way.
    pub fn env(&self) -> Vec<(String, String)> {
        let proxy = format!("http://127.0.0.1:{}", self.port);
        let roots = self.roots.display().to_string();
        // Whatever this machine itself needs to come out says nothing here.
        let names = [("https_proxy", &*proxy), ("HTTPS_PROXY", &proxy), ("no_proxy", ""), ("NO_PROXY", "")];
        let all = names.into_iter().chain([("SSL_CERT_FILE", roots.as_str())]);
        all.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
    }

    pub fn set(&self, way: Way) {
        *self.way.lock().unwrap() = way;
    }

    /// Connections so far.
    pub fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }
}

async fn pass(mut socket: TcpStream, way: Way, config: Arc<ServerConfig>, names: PathBuf) -> Option<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(socket.read_u8().await.ok()?);
    }
    let head = String::from_utf8(head).ok()?;
    let host = head.strip_prefix("CONNECT ")?.split(':').next()?.to_owned();
    let refusal = match way {
        Way::Blocked => Some("403 Forbidden"),
        Way::Unresolved => Some("502 no such host"),
        _ => None,
    };
    if let Some(refusal) = refusal {
        return socket.write_all(format!("HTTP/1.1 {refusal}\r\n\r\n").as_bytes()).await.ok();
    }
    socket.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.ok()?;
    let mut inner = TlsAcceptor::from(config).accept(socket).await.ok()?;
    let answer = match way {
        Way::Mute => {
            let _ = inner.read_to_end(&mut Vec::new()).await;
            return None;
        }
        Way::Usurped => Some("HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello"),
        _ => None,
    };
    let port = std::fs::read_to_string(names.join(&host)).ok().and_then(|port| port.parse::<u16>().ok());
    let public = match port.filter(|_| way == Way::Open) {
        Some(port) => TcpStream::connect(("127.0.0.1", port)).await.ok(),
        None => None,
    };
    match (answer, public) {
        (None, Some(mut public)) => {
            let _ = tokio::io::copy_bidirectional(&mut inner, &mut public).await;
        }
        (answer, _) => {
            let unknown =
                "HTTP/1.1 530 <none>\r\nContent-Length: 16\r\nConnection: close\r\n\r\nerror code: 1033";
            let _ = inner.read(&mut [0; 4096]).await;
            let _ = inner.write_all(answer.unwrap_or(unknown).as_bytes()).await;
            let _ = inner.shutdown().await;
        }
    }
    Some(())
}
