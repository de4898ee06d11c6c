//! Plot of the outcomes: the mean time to the first token, as a group of bars for each scenario.

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::outcome::PolicyOutcome;

/// Reason why the picture cannot be drawn.
#[derive(Debug, thiserror::Error)]
#[error("cannot draw: {0}")]
pub struct PlotError(String);

const WIDTH: u32 = 960;
const ROW_HEIGHT: u32 = 18;
const HEAD: u32 = 40;
const NAME_WIDTH: i32 = 190;
const FONT: &str = "sans-serif";

/// Draws the outcomes as SVG. A bar ends at the mean, and a thin line at the 99th percentile, both on a logarithmic axis.
///
/// # Errors
///
/// [`PlotError`] if the plotting library fails.
pub fn plot(outcomes: &[PolicyOutcome]) -> Result<String, PlotError> {
    let mut scenarios: Vec<&str> = outcomes.iter().map(|outcome| outcome.scenario.as_str()).collect();
    scenarios.dedup();
    let rows = u32::try_from(outcomes.len() + 2 * scenarios.len()).unwrap_or(u32::MAX);
    let mut picture = String::new();
    draw(
        &mut picture,
        (WIDTH, HEAD + rows.saturating_mul(ROW_HEIGHT)),
        outcomes,
        &scenarios,
    )
    .map_err(|error| PlotError(error.to_string()))?;
    Ok(picture)
}

fn draw(
    picture: &mut String,
    size: (u32, u32),
    outcomes: &[PolicyOutcome],
    scenarios: &[&str],
) -> Result<(), Box<dyn std::error::Error>> {
    let area = SVGBackend::with_string(picture, size).into_drawing_area();
    area.fill(&WHITE)?;
    let text = |size: i32| (FONT, size).into_font().color(&BLACK);
    area.draw_text(
        "Time to the first token: mean (bar) and 99th percentile (line), ms, logarithmic",
        &text(15),
        (10, 10),
    )?;
    let axis = Axis::of(outcomes);
    let right = text(12).pos(Pos::new(HPos::Right, VPos::Center));
    let left = text(12).pos(Pos::new(HPos::Left, VPos::Center));
    let row_height = i32::try_from(ROW_HEIGHT)?;
    let mut y = i32::try_from(HEAD)?;
    for scenario in scenarios {
        area.draw_text(scenario, &text(14), (10, y))?;
        y += row_height;
        for outcome in outcomes.iter().filter(|outcome| outcome.scenario == *scenario) {
            let middle = y + row_height / 2;
            area.draw_text(outcome.policy, &right, (NAME_WIDTH - 8, middle))?;
            let (mean, p99) = (
                axis.x(outcome.first_token_ms_mean),
                axis.x(outcome.first_token_ms_p99),
            );
            let line = vec![(NAME_WIDTH, middle), (p99, middle)];
            area.draw(&PathElement::new(line, RGBColor(150, 150, 150).stroke_width(1)))?;
            let bar = [(NAME_WIDTH, middle - 6), (mean, middle + 6)];
            area.draw(&Rectangle::new(bar, colour_of(outcome.policy).filled()))?;
            let label = format!(
                "{:.0} / {:.0}, {:.1} % hit",
                outcome.first_token_ms_mean,
                outcome.first_token_ms_p99,
                outcome.hit_rate * 100.0
            );
            area.draw_text(&label, &left, (p99.max(mean) + 6, middle))?;
            y += row_height;
        }
        y += row_height;
    }
    area.present()?;
    Ok(())
}

fn colour_of(policy: &str) -> RGBColor {
    match policy {
        policy if policy.starts_with("exact") => RGBColor(0, 114, 178),
        policy if policy.starts_with("matched") => RGBColor(204, 121, 167),
        policy if policy.starts_with("own guesses") => RGBColor(230, 159, 0),
        policy if policy.starts_with("first blocks") => RGBColor(0, 158, 115),
        _ => RGBColor(120, 120, 120),
    }
}

/// A logarithmic axis over all values.
struct Axis {
    least: f64,
    span: f64,
}

impl Axis {
    /// Width of the longest bar, in pixels. The labels stand to the right of the bars.
    const BAR_WIDTH: f64 = 560.0;

    fn of(outcomes: &[PolicyOutcome]) -> Self {
        let values = || {
            outcomes
                .iter()
                .flat_map(|outcome| [outcome.first_token_ms_mean, outcome.first_token_ms_p99])
        };
        let least = values().fold(f64::INFINITY, f64::min).max(1.0) / 2.0;
        let most = values().fold(least, f64::max);
        Self {
            least,
            span: (most / least).ln().max(f64::MIN_POSITIVE),
        }
    }

    #[allow(clippy::cast_possible_truncation, reason = "at most the width of the picture")]
    fn x(&self, value: f64) -> i32 {
        let share = ((value.max(self.least) / self.least).ln() / self.span).clamp(0.0, 1.0);
        NAME_WIDTH + (share * Self::BAR_WIDTH) as i32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(policy: &'static str, mean: f64, p99: f64) -> PolicyOutcome {
        PolicyOutcome {
            scenario: "one router".to_owned(),
            policy,
            requests: 1,
            hit_rate: 0.5,
            promised_rate: 0.5,
            computed_blocks: 1,
            first_token_ms_mean: mean,
            first_token_ms_p50: mean,
            first_token_ms_p99: p99,
        }
    }

    #[test]
    fn longer_times_have_longer_bars() {
        let outcomes = [
            outcome("exact answers", 100.0, 400.0),
            outcome("random", 300.0, 9000.0),
        ];
        let axis = Axis::of(&outcomes);
        let ends = [100.0, 300.0, 400.0, 9000.0].map(|value| axis.x(value));
        assert!(ends.is_sorted() && ends[0] > NAME_WIDTH, "{ends:?}");
        let picture = plot(&outcomes).unwrap();
        assert!(
            picture.starts_with("<svg") && picture.contains("exact answers"),
            "{picture}"
        );
        assert_eq!(
            picture.matches("<rect").count(),
            3,
            "a background and two bars: {picture}"
        );
    }
}
