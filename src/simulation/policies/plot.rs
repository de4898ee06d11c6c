//! Plot of the outcomes: the mean time to the first token, as a group of bars for each scenario.

use super::outcome::PolicyOutcome;

const WIDTH: usize = 960;
const ROW_HEIGHT: usize = 18;
const HEAD: usize = 40;
const NAME_WIDTH: i32 = 190;
const TITLE: &str = "Time to the first token: mean (bar) and 99th percentile (line), ms, logarithmic";

/// Draws the outcomes as SVG. A bar ends at the mean, and a thin line at the 99th percentile, both on a logarithmic axis.
pub fn plot(outcomes: &[PolicyOutcome]) -> String {
    let mut scenarios: Vec<&str> = outcomes.iter().map(|outcome| outcome.scenario.as_str()).collect();
    scenarios.dedup();
    let height = HEAD + ROW_HEIGHT * (outcomes.len() + 2 * scenarios.len());
    let mut picture = format!(
        r##"<svg width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" xmlns="http://www.w3.org/2000/svg" font-family="sans-serif">
<rect width="{WIDTH}" height="{height}" fill="#FFFFFF"/>
<text x="10" y="10" dy="0.76em" font-size="12.1">{TITLE}</text>
"##
    );
    let axis = Axis::of(outcomes);
    let mut y = HEAD;
    for scenario in scenarios {
        picture += &format!("<text x=\"10\" y=\"{y}\" dy=\"0.76em\" font-size=\"11.3\">{scenario}</text>\n");
        y += ROW_HEIGHT;
        for outcome in outcomes.iter().filter(|outcome| outcome.scenario == scenario) {
            picture += &row(outcome, &axis, y + ROW_HEIGHT / 2);
            y += ROW_HEIGHT;
        }
        y += ROW_HEIGHT;
    }
    picture + "</svg>\n"
}

/// Draws the row of one outcome around the height `y`: the policy's name, the line, the bar, and the figures.
fn row(outcome: &PolicyOutcome, axis: &Axis, y: usize) -> String {
    let (mean, p99) = (outcome.first_token_ms_mean, outcome.first_token_ms_p99);
    let (policy, hits) = (outcome.policy, outcome.hit_rate * 100.0);
    let (name_end, bar_top) = (NAME_WIDTH - 8, y - 6);
    let (mean_end, p99_end) = (axis.x(mean), axis.x(p99));
    let (bar_width, colour) = (mean_end - NAME_WIDTH, colour_of(policy));
    let figures = mean_end.max(p99_end) + 6;
    format!(
        r##"<text x="{name_end}" y="{y}" dy="0.5ex" text-anchor="end" font-size="9.7">{policy}</text>
<path d="M{NAME_WIDTH} {y}H{p99_end}" stroke="#969696"/>
<rect x="{NAME_WIDTH}" y="{bar_top}" width="{bar_width}" height="12" fill="{colour}"/>
<text x="{figures}" y="{y}" dy="0.5ex" font-size="9.7">{mean:.0} / {p99:.0}, {hits:.1} % hit</text>
"##
    )
}

fn colour_of(policy: &str) -> &'static str {
    match policy {
        policy if policy.starts_with("exact") => "#0072B2",
        policy if policy.starts_with("matched") => "#CC79A7",
        policy if policy.starts_with("own guesses") => "#E69F00",
        policy if policy.starts_with("first blocks") => "#009E73",
        _ => "#787878",
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
        let picture = plot(&outcomes);
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
