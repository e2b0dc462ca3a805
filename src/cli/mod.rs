//! (being written)

pub mod client;
pub mod connect;
pub mod install;
pub mod out;
