//! Parser for tests, which reads tables of state transitions from the module documentation of source files.

#![allow(clippy::unwrap_used, reason = "tests fail by it")]

/// Returns a table from the module documentation in `source`: the titles of its columns, and its rows. A row is a state and the
/// cells after the state. `number` counts the tables of the documentation, from 0.
#[track_caller]
pub fn table(source: &str, number: usize) -> (Vec<String>, Vec<(String, Vec<String>)>) {
    let head = source.lines().take_while(|line| line.starts_with("//!"));
    let text: Vec<&str> = head.map(|line| line.trim_start_matches("//!").trim()).collect();
    let mut tables = text
        .split(|line| !line.starts_with('|'))
        .filter(|rows| !rows.is_empty());
    let rows = tables.nth(number).unwrap();
    let cells = |row: &str| -> Vec<String> {
        let inner = row.trim_matches('|').split('|');
        inner
            .map(|cell| cell.replace('`', "").trim().to_owned())
            .collect()
    };
    let of_row = |row: &&str| {
        let mut cells = cells(row);
        (cells.remove(0), cells)
    };
    (
        cells(rows[0])[1..].to_vec(),
        rows[2..].iter().map(of_row).collect(),
    )
}
