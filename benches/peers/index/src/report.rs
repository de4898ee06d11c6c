//! Measurements, and their Markdown tables.

use std::collections::BTreeMap;

use crate::measure::Spread;

/// Name of a figure within a run: scenario, layout and kind.
pub type Figure = String;

/// All measurements of a run.
#[derive(Debug, Default)]
pub struct Ledger {
    samples: BTreeMap<(Figure, String), Vec<f64>>,
    verdicts: BTreeMap<(Figure, String), Verdict>,
}

/// Number of answers, and number of answers that equal the oracle's answer.
#[derive(Debug, Clone, Copy, Default)]
struct Verdict {
    right: u64,
    wrong: u64,
}

/// Column of a table.
#[derive(Debug, Clone)]
pub struct Column {
    /// Heading of the column.
    pub heading: String,
    /// Figure whose values the column shows.
    pub figure: Figure,
}

impl Column {
    /// Makes a column for `figure`.
    pub fn new(heading: impl Into<String>, figure: impl Into<Figure>) -> Self {
        Self {
            heading: heading.into(),
            figure: figure.into(),
        }
    }
}

impl Ledger {
    /// Records one repetition's value of `figure` for the contender in `row`.
    pub fn record(&mut self, figure: &str, row: &str, value: f64) {
        let samples = self.samples.entry((figure.to_owned(), row.to_owned()));
        samples.or_default().push(value);
    }

    /// Records whether an answer was right.
    pub fn judge(&mut self, figure: &str, row: &str, is_right: bool) {
        let verdict = self
            .verdicts
            .entry((figure.to_owned(), row.to_owned()))
            .or_default();
        if is_right {
            verdict.right += 1;
        } else {
            verdict.wrong += 1;
        }
    }

    /// Returns the median, least and greatest value of the repetitions.
    pub fn spread(&self, figure: &str, row: &str) -> Option<Spread> {
        let samples = self.samples.get(&(figure.to_owned(), row.to_owned()))?;
        Spread::of(samples)
    }

    /// Prints a table with a row for each contender that has values in any of the columns. Prints nothing if there are
    /// no values.
    pub fn print(&self, title: &str, rows: &[String], columns: &[Column]) {
        let is_measured = |column: &Column| rows.iter().any(|row| self.spread(&column.figure, row).is_some());
        if !columns.iter().any(is_measured) {
            return;
        }
        println!("\n**{title}**\n");
        let headings: Vec<&str> = columns.iter().map(|column| column.heading.as_str()).collect();
        println!("| index | {} |", headings.join(" | "));
        println!("|---|{}", "---:|".repeat(columns.len()));
        for row in rows {
            let spreads: Vec<Option<Spread>> = columns
                .iter()
                .map(|column| self.spread(&column.figure, row))
                .collect();
            if spreads.iter().any(Option::is_some) {
                let cells: Vec<String> = spreads.into_iter().map(cell).collect();
                println!("| {row} | {} |", cells.join(" | "));
            }
        }
    }

    /// Prints the number of right answers for each figure that was checked.
    pub fn print_verdicts(&self, title: &str, rows: &[String]) {
        if self.verdicts.is_empty() {
            return;
        }
        println!("\n**{title}**\n");
        println!("| index | right | wrong | wrong in |");
        println!("|---|---:|---:|---|");
        for row in rows {
            let mut total = Verdict::default();
            let mut wrong_in = Vec::new();
            for ((figure, judged), verdict) in &self.verdicts {
                if judged == row {
                    total.right += verdict.right;
                    total.wrong += verdict.wrong;
                    if verdict.wrong > 0 {
                        wrong_in.push(figure.as_str());
                    }
                }
            }
            if total.right + total.wrong > 0 {
                println!(
                    "| {row} | {} | {} | {} |",
                    total.right,
                    total.wrong,
                    wrong_in.join("; ")
                );
            }
        }
    }
}

fn cell(spread: Option<Spread>) -> String {
    spread.map_or_else(
        || "–".to_owned(),
        |spread| {
            let Spread {
                median,
                least,
                greatest,
            } = spread;
            format!("{} ({}–{})", number(median), number(least), number(greatest))
        },
    )
}

/// Formats a number with at least three significant digits. A number from 100 on has no decimals.
pub fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 || size == 0.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}
