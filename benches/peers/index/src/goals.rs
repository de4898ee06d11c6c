//! The project's goals for its index, compared with the measurements of this run.

use crate::contender::{self, Contender, Form, InMode, Kvatlas, Names, Shape, TwoTiers, row};
use crate::plans;
use crate::report::{Ledger, number};
use crate::scenario::latency::{find_figure, write_figure, writes};
use crate::scenario::memory::{self, FILLS};
use crate::scenario::{chat, floors, pauses};
use crate::workload::{Kind, Layout};

/// Goal for a figure.
#[derive(Debug, Clone)]
enum Rule {
    /// At most this multiple of the lowest figure of a peer. A peer is an index of another project.
    PeerAtMost(f64),
    /// At least this multiple of the highest figure of a peer.
    PeerAtLeast(f64),
    /// At most this value.
    Absolute(f64),
    /// At most this multiple of the named figure of kvatlas.
    OursAtMost(f64, &'static str),
    /// At most the named figure of kvatlas plus this number.
    OursPlus(f64, String),
}

/// Line of the table of goals.
#[derive(Debug, Clone)]
struct Goal {
    text: String,
    figure: String,
    /// Name of kvatlas's row from which the figure is taken.
    ours: String,
    /// Whether kvatlas is compared only with peers whose answers list every holder.
    lists_only: bool,
    rule: Rule,
}

impl Goal {
    fn new(text: &str, figure: String, rule: Rule) -> Self {
        Self {
            text: text.to_owned(),
            figure,
            ours: row::<Kvatlas>(Shape::Lean),
            lists_only: false,
            rule,
        }
    }

    /// Makes a goal for a figure that does not depend on the shape of answers, such as the time of a store.
    fn whole(text: &str, figure: String, rule: Rule) -> Self {
        Self {
            ours: Kvatlas::NAME.to_owned(),
            ..Self::new(text, figure, rule)
        }
    }

    /// Changes the goal, so that it is about answers that list every holder.
    fn of_lists(self) -> Self {
        Self {
            ours: row::<Kvatlas>(Shape::List),
            lists_only: true,
            ..self
        }
    }

    /// Returns the best peer, and its median.
    fn best_peer(&self, ledger: &Ledger) -> Option<(String, f64)> {
        let wants_greatest = matches!(self.rule, Rule::PeerAtLeast(_));
        let mut rows = contender::rows();
        rows.extend(contender::names());
        rows.into_iter()
            .filter(|row| !row.starts_with(Kvatlas::NAME))
            .filter(|row| !self.lists_only || row.ends_with("map"))
            .filter_map(|row| Some((ledger.spread(&self.figure, &row)?.median, row)))
            .filter(|(median, _)| median.is_finite())
            .max_by(|(one, _), (other, _)| {
                let order = one.total_cmp(other);
                if wants_greatest { order } else { order.reverse() }
            })
            .map(|(median, row)| (row, median))
    }

