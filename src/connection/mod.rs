//! connection (being written).
