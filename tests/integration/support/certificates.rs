//! Certificates of an authority that tests make with openssl.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Authority in a folder, which is removed when the value is dropped.
pub struct Authority {
    folder: tempfile::TempDir,
}

/// Certificate and its key, as PEM files.
pub struct Certificate {
    pub certificate: PathBuf,
    pub key: PathBuf,
}

impl Certificate {
    /// Returns the settings with which a daemon shows this certificate.
    pub fn settings(&self) -> [(&'static str, &str); 2] {
        [
            ("nats.tls_cert_file", text(&self.certificate)),
            ("nats.tls_key_file", text(&self.key)),
        ]
    }
}

impl Authority {
    /// Makes a new authority; `None` on a machine without openssl.
    pub fn new() -> Option<Self> {
        if Command::new("openssl").arg("version").output().is_err() {
            assert!(
                std::env::var("CI").as_deref() != Ok("true"),
                "openssl is needed to make certificates"
            );
            super::skipped("there is no openssl to make certificates with");
            return None;
        }
        let authority = Self {
            folder: tempfile::tempdir().unwrap(),
        };
        authority.make("authority", "basicConstraints = critical, CA:TRUE", &[]);
        Some(authority)
    }

    /// Returns the path of the authority's own certificate. A client that trusts it trusts all certificates of the
    /// authority.
    pub fn certificate(&self) -> PathBuf {
        self.folder.path().join("authority.pem")
    }

    /// Makes a certificate for `name` on this machine.
    pub fn issue(&self, name: &str) -> Certificate {
        let (certificate, key) = (self.certificate(), self.folder.path().join("authority.key"));
        let authority = ["-CA", text(&certificate), "-CAkey", text(&key)];
        let extensions = "basicConstraints = CA:FALSE\nsubjectAltName = IP:127.0.0.1, DNS:localhost";
        self.make(name, extensions, &authority)
    }

    fn make(&self, name: &str, extensions: &str, more: &[&str]) -> Certificate {
        let file = |suffix: &str| self.folder.path().join(format!("{name}.{suffix}"));
        let (request, certificate, key) = (file("conf"), file("pem"), file("key"));
        let text_of_request = format!(
            "[req]\nprompt = no\ndistinguished_name = name\n[name]\nCN = {name}\n[extensions]\n{extensions}\n"
        );
        std::fs::write(&request, text_of_request).unwrap();
        let output = Command::new("openssl")
            .args([
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:prime256v1",
            ])
            .args(["-nodes", "-days", "2", "-extensions", "extensions"])
            .args([
                "-config",
                text(&request),
                "-keyout",
                text(&key),
                "-out",
                text(&certificate),
            ])
            .args(more)
            .output()
            .unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        Certificate { certificate, key }
    }
}

/// Returns a path as text.
pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}