    /// Returns the line of the table; `None` if the run has not measured the figure.
    fn line(&self, ledger: &Ledger) -> Option<String> {
        let ours = ledger.spread(&self.figure, &self.ours)?.median;
        let peer = self.best_peer(ledger);
        let of_ours = |figure: &str| ledger.spread(figure, Kvatlas::NAME).map(|spread| spread.median);
        let peer_median = peer.as_ref().map(|(_, median)| *median);
        let (limit, goal) = match &self.rule {
            Rule::PeerAtMost(times) => (peer_median? * times, format!("≤ {times} × peer")),
            Rule::PeerAtLeast(times) => (peer_median? * times, format!("≥ {times} × peer")),
            Rule::Absolute(limit) => (*limit, format!("≤ {limit}")),
            Rule::OursAtMost(times, figure) => {
                let floor = of_ours(figure)?;
                (floor * times, format!("≤ {times} × {} ({figure})", number(floor)))
            }
            Rule::OursPlus(more, figure) => {
                let base = of_ours(figure)?;
                (base + more, format!("≤ {} + {more}", number(base)))
            }
        };
        let is_reached = match self.rule {
            Rule::PeerAtLeast(_) => ours >= limit,
            _ => ours <= limit,
        };
        let (peer, ratio) = peer.map_or_else(
            || ("–".to_owned(), "–".to_owned()),
            |(row, median)| (format!("{} ({row})", number(median)), number(ours / median)),
        );
        let reached = if is_reached { "yes" } else { "**no**" };
        Some(format!(
            "| {} | {peer} | {} | {ratio} | {goal} | {reached} |",
            self.text,
            number(ours)
        ))
    }
}

/// Prints the goals for all measured figures.
pub fn print(ledger: &Ledger) {
    let lines: Vec<String> = goals().iter().filter_map(|goal| goal.line(ledger)).collect();
    if lines.is_empty() {
        return;
    }
    println!("\n**Goals, by medians**\n");
    println!("| figure | best peer in this run | kvatlas | ratio | goal | reached |");
    println!("|---|---|---:|---:|---|---|");
    for line in lines {
        println!("{line}");
    }
}

fn goals() -> Vec<Goal> {
    [
        searches(),
        misses(),
        from_other_forms(),
        written(),
        mixed(),
        resident(),
    ]
    .concat()
}

fn native(layout: &Layout, kind: Kind) -> String {
    find_figure(layout, Form::Native, kind)
}

fn searches() -> Vec<Goal> {
    let half = || Rule::PeerAtMost(0.5);
    vec![
        Goal::new(
            "hit, depth 1024, one holder, 1M blocks, ns",
            native(&plans::DISTINCT, Kind::Hit),
            half(),
        ),
        Goal::new("the same, 5M blocks", native(&plans::LARGE, Kind::Hit), half()),
        Goal::new(
            "hit, depth 8192, 1M blocks",
            native(&plans::DEEP, Kind::Hit),
            Rule::PeerAtMost(0.1),
        ),
        Goal::new(
            "hit, 128 holders, as groups",
            native(&plans::ALL_SHARE, Kind::Hit),
            half(),
        ),
        Goal::new(
            "hit, 128 holders, as a full list",
            native(&plans::ALL_SHARE, Kind::Hit),
            half(),
        )
        .of_lists(),
        Goal::new(
            "partial, 1M blocks",
            native(&plans::DISTINCT, Kind::Partial),
            Rule::PeerAtMost(1.0),
        ),
        Goal::new(
            "partial, 5M blocks",
            native(&plans::LARGE, Kind::Partial),
            Rule::PeerAtMost(1.0),
        ),
    ]
}

fn misses() -> Vec<Goal> {
    let mut goals = vec![Goal::new(
        "miss, 1M blocks, ns",
        native(&plans::DISTINCT, Kind::Miss),
        Rule::Absolute(60.0),
    )];
    for layout in &plans::FAN_OUT {
        let text = format!("miss, {}", layout.name);
        goals.push(Goal::new(&text, native(layout, Kind::Miss), Rule::Absolute(60.0)));
    }
    goals
}

fn from_other_forms() -> Vec<Goal> {
    let hit = |form| find_figure(&plans::DISTINCT, form, Kind::Hit);
    vec![
        Goal::new(
            "hit from block hashes, depth 1024, ns",
            hit(Form::BlockHashes),
            Rule::OursAtMost(1.15, floors::ROLLING),
        ),
        Goal::new(
            "hit from tokens, depth 1024",
            hit(Form::Tokens),
            Rule::PeerAtMost(1.1),
        ),
    ]
}

fn written() -> Vec<Goal> {
    let figure = |what| write_figure(&plans::DISTINCT, what);
    let pause = || Rule::Absolute(1000.0);
    vec![
        Goal::whole("store, ns a block", figure(writes::STORE), Rule::PeerAtMost(1.0)),
        Goal::whole(
            "remove, ns a block",
            figure(writes::REMOVE),
            Rule::PeerAtMost(1.0),
        ),
        Goal::whole(
            "longest store event, 1024 blocks, processor time, µs",
            figure(writes::WORST_STORE[1]),
            pause(),
        ),
        Goal::whole("longest removal event", figure(writes::WORST_REMOVE[1]), pause()),
        Goal::whole(
            "longest query during writes, µs",
            pauses::LONGEST.to_owned(),
            pause(),
        ),
    ]
}

fn mixed() -> Vec<Goal> {
    let [_, (_, p99, _), _] = chat::PERCENTILES;
    let rate = |text, ours, times| Goal {
        ours,
        ..Goal::new(text, chat::RATE.to_owned(), Rule::PeerAtLeast(times))
    };
    vec![
        rate("chat, M operations a second", row::<Kvatlas>(Shape::Lean), 1.5),
        rate("the same, engine's names", row::<InMode<Names>>(Shape::Lean), 1.2),
        rate("the same, two tiers", row::<InMode<TwoTiers>>(Shape::Lean), 1.0),
        Goal::new("chat, find p99, ns", p99.to_owned(), Rule::PeerAtMost(1.0)),
    ]
}

fn resident() -> Vec<Goal> {
    let [million, five_millions, _] = FILLS;
    let mut goals = Vec::new();
    for (fill, size) in [(million, "1M"), (five_millions, "5M")] {
        let loaded = fill.figure("loaded");
        goals.push(Goal::whole(
            &format!("bytes a block, {size}"),
            loaded,
            Rule::Absolute(30.0),
        ));
        let removed = fill.figure("removed, trimmed");
        let rule = Rule::OursPlus(1.0, fill.figure("empty"));
        goals.push(Goal::whole(
            &format!("the same after removal, {size}"),
            removed,
            rule,
        ));
    }
    let further = memory::FURTHER.to_owned();
    goals.push(Goal::whole(
        "bytes for each further holder",
        further,
        Rule::Absolute(4.0),
    ));
    goals
}
