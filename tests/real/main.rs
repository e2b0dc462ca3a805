//! Tests against real hosts and clients.
