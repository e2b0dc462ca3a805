//! What callers may do on the file route, and the headers that pass (contract 6). Pure.
//!
//! The file server lets whoever may upload also copy over files and change them in place: whatever is not
//! allowed here by name does not reach it.

use hyper::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONNECTION, CONTENT_LENGTH, EXPECT, HOST, HeaderMap, HeaderName,
    HeaderValue, TE, TRAILER, TRANSFER_ENCODING, UPGRADE, WWW_AUTHENTICATE,
};
use hyper::{Method, StatusCode};

/// What callers of a shared folder may use.
pub const ALLOW_FOLDER: &str = "GET, HEAD, OPTIONS, PROPFIND, PUT, PATCH, MKCOL";
/// What callers of one shared file may use.
pub const ALLOW_FILE: &str = "GET, HEAD, OPTIONS, PROPFIND";
/// The header a continued upload names its whole length with.
pub const UPLOAD_LENGTH: HeaderName = HeaderName::from_static("x-upload-length");
/// The header with which a continued upload says where its bytes belong; it may be left out.
pub const UPLOAD_OFFSET: HeaderName = HeaderName::from_static("x-upload-offset");
/// The header that says where a `PATCH` writes.
pub const UPDATE_RANGE: HeaderName = HeaderName::from_static("x-update-range");

/// Most ranges of one request that are passed on.
const MAX_RANGES: usize = 32;
/// Several ranges are passed on when they are so many bytes together at most: the file server of some
/// versions keeps them all in memory.
const MAX_RANGES_BYTES: u64 = 4 << 20;

/// What a request wants of the file route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wish {
    /// `GET` and `HEAD`: a file, a listing, an archive.
    Read,
    /// `PROPFIND`.
    Properties,
    /// `OPTIONS`.
    Options,
    /// `PUT`.
    Upload,
    /// `MKCOL`.
    NewFolder,
    /// `HEAD …?part`.
    PartSize,
    /// `PATCH …?part`.
    Continue,
}

