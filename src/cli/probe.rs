//! `kvatlas probe`: the health check of containers that have no shell and no HTTP client.

use std::time::Duration;

use clap::Args;
use hyper::StatusCode;

use super::admin_client::AdminClientArguments;
use super::connect::parse_time;
use super::failure::Failure;
use super::output::print;

pub(super) const EXAMPLES: &str = "\
Ends with 0 when the daemon is ready, with 1 when it is not, and with 69 when nobody answers.

Examples:
  kvatlas probe
  kvatlas probe --live --admin 127.0.0.1:9465";

/// Listener to ask, and the question.
#[derive(Debug, Args)]
pub(crate) struct ProbeArguments {
    /// The daemon's or bridge's admin listener: HOST, HOST:PORT or http://HOST:PORT [default: 127.0.0.1:9464]
    /// [environment: KVATLAS_ADMIN_LISTEN].
    #[arg(long, value_name = "ADDRESS")]
    admin: Option<String>,
    /// Ask whether the process runs, and not whether it is ready.
    #[arg(long)]
    live: bool,
    /// How long to wait: 5, 2.5s or 500ms.
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = parse_time)]
    timeout: Duration,
}

impl ProbeArguments {
    /// Asks the admin listener, prints its answer, and fails unless the status is 200.
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let path = if self.live { "/livez" } else { "/readyz" };
        let client = AdminClientArguments::at(self.admin, self.timeout).client()?;
        let (status, body) = client.body(path).await?;
        let text = String::from_utf8_lossy(&body);
        let text = text.trim_end();
        if status == StatusCode::OK {
            return print(&format!("{text}\n"));
        }
        Err(Failure::failed(format_args!("{status}: {text}")))
    }
}
