//! The host's side of the bridge as the sidecar sees it: [`stdio`] takes over the descriptors,
//! [`link`] owns the stream of frames with its pending requests. Knows neither callers nor HTTP.

pub mod link;
pub mod stdio;

pub use link::{Answer, Incoming, Link, LinkEnd, LinkError, Peer};
