//! Draws the screen of `kvatlas top`. Everything fits 60 columns, except addresses.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Paragraph, Row, Sparkline, Table, Wrap};

use super::model::Model;

/// Minimum width of a terminal, in columns, at which addresses are shown.
const ADDRESS_COLUMNS_MIN: u16 = 90;

/// Number of lines for each of two texts. The first text is about the worst trouble among those that concern no row of
/// the table. The second is about the selected holder.
const TROUBLE_LINES: u16 = 3;

/// Draws the screen, with or without colours.
#[derive(Debug, Clone, Copy)]
pub(super) struct Painter {
    with_colours: bool,
}

impl Painter {
    /// Creates a painter without colours if `NO_COLOR` is set (<https://no-color.org>), else with colours.
    pub(super) fn for_environment() -> Self {
        let is_set = std::env::var_os("NO_COLOR").is_some_and(|text| !text.is_empty());
        Self::new(!is_set)
    }

    /// Creates a painter with or without colours.
    pub(super) fn new(with_colours: bool) -> Self {
        Self { with_colours }
    }

    fn colour(self, colour: Color) -> Style {
        match self.with_colours {
            true => Style::new().fg(colour),
            false => Style::new(),
        }
    }

    /// Draws the whole screen.
    pub(super) fn draw(self, frame: &mut Frame<'_>, model: &mut Model) {
        let trouble = model.trouble();
        let lines_of =
            |trouble: &Option<String>| Constraint::Length(if trouble.is_some() { TROUBLE_LINES } else { 0 });
        let parts = Layout::vertical([
            Constraint::Length(4),
            lines_of(&model.worst),
            Constraint::Length(2),
            Constraint::Min(3),
            lines_of(&trouble),
            Constraint::Length(1),
        ]);
        let [head, worst, history, table, below, foot] = parts.areas(frame.area());
        frame.render_widget(Paragraph::new(self.head(model)), head);
        let said = Line::styled(
            model.worst.as_deref().unwrap_or_default(),
            self.colour(Color::Red),
        );
        frame.render_widget(Paragraph::new(said).wrap(Wrap { trim: true }), worst);
        self.draw_history(frame, model, history);
        self.draw_table(frame, model, table);
        let trouble = Paragraph::new(trouble.unwrap_or_default()).wrap(Wrap { trim: true });
        frame.render_widget(trouble, below);
        frame.render_widget(Paragraph::new(self.foot(model)), foot);
    }

