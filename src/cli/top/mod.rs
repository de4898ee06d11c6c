//! `kvatlas top`: shows the fleet in a terminal, as the web page at the daemon's admin listener does in a browser.

mod draw;
mod frames;
mod model;
mod trouble;

use std::io::{self, IsTerminal};
use std::time::Duration;

use clap::Args;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;

use super::admin_client::{AdminClient, AdminClientArguments, Events};
use super::failure::Failure;
use super::serve::StopSignals;
use draw::Painter;
use model::{Model, Next};

pub(super) const EXAMPLES: &str = "Keys: arrows, Page Up and Page Down move; d shows only the degraded; n takes the next namespace; \
    / filters by name; q ends.\nNO_COLOR=1 turns colours off.\n\n\
    Examples:\n  \
    kvatlas top\n  \
    kvatlas top --admin 10.0.0.7:9464";

/// Pause after the end of a stream of events, before the next one is opened.
const RETRY: Duration = Duration::from_millis(500);
/// Longest wait of the thread that reads keys, before it checks whether it should end.
const KEY_PATIENCE: Duration = Duration::from_millis(100);

/// Daemon whose fleet is shown.
#[derive(Debug, Args)]
pub(crate) struct TopArguments {
    #[command(flatten)]
    admin: AdminClientArguments,
}

/// Shows the fleet until a person quits or a signal comes.
pub(crate) async fn top(arguments: TopArguments) -> Result<(), Failure> {
    let client = arguments.admin.client()?;
    // The stream is opened before the screen is set up, so that an error about the address is printed on the plain
    // terminal.
    let events = client.events("/page/frames").await?;
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        return Err(Failure::usage(
            "`kvatlas top` needs a terminal; `kvatlas status` prints once, and --json is for programs",
        ));
    }
    let trouble = |error| Failure::failed(format_args!("cannot use the terminal: {error}"));
    // The signals are caught before the screen is set up, so that no signal ends the process without restoring the
    // terminal.
    let signals = Signals::listen()?;
    let mut terminal = ratatui::try_init().map_err(trouble)?;
    let shown = show(&mut terminal, &client, events, signals).await;
    let restored = ratatui::try_restore().map_err(trouble);
    match shown.map_err(trouble)? {
        // The terminal is gone, so nobody could read an error.
        DisplayEnd::Signal("SIGHUP") => Ok(()),
        DisplayEnd::Signal(name) => restored.and(Err(Failure::failed(format_args!("ended by {name}")))),
        DisplayEnd::Asked => restored,
    }
}

/// Reason for which the display has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DisplayEnd {
    /// A person has quit, or the terminal is gone.
    Asked,
    /// A signal with this name ended the display.
    Signal(&'static str),
}

/// Signals that end the process. They are caught, so that the terminal is restored first.
struct Signals {
    stop: StopSignals,
    hangup: Signal,
    quit: Signal,
}

impl Signals {
    fn listen() -> Result<Self, Failure> {
        let listen = |kind| {
            signal(kind).map_err(|error| Failure::failed(format_args!("cannot listen to signals: {error}")))
        };
        Ok(Self {
            stop: StopSignals::listen()?,
            hangup: listen(SignalKind::hangup())?,
            quit: listen(SignalKind::quit())?,
        })
    }

    /// Waits for the next signal, and returns its name.
    async fn next(&mut self) -> &'static str {
        tokio::select! {
            name = self.stop.next() => name,
            _ = self.hangup.recv() => "SIGHUP",
            _ = self.quit.recv() => "SIGQUIT",
        }
    }
}

async fn show(
    terminal: &mut DefaultTerminal,
    client: &AdminClient,
    events: Events,
    mut signals: Signals,
) -> io::Result<DisplayEnd> {
    let painter = Painter::for_environment();
    let mut model = Model::new(client.authority());
    let (mut keys, mut events) = (read_keys(), Some(events));
    loop {
        terminal.draw(|frame| painter.draw(frame, &mut model))?;
        tokio::select! {
            event = next_event(client, &mut events) => match event {
                Some((name, data)) => model.take(&name, &data),
                None => model.lose(),
            },
            key = keys.recv() => match key {
                Some(Event::Key(key)) if key.kind == KeyEventKind::Press => {
                    if model.press(key) == Next::End {
                        return Ok(DisplayEnd::Asked);
                    }
                }
                Some(_) => {}
                // The terminal has gone.
                None => return Ok(DisplayEnd::Asked),
            },
            name = signals.next() => return Ok(DisplayEnd::Signal(name)),
        }
    }
}

/// Returns the next event. `None` if the stream has ended; the call after that opens a new stream.
async fn next_event(client: &AdminClient, events: &mut Option<Events>) -> Option<(String, String)> {
    if events.is_none() {
        tokio::time::sleep(RETRY).await;
        *events = client.events("/page/frames").await.ok();
    }
    let next = match events.as_mut() {
        Some(open) => open.next().await,
        None => None,
    };
    if next.is_none() {
        *events = None;
    }
    next
}

/// Starts a thread that reads keys, and returns its channel. The thread is needed because reading a key blocks.
fn read_keys() -> mpsc::Receiver<Event> {
    let (sender, receiver) = mpsc::channel(64);
    std::thread::spawn(move || {
        while !sender.is_closed() {
            let read = match event::poll(KEY_PATIENCE) {
                Ok(false) => continue,
                Ok(true) => event::read(),
                Err(_) => return,
            };
            let Ok(event) = read else { return };
            if sender.blocking_send(event).is_err() {
                return;
            }
        }
    });
    receiver
}
