//! The daemon as a process that can be killed.

use std::process::{Child, Command, Stdio};

/// `kvatlas serve` in a process of its own.
pub struct Process(Child);

impl Process {
    pub fn start(url: &str, settings: &[(&str, &str)]) -> Self {
        let mut serve = Command::new(env!("CARGO_BIN_EXE_kvatlas"));
        serve.args([
            "serve",
            "--nats-url",
            url,
            "--admin-listen",
            "off",
            "--logging-level",
            "warn",
        ]);
        for (key, value) in settings {
            serve
                .arg(format!("--{}", key.replace(['.', '_'], "-")))
                .arg(value);
        }
        Self(serve.stdin(Stdio::null()).spawn().unwrap())
    }

    /// SIGKILL: no drain, no last snapshot.
    pub fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
