//! Quick integration tests.

mod schema;
mod shim;
