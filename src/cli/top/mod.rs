//! `kvatlas top`: the overview of the page, in a terminal.

mod draw;
mod frames;
mod model;

use std::io::{self, IsTerminal};
use std::time::Duration;

use clap::Args;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use tokio::sync::mpsc;

use super::admin_client::{AdminArguments, AdminClient, Events};
use super::failure::Failure;
use draw::Painter;
use model::{Model, Next};

pub(super) const EXAMPLES: &str = "Keys: arrows, Page Up and Page Down move; d shows only the degraded; n takes the next namespace; \
    / filters by name; q ends.\nNO_COLOR=1 turns colours off.\n\n\
    Examples:\n  \
    kvatlas top\n  \
    kvatlas top --admin 10.0.0.7:9464";

/// After a stream has ended, until the next is asked for.
const RETRY: Duration = Duration::from_millis(500);
/// How long the reader of keys waits before it looks whether it should end.
const KEY_PATIENCE: Duration = Duration::from_millis(100);

/// Whose fleet to show.
#[derive(Debug, Args)]
pub(crate) struct TopArguments {
    #[command(flatten)]
    admin: AdminArguments,
}

/// Shows the fleet until a person has seen enough.
pub(crate) async fn top(arguments: TopArguments) -> Result<(), Failure> {
    let client = arguments.admin.client()?;
    // Before the screen is taken: a wrong address is told on it as it is.
    let events = client.events("/page/frames").await?;
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        return Err(Failure::usage(
            "`kvatlas top` needs a terminal; `kvatlas status` prints once, and --json is for programs",
        ));
    }
    let trouble = |error| Failure::failed(format_args!("cannot use the terminal: {error}"));
    let mut terminal = ratatui::try_init().map_err(trouble)?;
    let shown = show(&mut terminal, &client, events).await;
    ratatui::try_restore().map_err(trouble)?;
    shown.map_err(trouble)
}

async fn show(terminal: &mut DefaultTerminal, client: &AdminClient, events: Events) -> io::Result<()> {
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
                        return Ok(());
                    }
                }
                Some(_) => {}
                // The terminal has gone.
                None => return Ok(()),
            },
        }
    }
}

/// The next event; none where the stream has ended. The one after that comes from a new stream.
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

/// Reads keys on a thread of its own: a terminal can only be waited for.
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
