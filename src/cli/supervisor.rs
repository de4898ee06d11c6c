//! Messages to the supervisor of the process, such as systemd with `Type=notify` and `WatchdogSec`.
//!
//! Without the environment variable `NOTIFY_SOCKET` nothing is sent.

use sd_notify::NotifyState;

/// Tells the supervisor that the process is ready.
pub(crate) fn ready() {
    tell(NotifyState::Ready);
}

/// Tells the supervisor that the process is about to end.
pub(crate) fn stopping() {
    tell(NotifyState::Stopping);
}

/// Tells the supervisor twice in each watchdog interval that the async runtime still runs. Never returns.
pub(crate) async fn keep_watchdog() {
    let Some(limit) = sd_notify::watchdog_enabled().filter(|limit| !limit.is_zero()) else {
        return std::future::pending().await;
    };
    let mut interval = tokio::time::interval(limit / 2);
    loop {
        interval.tick().await;
        tell(NotifyState::Watchdog);
    }
}

fn tell(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "the supervisor cannot be told the daemon's state");
    }
}
