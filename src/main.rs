//! The `kvatlas` command.

fn main() {}
