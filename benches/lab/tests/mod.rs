//! Tests of all designs: one common body, and examples of the differences between them.

mod body;
mod concurrency;
mod deviations;
mod oracle;
mod stream;
