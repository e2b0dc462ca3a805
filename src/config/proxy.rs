//! The proxy that the environment names for `https`, as curl and most programs understand it:
//! `HTTPS_PROXY` or `https_proxy`, else `ALL_PROXY`; `NO_PROXY` lists hosts without. It may hold a
//! password, so it is never shown.

use std::fmt;

/// Where https goes through. The default: nowhere, directly.
#[derive(Clone, Default)]
pub struct Proxy {
    url: Option<String>,
    /// Hosts that are reached directly; a domain stands for all below it.
    except: Vec<String>,
}

/// Host, port, and `user:password`.
pub type Through = (String, u16, Option<String>);

impl Proxy {
    /// From the values of the variables.
    pub fn new(url: Option<String>, except: Option<String>) -> Proxy {
        let except = except.unwrap_or_default();
        let except = except.split([',', ' ']).filter(|host| !host.is_empty());
        Proxy {
            url: url.filter(|url| !url.trim().is_empty()),
            except: except.map(|host| host.trim_start_matches(['*', '.']).to_ascii_lowercase()).collect(),
        }
    }

    /// The proxy on the way to `host`, or why it cannot be used; `None`: directly.
    pub fn for_host(&self, host: &str) -> Option<Result<Through, &'static str>> {
        let url = self.url.as_deref()?.trim();
        let host = host.to_ascii_lowercase();
        let is_excepted = |except: &String| {
            // A lone `*` is everything.
            let before = host.strip_suffix(except.as_str());
            before.is_some_and(|rest| except.is_empty() || rest.is_empty() || rest.ends_with('.'))
        };
        (!self.except.iter().any(is_excepted)).then(|| through(url))
    }
}

fn through(url: &str) -> Result<Through, &'static str> {
    let rest = match url.split_once("://") {
        Some(("http", rest)) => rest,
        Some(_) => return Err("only a proxy that begins with http:// is supported"),
        None => url,
    };
    let authority = rest.split('/').next().unwrap_or_default();
    let (credentials, at) = match authority.rsplit_once('@') {
        Some((credentials, at)) => (Some(percent_decoded(credentials)), at),
        None => (None, authority),
    };
    let uri: hyper::http::uri::Authority = at.parse().map_err(|_| "the proxy's address makes no sense")?;
    let host = uri.host().trim_start_matches('[').trim_end_matches(']').to_owned();
    Ok((host, uri.port_u16().unwrap_or(80), credentials))
}

fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let code = (*first == b'%').then(|| after.get(..2)).flatten();
        let code = code.and_then(|hex| u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok());
        bytes.push(code.unwrap_or(*first));
        rest = if code.is_some() { &after[2..] } else { after };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

impl fmt::Debug for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.url.is_some() { "Proxy(…)" } else { "Proxy(none)" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proxy_is_what_the_variables_say() {
        let of = |url: &str, except: &str| Proxy::new(Some(url.into()), Some(except.into()));
        let direct = |proxy: &Proxy, host| proxy.for_host(host).is_none();
        let proxy = of("http://u:p%40ss@proxy.local:3128/", "localhost, .corp.example,10.0.0.1");
        let expected = Ok(("proxy.local".to_owned(), 3128, Some("u:p@ss".to_owned())));
        assert_eq!(proxy.for_host("github.com"), Some(expected));
        assert!(
            direct(&proxy, "LOCALHOST") && direct(&proxy, "a.corp.example") && direct(&proxy, "10.0.0.1")
        );
        assert!(!direct(&proxy, "evilcorp.example") && !direct(&proxy, "corp.example.com"));
        assert!(direct(&of("http://p", "*"), "github.com") && direct(&of("", ""), "github.com"));
        assert_eq!(of("p:1", "").for_host("h"), Some(Ok(("p".into(), 1, None))));
        assert!(of("socks5://p:1", "").for_host("h").unwrap().is_err());
        assert_eq!(format!("{proxy:?}"), "Proxy(…)");
    }
}
