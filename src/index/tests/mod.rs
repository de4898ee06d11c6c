//! Tests of the index against a brute-force oracle.