    fn head(self, model: &Model) -> Vec<Line<'_>> {
        let (exact, degraded, blocks, copies) = model.totals();
        let state = match (model.is_connected, model.is_ready) {
            (false, _) => Span::styled("NO CONNECTION", self.colour(Color::Red)),
            (true, _) if !model.has_heard() => Span::raw("waiting for the first answer"),
            (true, true) => Span::styled("ready", self.colour(Color::Green)),
            (true, false) => Span::styled("NOT READY", self.colour(Color::Red)),
        };
        let why = model.reasons.join("; ");
        let title = Style::new().add_modifier(Modifier::BOLD);
        let doubt = if degraded > 0 {
            self.colour(Color::Yellow)
        } else {
            Style::new()
        };
        let mut lines = vec![
            Line::from(vec![
                Span::styled("kvatlas ", title),
                Span::raw(format!("{} {} ", model.hello.version, model.authority)),
                state,
                Span::raw(format!(" {why}")),
            ]),
            Line::from(vec![
                Span::raw(format!("{}: {exact} exact  ", model.namespace())),
                Span::styled(format!("{degraded} degraded"), doubt),
                Span::raw(format!(
                    "  {} blocks  {} copies",
                    compact(blocks),
                    compact(copies)
                )),
            ]),
        ];
        if let Some(rates) = &model.rates {
            let answered = rates.exact + rates.degraded;
            let share = if answered > 0.0 {
                format!("{:.0} %", 100.0 * rates.exact / answered)
            } else {
                "–".to_owned()
            };
            lines.push(Line::raw(format!(
                "queries {}/s  p50 {}  p99 {}  exact {share}  failed {}/s",
                rate(rates.queries),
                time(rates.query_p50_us),
                time(rates.query_p99_us),
                rate(rates.failed)
            )));
            let usable = rates
                .usable
                .map_or_else(String::new, |share| format!("  usable {:.0} %", 100.0 * share));
            lines.push(Line::raw(format!(
                "blocks +{}/s -{}/s  batches {}/s  dropped {}/s{usable}",
                rate(rates.stored),
                rate(rates.removed),
                rate(rates.batches),
                rate(rates.dropped)
            )));
        }
        lines
    }

    fn draw_history(self, frame: &mut Frame<'_>, model: &Model, area: Rect) {
        let width = usize::from(area.width);
        let skipped = model.queries.len().saturating_sub(width);
        let shown: Vec<u64> = model.queries.iter().skip(skipped).copied().collect();
        let line = Sparkline::default().data(&shown).style(self.colour(Color::Cyan));
        frame.render_widget(line, area);
    }

    fn draw_table(self, frame: &mut Frame<'_>, model: &mut Model, area: Rect) {
        let doubt = self.colour(Color::Yellow);
        let holders = model.rows();
        let has_addresses =
            area.width >= ADDRESS_COLUMNS_MIN && holders.iter().any(|holder| !holder.address.is_empty());
        let has_namespaces = holders.windows(2).any(|two| two[0].namespace != two[1].namespace);
        let (length, fill) = (Constraint::Length, Constraint::Fill(1));
        // Columns, each with its title, its width and whether it is shown.
        let columns = [
            ("NAMESPACE", fill, has_namespaces),
            ("WORKER", fill, true),
            ("RANK", length(4), true),
            ("  BLOCKS", length(8), true),
            ("     LAG", length(8), true),
            ("STATE", fill, true),
            ("ADDRESS", fill, has_addresses),
        ];
        let shown = || columns.iter().filter(|(_, _, is_shown)| *is_shown);
        let rows: Vec<Row<'static>> = holders
            .into_iter()
            .map(|holder| {
                let state = model.state(holder);
                let style = if state == "exact" { Style::new() } else { doubt };
                let cells = [
                    holder.namespace.clone(),
                    holder.worker.clone(),
                    format!("{:>4}", holder.rank),
                    format!("{:>8}", compact(holder.blocks)),
                    format!("{:>8}", time(Some(holder.lag_us as f64))),
                    state,
                    holder.address.clone(),
                ];
                let shown = cells.into_iter().zip(&columns);
                let shown = shown.filter(|(_, (_, _, is_shown))| *is_shown);
                Row::new(shown.map(|(cell, _)| cell)).style(style)
            })
            .collect();
        let head = Row::new(shown().map(|(title, _, _)| *title));
        let table = Table::new(rows, shown().map(|(_, width, _)| *width))
            .header(head.style(Style::new().add_modifier(Modifier::BOLD)))
            .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
        frame.render_stateful_widget(table, area, &mut model.table);
    }

    fn foot(self, model: &Model) -> Line<'_> {
        if model.is_typing {
            return Line::raw(format!("name: {}▏ Enter keeps it, Esc clears it", model.filter));
        }
        let degraded = if model.only_degraded {
            "d all"
        } else {
            "d degraded"
        };
        let filter = if model.filter.is_empty() {
            "/ name".to_owned()
        } else {
            format!("/{}", model.filter)
        };
        Line::raw(format!("q quit  {degraded}  n namespace  {filter}  ↑↓ move"))
    }
}

/// Returns a count in at most six characters.
fn compact(count: u64) -> String {
    let units = ["", "k", "M", "G", "T", "P", "E"];
    let (mut number, mut unit) = (count as f64, 0);
    while number >= 999.5 && unit + 1 < units.len() {
        number /= 1000.0;
        unit += 1;
    }
    match (unit, number) {
        (0, _) => count.to_string(),
        (_, small) if small < 99.5 => format!("{small:.1}{}", units[unit]),
        (_, large) => format!("{large:.0}{}", units[unit]),
    }
}

fn rate(rate: f64) -> String {
    if rate < 9.95 && rate > 0.0 {
        return format!("{rate:.1}");
    }
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rate is a small positive number"
    )]
    compact(rate.round() as u64)
}

