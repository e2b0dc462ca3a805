//! Quick integration tests.
