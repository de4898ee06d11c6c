//! One test body for all designs, and what each of them does differently.

mod body;
mod concurrency;
mod deviations;
mod oracle;
mod stream;
