//! The log: lines on standard error, as text for people or as JSON for collectors.

use std::io::IsTerminal;
use std::sync::OnceLock;

use kvatlas_core::worded;
use thiserror::Error;
use tracing::Subscriber;
use tracing::subscriber::SetGlobalDefaultError;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::field::MakeExt;
use tracing_subscriber::filter::ParseError;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::debug_fn;

use super::log_fields::write_field;

worded! {
    /// Format of the log's lines.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum LogFormat {
        /// One line of text, with the time in RFC 3339 (UTC); coloured if standard error is a terminal.
        Text => "text",
        /// One JSON object a line, with the message and its fields at the top level.
        Json => "json",
    }
}

/// Error of setting up the log, or of changing its filter.
#[derive(Debug, Error)]
pub enum LoggingError {
    /// The filter does not follow the syntax of directives.
    #[error(
        "log filter {filter:?} is not valid: {source}; give comma-separated directives such as \
         \"info\" or \"warn,kvatlas=debug\""
    )]
    Filter {
        /// The filter as given.
        filter: String,
        /// Mistake that the parser found in the filter.
        source: ParseError,
    },
    /// The log was already set up in this process.
    #[error("the log is already set up in this process; set it up once, at start")]
    AlreadySet(#[source] SetGlobalDefaultError),
    /// The log has not been set up by [`init`], so there is no filter to change.
    #[error("the log of this process was not set up here; its filter cannot be changed")]
    NotSet,
}

/// The crate of the NATS client.
const NATS_CLIENT: &str = "async_nats";

/// Function that changes the filter of a log.
type ChangeFilter = Box<dyn Fn(EnvFilter) + Send + Sync>;

/// Function that changes the filter of the process's log; empty until [`init`] has run.
static CHANGE_FILTER: OnceLock<ChangeFilter> = OnceLock::new();

/// Sets up the log of the process, on standard error.
///
/// `filter` is a list of directives in the syntax of [`EnvFilter`], such as `info` or `warn,kvatlas=debug`.
///
/// # Errors
///
/// [`LoggingError::Filter`] if the filter can't be parsed, [`LoggingError::AlreadySet`] on a second call.
pub fn init(format: LogFormat, filter: &str) -> Result<(), LoggingError> {
    let ansi = wants_colour(std::io::stderr().is_terminal());
    let (subscriber, change) = subscriber(format, filter, ansi, std::io::stderr)?;
    tracing::subscriber::set_global_default(subscriber).map_err(LoggingError::AlreadySet)?;
    let _ = CHANGE_FILTER.set(change);
    Ok(())
}

