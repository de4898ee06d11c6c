//! Tables for people: aligned columns, no lines between them.

/// On which side of its column a cell stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    /// For words.
    Left,
    /// For numbers.
    Right,
}

/// A table under a header.
#[derive(Debug)]
pub(super) struct Table {
    sides: Vec<Side>,
    rows: Vec<Vec<String>>,
}

/// What stands between two columns.
const GAP: &str = "  ";

impl Table {
    /// A table with these columns and no rows.
    pub(super) fn new(columns: &[(&str, Side)]) -> Self {
        Self {
            sides: columns.iter().map(|(_, side)| *side).collect(),
            rows: vec![columns.iter().map(|(title, _)| (*title).to_owned()).collect()],
        }
    }

    /// Appends a row; a missing cell is empty, and one beyond the columns is left out.
    pub(super) fn push(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// The table, each line with a line feed and without trailing spaces.
    pub(super) fn render(&self) -> String {
        let widths: Vec<usize> = (0..self.sides.len())
            .map(|column| {
                self.rows
                    .iter()
                    .map(|row| width(row, column))
                    .max()
                    .unwrap_or_default()
            })
            .collect();
        self.rows
            .iter()
            .map(|row| self.render_row(row, &widths))
            .collect()
    }

    fn render_row(&self, row: &[String], widths: &[usize]) -> String {
        let cells = self.sides.iter().zip(widths).enumerate();
        let padded: Vec<String> = cells
            .map(|(column, (side, width))| {
                let cell = row.get(column).map_or("", String::as_str);
                match side {
                    Side::Left => format!("{cell:<width$}"),
                    Side::Right => format!("{cell:>width$}"),
                }
            })
            .collect();
        format!("{}\n", padded.join(GAP).trim_end())
    }
}

fn width(row: &[String], column: usize) -> usize {
    row.get(column).map_or(0, |cell| cell.chars().count())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_lines_end_with_their_text() {
        let mut table = Table::new(&[
            ("WORKER", Side::Left),
            ("BLOCKS", Side::Right),
            ("STATE", Side::Left),
        ]);
        table.push(vec!["a".into(), "7".into(), "exact".into()]);
        table.push(vec!["a-long-name".into(), "12345678".into()]);
        let lines = [
            "WORKER         BLOCKS  STATE",
            "a                   7  exact",
            "a-long-name  12345678",
        ];
        assert_eq!(table.render(), lines.join("\n") + "\n");
    }

    #[test]
    fn a_header_stands_alone() {
        assert_eq!(
            Table::new(&[("A", Side::Left), ("B", Side::Right)]).render(),
            "A  B\n"
        );
    }
}
