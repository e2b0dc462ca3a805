//! Quick integration tests.

mod schema;
