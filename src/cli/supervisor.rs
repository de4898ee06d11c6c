//! The messages to the supervisor of the process, where it wants to know: systemd with `Type=notify` and `WatchdogSec`.
//!
//! Nothing happens where `NOTIFY_SOCKET` is not set.

use sd_notify::NotifyState;

/// Says that the daemon is ready.
pub(crate) fn ready() {
    tell(NotifyState::Ready);
}

/// Says that the daemon is about to end.
pub(crate) fn stopping() {
    tell(NotifyState::Stopping);
}

/// Says again and again that the runtime still runs, twice as often as the supervisor asks for; never returns.
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
