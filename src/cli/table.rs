//! Tables for people: aligned columns without lines between them.

/// Table with a header.
#[derive(Debug)]
pub(super) struct TextTable {
    /// Whether each column is aligned to the right.
    are_right: Vec<bool>,
    rows: Vec<Vec<String>>,
}

/// Text between two columns.
const GAP: &str = "  ";

impl TextTable {
    /// Creates a table without rows. `titles` are the titles of the columns. A title that begins with `>` makes a
    /// column of numbers, aligned to the right; the `>` is not shown. All other columns are aligned to the left.
    pub(super) fn new(titles: &[&str]) -> Self {
        let shown = titles
            .iter()
            .map(|title| title.trim_start_matches('>').to_owned());
        Self {
            are_right: titles.iter().map(|title| title.starts_with('>')).collect(),
            rows: vec![shown.collect()],
        }
    }

    /// Appends a row. Missing cells are empty, and cells beyond the columns are left out.
    pub(super) fn push(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// Returns the table as lines without trailing spaces. If standard output is a terminal that is too narrow, each
    /// row becomes a paragraph.
    pub(super) fn render(&self) -> String {
        self.render_within(
            terminal_size::terminal_size_of(std::io::stdout()).map(|(width, _)| width.0.into()),
        )
    }

    /// Returns the table, or paragraphs if the table is wider than `width` characters.
    fn render_within(&self, width: Option<usize>) -> String {
        let table = self.render_table();
        let widest = table
            .lines()
            .map(|line| line.chars().count())
            .max()
            .unwrap_or_default();
        match width {
            Some(width) if widest > width => self.render_paragraphs(),
            _ => table,
        }
    }

    /// Returns each row as a paragraph. The paragraph has a line for each cell that is not empty, with the column's
    /// title before the cell.
    fn render_paragraphs(&self) -> String {
        let Some((titles, rows)) = self.rows.split_first() else {
            return String::new();
        };
        let margin = titles
            .iter()
            .map(|title| title.trim().chars().count())
            .max()
            .unwrap_or_default();
        let paragraph = |row: &Vec<String>| -> String {
            let cells = titles.iter().zip(row).filter(|(_, cell)| !cell.trim().is_empty());
            cells
                .map(|(title, cell)| format!("{:<margin$}{GAP}{}\n", title.trim(), cell.trim()))
                .collect()
        };
        rows.iter().map(paragraph).collect::<Vec<_>>().join("\n")
    }

    fn render_table(&self) -> String {
        let widths: Vec<usize> = (0..self.are_right.len())
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
        let cells = self.are_right.iter().zip(widths).enumerate();
        let padded: Vec<String> = cells
            .map(|(column, (is_right, width))| {
                let cell = row.get(column).map_or("", String::as_str);
                match is_right {
                    false => format!("{cell:<width$}"),
                    true => format!("{cell:>width$}"),
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
        let mut table = TextTable::new(&["WORKER", ">BLOCKS", "STATE"]);
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
    fn a_narrow_terminal_gets_paragraphs() {
        let mut table = TextTable::new(&["WORKER", ">BLOCKS", ""]);
        table.push(vec!["gpu-0".into(), "7".into(), String::new()]);
        table.push(vec!["gpu-1".into(), "12".into(), "x".into()]);
        assert_eq!(table.render_within(Some(18)), table.render_table());
        let lines = [
            "WORKER  gpu-0",
            "BLOCKS  7",
            "",
            "WORKER  gpu-1",
            "BLOCKS  12",
            "        x",
        ];
        assert_eq!(table.render_within(Some(10)), lines.join("\n") + "\n");
    }

    #[test]
    fn a_header_stands_alone() {
        assert_eq!(TextTable::new(&["A", ">B"]).render(), "A  B\n");
    }
}