/// Why a request is refused; status and words for callers.
pub type Refused = (StatusCode, &'static str);

/// Judges method and query.
///
/// # Errors
/// [`Refused`]: always 403.
pub fn judge(method: &Method, query: Option<&str>) -> Result<Wish, Refused> {
    let keys = || form_urlencoded::parse(query.unwrap_or_default().as_bytes()).map(|(key, _)| key);
    if keys().any(|key| key == "tokengen") {
        return Err((StatusCode::FORBIDDEN, "links with a token of their own are not given out here"));
    }
    let is_part = keys().any(|key| key == "part");
    match (method.as_str(), is_part) {
        ("HEAD", true) => Ok(Wish::PartSize),
        ("PATCH", true) => Ok(Wish::Continue),
        ("PATCH", false) => Err((
            StatusCode::FORBIDDEN,
            "PATCH only continues a cut upload: add ?part, X-Update-Range: append and X-Upload-Length",
        )),
        ("GET" | "HEAD", _) => Ok(Wish::Read),
        ("OPTIONS", _) => Ok(Wish::Options),
        ("PROPFIND", _) => Ok(Wish::Properties),
        ("PUT", true) => Err((
            StatusCode::FORBIDDEN,
            "PUT sends a whole file, without ?part; PATCH with ?part continues a cut upload",
        )),
        ("PUT", false) => Ok(Wish::Upload),
        ("MKCOL", _) => Ok(Wish::NewFolder),
        _ => Err((
            StatusCode::FORBIDDEN,
            "not allowed on a share: callers may read, list, upload and make folders, but not delete, \
             move, copy, lock or change in place",
        )),
    }
}

/// The headers of a request as they go to the file server: none that belong to one connection, nor
/// those that are ours to set.
pub fn request_headers(caller: &HeaderMap) -> HeaderMap {
    let mut headers = end_to_end(caller);
    for ours in [AUTHORIZATION, HOST, CONTENT_LENGTH, EXPECT, UPDATE_RANGE, UPLOAD_LENGTH, UPLOAD_OFFSET] {
        headers.remove(ours);
    }
    headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    headers
}

/// The headers of a reply as they go to the caller.
pub fn reply_headers(upstream: &HeaderMap) -> HeaderMap {
    let mut headers = end_to_end(upstream);
    headers.remove(WWW_AUTHENTICATE);
    headers
}

/// Without the hop-by-hop headers, and without those that `Connection` names.
fn end_to_end(all: &HeaderMap) -> HeaderMap {
    let mut headers = all.clone();
    for value in all.get_all(CONNECTION) {
        let named = value.as_bytes().split(|byte| *byte == b',');
        for name in named.filter_map(|name| HeaderName::from_bytes(name.trim_ascii()).ok()) {
            headers.remove(name);
        }
    }
    for name in [CONNECTION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE] {
        headers.remove(name);
    }
    for name in ["keep-alive", "proxy-connection", "proxy-authenticate", "proxy-authorization"] {
        headers.remove(name);
    }
    headers
}

/// Whether the file server answers a query about a folder with an archive. It takes the last of several
/// values.
pub fn asks_for_archive(query: Option<&str>) -> bool {
    let pairs = form_urlencoded::parse(query.unwrap_or_default().as_bytes());
    pairs.filter(|(key, _)| key == "zip").last().is_some_and(|(_, value)| value.is_empty())
}

/// Whether a `Range` may go to the file server; without it the answer is the whole file.
pub fn passes_range(range: &str) -> bool {
    let Some(ranges) = range.trim().strip_prefix("bytes=") else { return true };
    let ranges: Vec<&str> = ranges.split(',').collect();
    if let [range] = ranges[..] {
        // The file server answers the last 0 bytes with a range that is none.
        return range.trim().strip_prefix('-').and_then(number) != Some(0);
    }
    let length = |range: &&str| {
        let (start, end) = range.trim().split_once('-')?;
        let (start, end): (u64, u64) = (start.parse().ok()?, end.parse().ok()?);
        end.checked_sub(start)?.checked_add(1)
    };
    ranges.len() <= MAX_RANGES
        && ranges
            .iter()
            .map(length)
            .try_fold(0u64, |sum, length| sum.checked_add(length?))
            .is_some_and(|sum| sum <= MAX_RANGES_BYTES)
}

/// A `Range` cut to a file of `size` bytes (RFC 9110, 14.1.2): the parts of it that exist. `None` when
/// none does, or when it is no range.
pub fn clamp_range(range: &str, size: u64) -> Option<String> {
    let last = size.checked_sub(1)?;
    let mut kept = Vec::new();
    for range in range.trim().strip_prefix("bytes=")?.split(',') {
        let (start, end) = range.trim().split_once('-')?;
        if start.is_empty() {
            let length = number(end)?;
            if length > 0 {
                kept.push((size.saturating_sub(length), last));
            }
            continue;
        }
        let start = number(start)?;
        let end = if end.is_empty() { last } else { number(end)? };
        if end < start {
            return None;
        }
        if start <= last {
            kept.push((start, end.min(last)));
        }
    }
    if kept.is_empty() || kept.len() > MAX_RANGES {
        return None;
    }
    let kept: Vec<String> = kept.iter().map(|(start, end)| format!("{start}-{end}")).collect();
    Some(format!("bytes={}", kept.join(",")))
}

/// A number of a range; one that is beyond all files counts as the largest.
fn number(text: &str) -> Option<u64> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| text.parse().unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(method: &str, query: &str) -> Result<Wish, StatusCode> {
        let method = Method::from_bytes(method.as_bytes()).unwrap();
        judge(&method, Some(query)).map_err(|refused| refused.0)
    }

    #[test]
    fn only_what_is_named_passes() {
        for (method, query, wish) in [
            ("GET", "", Wish::Read),
            ("HEAD", "zip", Wish::Read),
            ("GET", "part", Wish::Read),
            ("OPTIONS", "", Wish::Options),
            ("PROPFIND", "", Wish::Properties),
            ("PUT", "", Wish::Upload),
            ("MKCOL", "", Wish::NewFolder),
            ("HEAD", "part", Wish::PartSize),
            ("HEAD", "a=1&p%61rt=", Wish::PartSize),
            ("PATCH", "part", Wish::Continue),
            ("PUT", "parts", Wish::Upload),
        ] {
            assert_eq!(judged(method, query), Ok(wish), "{method} ?{query}");
        }
        for method in [
            "DELETE",
            "MOVE",
            "COPY",
            "POST",
            "PATCH",
            "PROPPATCH",
            "LOCK",
            "UNLOCK",
            "TRACE",
            "CONNECT",
            "CHECKAUTH",
            "LOGOUT",
            "get",
            "SEARCH",
            "X",
        ] {
            assert_eq!(judged(method, ""), Err(StatusCode::FORBIDDEN), "{method}");
        }
        for query in ["tokengen", "tokengen=", "tokengen=1", "json&%74okengen", "a=b&tokengen=x&tokengen="] {
            assert_eq!(judged("GET", query), Err(StatusCode::FORBIDDEN), "{query}");
        }
    }

    #[test]
    fn headers_of_a_connection_and_ours_do_not_pass() {
        let mut caller = HeaderMap::new();
        for (name, value) in [
            ("connection", "keep-alive, X-Secret, authorization"),
            ("keep-alive", "timeout=5"),
            ("proxy-authorization", "x"),
            ("te", "trailers"),
            ("upgrade", "h2c"),
            ("transfer-encoding", "chunked"),
            ("authorization", "Bearer t"),
            ("accept-encoding", "gzip"),
            ("x-update-range", "bytes=0-1"),
            ("x-secret", "1"),
            ("host", "h"),
            ("depth", "1"),
            ("range", "bytes=0-"),
        ] {
            caller.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        let sent = request_headers(&caller);
        let mut names: Vec<_> = sent.keys().map(|name| name.as_str()).collect();
        names.sort_unstable();
        assert_eq!(names, ["accept-encoding", "depth", "range"]);
        assert_eq!(sent[ACCEPT_ENCODING], "identity");

        let mut upstream = HeaderMap::new();
        for (name, value) in [
            ("connection", "close, x-hop"),
            ("x-hop", "1"),
            ("www-authenticate", "Basic realm=\"DUFS\""),
            ("etag", "\"1\""),
            ("content-length", "5"),
        ] {
            upstream.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        let mut names: Vec<_> =
            reply_headers(&upstream).keys().map(|name| name.as_str().to_owned()).collect();
        names.sort_unstable();
        assert_eq!(names, ["content-length", "etag"]);
    }

    #[test]
    fn an_archive_is_asked_for_by_an_empty_value() {
        for query in ["zip", "zip=", "sort=name&zip", "z%69p", "zip=1&zip", "zip&json"] {
            assert!(asks_for_archive(Some(query)), "{query}");
        }
        for query in [None, Some(""), Some("zip=1"), Some("zip&zip=1"), Some("zips")] {
            assert!(!asks_for_archive(query), "{query:?}");
        }
    }

    #[test]
    fn a_range_is_cut_to_what_exists() {
        for (range, size, kept) in [
            ("bytes=0-999", 12, Some("bytes=0-11")),
            ("bytes=5-", 12, Some("bytes=5-11")),
            ("bytes=-999", 12, Some("bytes=0-11")),
            ("bytes=-5", 12, Some("bytes=7-11")),
            ("bytes=0-1, 10-20, 50-60", 12, Some("bytes=0-1,10-11")),
            ("bytes=12-", 12, None),
            ("bytes=12-20", 12, None),
            ("bytes=-0", 12, None),
            ("bytes=0-", 0, None),
            ("bytes=5-2", 12, None),
            ("bytes=a-b", 12, None),
            ("items=0-1", 12, None),
            ("bytes=18446744073709551616-", 12, None),
            ("bytes=3-18446744073709551616", 12, Some("bytes=3-11")),
            ("bytes=-99999999999999999999999", 12, Some("bytes=0-11")),
            ("bytes=+3-", 12, None),
        ] {
            assert_eq!(clamp_range(range, size).as_deref(), kept, "{range}");
        }
    }

    #[test]
    fn many_ranges_pass_only_when_they_are_small() {
        for range in ["bytes=0-", "bytes=-5", "bytes=0-99999999999", "bytes=0-1,4-5", "items=0-1,2-3"] {
            assert!(passes_range(range), "{range}");
        }
        for range in [
            "bytes=-0",
            "bytes=0-,0-",
            "bytes=0-1,-5",
            "bytes=0-4194304,0-1",
            "bytes=0-18446744073709551615,0-1",
        ] {
            assert!(!passes_range(range), "{range}");
        }
        assert!(!passes_range(&format!("bytes={}0-1", "0-1,".repeat(32))));
    }
}
