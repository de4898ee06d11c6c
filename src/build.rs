//! Build script: tells the program the commit that it was built from.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-env-changed=KVATLAS_COMMIT");
    let given = std::env::var("KVATLAS_COMMIT")
        .ok()
        .filter(|commit| !commit.is_empty());
    let commit = given
        .or_else(of_the_checkout)
        .unwrap_or_else(|| "unknown commit".to_owned());
    // Cargo hands this to programs that it runs, too. Under a name with the prefix of settings, `cargo run -- serve` would refuse it.
    println!("cargo::rustc-env=BUILD_COMMIT={commit}");
}

/// Returns the commit of the checkout; `None` if the sources are not the root of a checkout.
fn of_the_checkout() -> Option<String> {
    let root = git(&["rev-parse", "--show-toplevel"])?;
    if Path::new(&root) != Path::new(env!("CARGO_MANIFEST_DIR")) {
        return None;
    }
    // The log of HEAD changes with every commit and every switch of branches.
    let log = git(&["rev-parse", "--git-path", "logs/HEAD"])?;
    println!("cargo::rerun-if-changed={log}");
    git(&["rev-parse", "--short=12", "HEAD"])
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let text = text.trim();
    (output.status.success() && !text.is_empty()).then(|| text.to_owned())
}