/// Whether output should be coloured, that is, whether it goes to a terminal and the variable `NO_COLOR` is unset or empty.
pub fn wants_colour(is_terminal: bool) -> bool {
    is_terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Changes the filter of the log that [`init`] has set up.
///
/// # Errors
///
/// [`LoggingError::Filter`] if the filter can't be parsed, [`LoggingError::NotSet`] if [`init`] has not set up the log.
pub fn set_filter(filter: &str) -> Result<(), LoggingError> {
    let change = CHANGE_FILTER.get().ok_or(LoggingError::NotSet)?;
    change(parse(filter)?);
    Ok(())
}

/// Parses a filter, and silences the NATS client unless the filter names its crate. The NATS client repeats the same line many
/// times a second. kvatlas logs the same facts in lines of its own, which are rate-limited.
fn parse(filter: &str) -> Result<EnvFilter, LoggingError> {
    let parsed = match filter.contains(NATS_CLIENT) {
        true => EnvFilter::try_new(filter),
        false => EnvFilter::try_new(format!("{filter},{NATS_CLIENT}=off")),
    };
    parsed.map_err(|source| LoggingError::Filter {
        filter: filter.to_owned(),
        source,
    })
}

/// Makes the subscriber for [`init`], with any writer. Also returns the function that changes the subscriber's filter.
fn subscriber<W>(
    format: LogFormat,
    filter: &str,
    ansi: bool,
    writer: W,
) -> Result<(Box<dyn Subscriber + Send + Sync>, ChangeFilter), LoggingError>
where
    W: for<'writer> MakeWriter<'writer> + Send + Sync + 'static,
{
    let builder = tracing_subscriber::fmt()
        .with_env_filter(parse(filter)?)
        .with_writer(writer)
        // By default, the library reports a failed write on standard error. If standard error is closed, that panics.
        .log_internal_errors(false);
    Ok(match format {
        LogFormat::Text => {
            let builder = builder
                .with_ansi(ansi)
                .fmt_fields(debug_fn(write_field).delimited(" "))
                .with_filter_reloading();
            let handle = builder.reload_handle();
            // Reloading fails only when the subscriber is gone; then nothing is logged any more.
            let change = move |filter| {
                let _ = handle.reload(filter);
            };
            (Box::new(builder.finish()), Box::new(change))
        }
        LogFormat::Json => {
            let builder = builder
                .with_ansi(false)
                .json()
                .flatten_event(true)
                .with_filter_reloading();
            let handle = builder.reload_handle();
            let change = move |filter| {
                let _ = handle.reload(filter);
            };
            (Box::new(builder.finish()), Box::new(change))
        }
    })
}

#[cfg(test)]
pub(super) mod tests {
    use std::io::Write;
    use std::sync::Arc;

    use parking_lot::Mutex;

    use super::*;

    #[derive(Clone, Default)]
    struct Captured(Arc<Mutex<Vec<u8>>>);

    impl Write for Captured {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    /// Returns the lines that `write_lines` logs on this thread.
    pub(crate) fn capture(format: LogFormat, filter: &str, ansi: bool, write_lines: impl FnOnce()) -> String {
        let captured = Captured::default();
        let writer = captured.clone();
        let (subscriber, _) = subscriber(format, filter, ansi, move || writer.clone()).expect("valid filter");
        tracing::subscriber::with_default(subscriber, write_lines);
        let bytes = captured.0.lock().clone();
        String::from_utf8(bytes).expect("the log is UTF-8")
    }

    /// Whether the text begins with a time such as `2026-01-31T12:34:56.789012Z`.
    fn begins_with_rfc3339(text: &str) -> bool {
        let pattern = "dddd-dd-ddTdd:dd:dd.";
        let time = text.split(' ').next().unwrap_or_default();
        time.ends_with('Z')
            && time.len() > pattern.len()
            && time
                .chars()
                .zip(pattern.chars())
                .all(|(character, expected)| match expected {
                    'd' => character.is_ascii_digit(),
                    other => character == other,
                })
    }

    #[test]
    fn text_has_a_time_a_level_and_fields_without_colour() {
        let text = capture(LogFormat::Text, "info", false, || {
            tracing::warn!(worker = "w-1", "batch dropped");
            tracing::debug!("left out");
        });
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(begins_with_rfc3339(&text), "{text}");
        assert!(text.contains("WARN") && text.contains("batch dropped") && text.contains("worker=\"w-1\""));
        assert!(!text.contains('\u{1b}'), "{text:?}");
    }

    #[test]
    fn nothing_in_a_field_ends_its_line_or_steers_a_terminal() {
        let name = "w\n2026-01-31T12:34:56.789012Z ERROR kvatlas: all is lost\u{1b}[2J\u{202e}";
        for format in [LogFormat::Text, LogFormat::Json] {
            let text = capture(format, "info", false, || {
                tracing::warn!(worker = %name, error = name, detail = ?name, "of {name}");
                tracing::warn!(long = %"x".repeat(1 << 20), "cut");
            });
            assert_eq!(text.lines().count(), 2, "{text}");
            assert!(!text.contains('\u{1b}'), "{text:?}");
            if format == LogFormat::Text {
                assert!(!text.contains('\u{202e}') && text.len() < 10_000, "{text:?}");
            }
        }
        let coloured = capture(
            LogFormat::Text,
            "info",
            true,
            || tracing::warn!(worker = %name, "coloured"),
        );
        assert_eq!(coloured.lines().count(), 1, "{coloured}");
        assert!(!coloured.contains("\u{1b}[2J"), "{coloured:?}");
    }

    #[test]
    fn colour_is_used_only_where_asked_for() {
        let text = capture(LogFormat::Text, "info", true, || tracing::warn!("coloured"));
        assert!(text.contains('\u{1b}'), "{text:?}");
        let json = capture(LogFormat::Json, "info", true, || tracing::warn!("plain"));
        assert!(!json.contains('\u{1b}'), "{json:?}");
    }

    #[test]
    fn json_is_one_object_a_line() {
        let json = capture(LogFormat::Json, "kvatlas=debug", false, || {
            tracing::debug!(blocks = 3_u64, "first\nline");
            tracing::error!("second");
        });
        let lines: Vec<serde_json::Value> = json
            .lines()
            .map(|line| serde_json::from_str(line).expect("JSON"))
            .collect();
        assert_eq!(lines.len(), 2, "{json}");
        assert_eq!(lines[0]["message"], "first\nline");
        assert_eq!(lines[0]["blocks"], 3);
        assert_eq!(lines[1]["level"], "ERROR");
        assert!(begins_with_rfc3339(
            lines[1]["timestamp"].as_str().expect("a time")
        ));
    }

    #[test]
    fn the_nats_client_is_heard_only_where_it_is_named() {
        let lines = |filter| {
            capture(LogFormat::Text, filter, false, || {
                tracing::error!(target: "async_nats::connector", "authorization violation");
            })
        };
        for silent in ["info", "trace", "warn,kvatlas=debug"] {
            assert_eq!(lines(silent), "", "{silent}");
        }
        assert!(lines("info,async_nats=warn").contains("authorization violation"));
    }

    #[test]
    fn the_filter_can_be_changed() {
        for format in [LogFormat::Text, LogFormat::Json] {
            let captured = Captured::default();
            let writer = captured.clone();
            let made = subscriber(format, "error", false, move || writer.clone());
            let (subscriber, change) = made.expect("valid filter");
            tracing::subscriber::with_default(subscriber, || {
                tracing::info!("before");
                change(parse("info").expect("valid filter"));
                tracing::info!("after");
            });
            let text = String::from_utf8(captured.0.lock().clone()).expect("the log is UTF-8");
            assert!(text.contains("after") && !text.contains("before"), "{text}");
        }
    }

    #[test]
    fn a_bad_filter_is_a_typed_error_that_shows_it() {
        let error = subscriber(LogFormat::Text, "kvatlas=loudly", false, std::io::sink).err();
        let error = error.expect("no such level");
        assert!(
            matches!(&error, LoggingError::Filter { filter, .. } if filter == "kvatlas=loudly"),
            "{error}"
        );
    }
}