/// Returns a time in microseconds as text of at most seven characters; `–` if there is none.
fn time(us: Option<f64>) -> String {
    match us {
        None => "–".to_owned(),
        Some(us) if us < 999.5 => format!("{us:.0} µs"),
        Some(us) if us < 999.5e3 => format!("{:.1} ms", us / 1e3),
        Some(us) if us < 599e6 => format!("{:.1} s", us / 1e6),
        Some(us) => format!("{:.0} min", us / 6e7),
    }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
    use serde_json::json;

    use super::super::model::Next;
    use super::*;

    fn model() -> Model {
        let mut model = Model::new("127.0.0.1:9464");
        model.take(
            "hello",
            r#"{"version":"0.1.0","reasons":[[1,"gap"],[128,"stale"]],"mends":[["gap","ask again: kvatlas admin resync NAMESPACE WORKER RANK"]]}"#,
        );
        let workers = ["gpu-10", "gpu-2", "gpu-1", "cpu-1\u{1b}[2J"];
        let added: Vec<_> = workers
            .iter()
            .enumerate()
            .map(|(number, worker)| json!([number, "n", worker, 0]))
            .collect();
        let facts: Vec<_> = (0..4)
            .map(|number| json!([number, 12_345, if number == 1 { 129 } else { 0 }, 1500, 0, 0]))
            .collect();
        let frame = json!({
            "ready": true, "reasons": [], "now_us": 1_800_000_300_000_000_u64,
            "namespaces": [{"name": "n", "distinct_blocks": 1000, "held_blocks": 2_000_000}],
            "rates": {
                "batches": 1.5, "stored": 20.0, "removed": 0.0, "dropped": 0.0, "queries": 48.2, "failed": 0.0,
                "exact": 3.0, "degraded": 1.0, "usable": 0.874, "query_p50_us": 120.0, "query_p99_us": 3300.0,
            },
            "fleet": {"whole": true, "added": added, "profiles": [[1, "10.0.0.7:8000\u{1b}", {}]], "since": [[1, 1_800_000_000_000_000_u64]], "facts": facts, "gone": []},
            "costs": [[1, "31 % of queries find it, 50 % of answers inexact"]],
        });
        model.take("frame", &frame.to_string());
        model
    }

    fn drawn(model: &mut Model, width: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, 14)).unwrap();
        terminal
            .draw(|frame| Painter::new(false).draw(frame, model))
            .unwrap();
        let buffer = terminal.backend().buffer();
        let coloured = buffer
            .content()
            .iter()
            .filter(|cell| cell.fg != Color::Reset || cell.bg != Color::Reset);
        assert_eq!(coloured.count(), 0, "without colours");
        let line = |row| {
            (0..width)
                .map(|column| buffer[(column, row)].symbol())
                .collect::<String>()
        };
        (0..14).map(|row| line(row).trim_end().to_owned()).collect()
    }

    fn press(model: &mut Model, code: KeyCode) -> Next {
        model.press(KeyEvent::new(code, KeyModifiers::NONE))
    }

    #[test]
    fn everything_fits_sixty_columns() {
        let lines = drawn(&mut model(), 60);
        assert_eq!(lines[0], "kvatlas 0.1.0 127.0.0.1:9464 ready");
        assert_eq!(lines[1], "all: 3 exact  1 degraded  1.0k blocks  2.0M copies");
        assert_eq!(
            lines[2],
            "queries 48/s  p50 120 µs  p99 3.3 ms  exact 75 %  failed 0/s"
        );
        assert_eq!(
            lines[3],
            "blocks +20/s -0/s  batches 1.5/s  dropped 0/s  usable 87 %"
        );
        assert_eq!(lines[6], "WORKER             RANK   BLOCKS      LAG STATE");
        // The degraded first; numbers by their value; control characters are gone.
        assert_eq!(
            lines[7],
            "gpu-2                 0    12.3k   1.5 ms gap, stale (5 min)"
        );
        let workers: Vec<&str> = lines[8..10]
            .iter()
            .filter_map(|line| line.split(' ').next())
            .collect();
        assert_eq!(workers, ["cpu-1[2J", "gpu-1"]);
        // The first is selected.
        assert_eq!(
            lines[10..13],
            [
                "gpu-2/0 of n: Cost: 31 % of queries find it, 50 % of answers",
                "inexact. Mend: ask again: kvatlas admin resync n gpu-2 0;",
                "kvatlas explain stale"
            ]
        );
        assert_eq!(lines[13], "q quit  d degraded  n namespace  / name  ↑↓ move");
        let wide = drawn(&mut model(), 100);
        assert!(wide[6].ends_with("ADDRESS"));
        assert!(wide[7].ends_with("10.0.0.7:8000"), "{}", wide[7]);
    }

    #[test]
    fn rows_of_several_namespaces_say_of_which_they_are() {
        let mut model = model();
        let frame = json!({
            "ready": true, "reasons": [], "namespaces": [{"name": "n", "distinct_blocks": 0, "held_blocks": 0}],
            "fleet": {"whole": false, "added": [[9, "m\u{1b}", "gpu-2", 0]], "profiles": [], "facts": [[9, 1, 1, 0, 0, 0]], "gone": []},
        });
        model.take("frame", &frame.to_string());
        let lines = drawn(&mut model, 60);
        assert!(lines[6].starts_with("NAMESPACE    WORKER"), "{}", lines[6]);
        assert!(lines[7].starts_with("m            gpu-2"), "{}", lines[7]);
        assert!(lines[8].starts_with("n            gpu-2"), "{}", lines[8]);
        assert!(lines[10].starts_with("gpu-2/0 of m: Mend: "), "{}", lines[10]);
        assert!(model.trouble().unwrap().contains("admin resync m gpu-2 0"));
        // The rows of one namespace need no column.
        press(&mut model, KeyCode::Char('n'));
        let lines = drawn(&mut model, 60);
        assert!(lines[6].starts_with("WORKER"), "{}", lines[6]);
    }

    #[test]
    fn what_the_publisher_says_of_its_doubt_comes_first() {
        let mut model = model();
        let told = json!({"kvatlas/trouble": "the replay begins at 512, needed 1"});
        let frame = json!({
            "ready": true, "reasons": [], "namespaces": [],
            "fleet": {"whole": false, "added": [], "profiles": [[1, "", told]], "facts": [], "gone": []},
        });
        model.take("frame", &frame.to_string());
        let lines = drawn(&mut model, 100);
        assert!(
            lines[10].starts_with("gpu-2/0 of n: the replay begins at 512, needed 1. Mend: ask again"),
            "{}",
            lines[10]
        );
    }

    #[test]
    fn the_worst_trouble_that_no_row_shows_stands_in_the_head() {
        let mut model = Model::new("127.0.0.1:9464");
        let shown = |model: &mut Model, more: serde_json::Value| {
            let mut frame = json!({
                "ready": true, "reasons": [], "now_us": 1_800_000_300_000_000_u64,
                "namespaces": [{"name": "n", "distinct_blocks": 0, "held_blocks": 0}],
                "fleet": {"whole": true, "added": [], "facts": [], "gone": []},
            });
            for (name, value) in more.as_object().unwrap() {
                frame["namespaces"][0][name] = value.clone();
                frame[name] = value.clone();
            }
            model.take("frame", &frame.to_string());
            drawn(model, 100)[4..7].to_vec()
        };
        let clocks = json!({"ahead": ["early/0", "b/0"], "ahead_since_us": 1_800_000_000_000_000_u64});
        assert_eq!(
            shown(&mut model, clocks.clone()),
            [
                "the clock of early/0 and others of n is ahead since 08:00:00 UTC (5 min). Mend: run an NTP client",
                "where the worker runs, and restart its publisher",
                ""
            ]
        );
        let mut dropped = clocks;
        dropped["refused"] = json!([{"worker": "wide\u{1b}[2J", "reason": "stale_epoch", "since_us": 1_800_000_299_000_000_u64}]);
        let lines = shown(&mut model, dropped.clone()).join(" ");
        let said = "all batches of wide[2J of n are dropped (stale_epoch) since 08:04:59 UTC (1 s) (and 1 more: kvatlas doctor). Mend: ";
        assert!(lines.starts_with(said), "{lines}");
        assert!(lines.contains("kvatlas admin forget n wide[2J"), "{lines}");
        let uploads = json!({"uploads": {"error": "no room", "since_us": 1_800_000_000_000_000_u64}});
        let lines = shown(&mut model, uploads).join(" ");
        let said =
            "snapshots are not sent to the Object Store since 08:00:00 UTC (5 min): no room. Mend: see ";
        assert!(lines.starts_with(said), "{lines}");
        dropped["uploads"] = json!({"error": "no room", "since_us": 1});
        dropped["snapshots"] = json!({"error": "disk full", "since_us": 1});
        dropped["strays"] = json!([{"namespace": "new", "worker": "a", "reason": "undecodable", "detail": "", "messages": 1, "since_us": 1}]);
        dropped["missing_shards"] = json!([{"shard": 1, "shards": 2, "since_us": 1_800_000_000_000_000_u64}]);
        let lines = shown(&mut model, dropped).join(" ");
        let said = "shard 1/2 does not answer since 08:00:00 UTC (5 min) (and 5 more: kvatlas doctor). Mend: start a daemon";
        assert!(lines.starts_with(said), "{lines}");
        let sound = shown(&mut model, json!({}));
        assert!(sound[2].starts_with("WORKER"), "{sound:?}");
    }

    #[test]
    fn holders_that_are_not_sent_count_and_a_silent_broker_is_told() {
        let mut model = model();
        let frame = json!({
            "ready": true, "reasons": [], "now_us": 1_800_000_300_000_000_u64, "broker_silent_us": 9_000_000,
            "namespaces": [
                {"name": "n", "exact": 49_000, "degraded": 1000, "distinct_blocks": 0, "held_blocks": 0},
                {"name": "z", "exact": 9000, "degraded": 1000, "distinct_blocks": 0, "held_blocks": 0},
            ],
            "fleet": {"whole": false, "added": [], "facts": [], "gone": []},
        });
        model.take("frame", &frame.to_string());
        assert_eq!(model.totals(), (58_000, 2000, 0, 0));
        let told = model.worst.as_deref().unwrap();
        assert!(
            told.starts_with("nothing has come from the NATS server for 9.0s"),
            "{told}"
        );
    }

    #[test]
    fn keys_filter_and_move_and_end() {
        let mut model = model();
        press(&mut model, KeyCode::Char('d'));
        assert_eq!(model.rows().len(), 1);
        press(&mut model, KeyCode::Char('d'));
        for code in ['/', 'g', 'P', 'U', '-', '1', 'q'].map(KeyCode::Char) {
            assert_eq!(press(&mut model, code), Next::Go);
        }
        press(&mut model, KeyCode::Backspace);
        assert!(drawn(&mut model, 60)[13].starts_with("name: gPU-1"));
        press(&mut model, KeyCode::Enter);
        assert_eq!(model.rows().len(), 2);
        press(&mut model, KeyCode::End);
        assert_eq!(model.table.selected(), Some(1));
        press(&mut model, KeyCode::PageUp);
        assert_eq!(model.table.selected(), Some(0));
        assert_eq!(press(&mut model, KeyCode::Esc), Next::Go);
        assert_eq!(model.rows().len(), 4);
        press(&mut model, KeyCode::Char('n'));
        assert_eq!(model.namespace(), "n");
        press(&mut model, KeyCode::Char('n'));
        assert_eq!(model.namespace(), "all");
        model.lose();
        assert!(drawn(&mut model, 60)[0].ends_with("NO CONNECTION"));
        assert_eq!(press(&mut model, KeyCode::Char('q')), Next::End);
    }

    #[test]
    fn numbers_are_short() {
        for (count, text) in [
            (0, "0"),
            (999, "999"),
            (1000, "1.0k"),
            (99_400, "99.4k"),
            (123_456, "123k"),
            (u64::MAX, "18.4E"),
        ] {
            assert_eq!(compact(count), text);
        }
        for (us, text) in [
            (0.0, "0 µs"),
            (1500.0, "1.5 ms"),
            (2e6, "2.0 s"),
            (3.6e9, "60 min"),
        ] {
            assert_eq!(time(Some(us)), text);
        }
    }
}
