//! Scenarios A and F: the cost of a search, of a stored block and of a removed block, in an index that is filled in a
//! known way.
//!
//! Every repetition builds each index anew. Searches run in batches of a few different queries, each batch directly
//! after its queries are made. So the processor's cache has the queries, as when a real query arrives, but not the
//! index. A repetition's figure for searches is the median of its batches. An event stores or removes one whole
//! sequence. The figure for events is the total processor time of the applying thread.

use std::hint::black_box;
use std::time::Instant;

use crate::contender::{
    self, Binary, ChainIndex, CompressedTree, Contender, Form, Kvatlas, Positional, RadixTree, Reader, Run,
    Shape, SmgTree, Strided, Writer, row,
};
use crate::measure::{Applied, Spread, Timing, timer_cost_ns, trim_memory};
use crate::oracle::Oracle;
use crate::report::{Column, Ledger};
use crate::workload::{Kind, Layout, Prompt, shuffled};

use super::{Effort, progress, rotated};

/// Number of events that are made together. Making them is not timed; applying them is.
const EVENTS_AT_ONCE: usize = 64;

/// A layout of the index, and the queries that are measured with it.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Layout with which the index is filled.
    pub layout: Layout,
    /// Kinds of queries.
    pub kinds: &'static [Kind],
    /// Forms of queries.
    pub forms: &'static [Form],
    /// Maximum number of different queries of a kind.
    pub questions_max: usize,
}

/// Query, and its right answer.
struct Question {
    prompt: Prompt,
    expected: Vec<(u32, u32)>,
}

/// Prompts and queries of one plan. They are the same for all contenders.
struct Work<'a> {
    plan: &'a Plan,
    repetition: usize,
    prompts: Vec<Prompt>,
    questions: Vec<(Kind, Vec<Question>)>,
}

type Measure = fn(&Work<'_>, &mut Ledger);

const CONTENDERS: [Measure; 7] = [
    measure::<Kvatlas>,
    measure::<ChainIndex>,
    measure::<SmgTree>,
    measure::<CompressedTree>,
    measure::<Positional<Strided>>,
    measure::<Positional<Binary>>,
    measure::<RadixTree>,
];

/// Returns the name of the figure for searches.
pub fn find_figure(layout: &Layout, form: Form, kind: Kind) -> String {
    format!("{}, {}, {}", layout.name, form.as_str(), kind.as_str())
}

/// Returns the name of the figure for the first search for a prompt that is held. `form` is a form of query that the
/// search has to hash.
pub fn first_figure(layout: &Layout, form: Form) -> String {
    format!("{}, {}, hit, asked first", layout.name, form.as_str())
}

/// Returns the name of the figure for the second search for the same prompt. An index may keep the hashes of a prompt
/// from the first search.
pub fn second_figure(layout: &Layout, form: Form) -> String {
    format!("{}, {}, hit, asked again", layout.name, form.as_str())
}

/// Returns the name of the figure for writes. `what` is one of the constants in [`writes`].
pub fn write_figure(layout: &Layout, what: &str) -> String {
    format!("{}, {what}", layout.name)
}

/// Parts of the names of figures for writes.
pub mod writes {
    /// Nanoseconds for each stored block.
    pub const STORE: &str = "store";
    /// Nanoseconds for each removed block.
    pub const REMOVE: &str = "remove";
    /// Microseconds of the longest store event, by the wall clock and in processor time.
    pub const WORST_STORE: [&str; 2] = ["worst store", "worst store, processor"];
    /// Microseconds of the longest removal event, by the wall clock and in processor time.
    pub const WORST_REMOVE: [&str; 2] = ["worst remove", "worst remove, processor"];
}

/// Runs every plan for every contender.
pub fn run(plans: &[Plan], effort: Effort, ledger: &mut Ledger) {
    for plan in plans {
        let mut work = prepare(plan);
        for repetition in 0..effort.repetitions {
            progress(&format!("{}: repetition {}", plan.layout.name, repetition + 1));
            work.repetition = repetition;
            for number in rotated(CONTENDERS.len(), repetition) {
                CONTENDERS[number](&work, ledger);
                trim_memory();
            }
        }
    }
}

fn prepare(plan: &Plan) -> Work<'_> {
    let layout = &plan.layout;
    let prompts: Vec<Prompt> = (0..layout.sequences())
        .map(|number| layout.prompt(number))
        .collect();
    let mut oracle = Oracle::default();
    for (number, holder) in layout.holdings() {
        oracle.store(holder, &prompts[number as usize].sequence);
    }
    let asked: Vec<usize> = shuffled(prompts.len(), 1)
        .into_iter()
        .take(plan.questions_max)
        .collect();
    let question = |kind: Kind, number: usize| {
        let fresh = u32::try_from(number).expect("there are fewer sequences than that");
        let prompt = kind.ask(&prompts[number], fresh);
        let expected = oracle.answer(&prompt.sequence);
        Question { prompt, expected }
    };
    let questions = plan
        .kinds
        .iter()
        .map(|&kind| (kind, asked.iter().map(|&number| question(kind, number)).collect()))
        .collect();
    Work {
        plan,
        repetition: 0,
        prompts,
        questions,
    }
}

fn measure<C: Contender>(work: &Work<'_>, ledger: &mut Ledger) {
    let layout = &work.plan.layout;
    let (reader, mut writer) = C::build(layout.workers);
    let stored = store_all::<C>(work, &mut writer);
    record_writes::<C>(work, ledger, &stored, writes::STORE, writes::WORST_STORE);
    for &form in work.plan.forms {
        for (kind, questions) in &work.questions {
            for (number, &(shape, _)) in <C::Reader as Reader>::SHAPES.iter().enumerate() {
                let figure = find_figure(layout, form, *kind);
                let row = row::<C>(shape);
                let [first, second, later] = time_searches(&reader, questions, form, shape, work.repetition);
                ledger.record(&figure, &row, later);
                // Hits are searched before prompts that begin in the same way.
                if form != Form::Native && *kind == Kind::Hit && number == 0 {
                    ledger.record(&first_figure(layout, form), &row, first);
                    ledger.record(&second_figure(layout, form), &row, second);
                }
                for question in questions {
                    let mut query = C::Reader::query(form, &question.prompt);
                    let is_right = reader.answer(&mut query, shape) == question.expected;
                    ledger.judge(&figure, &row, is_right);
                }
            }
        }
    }
    let removed = remove_all::<C>(work, &mut writer);
    record_writes::<C>(work, ledger, &removed, writes::REMOVE, writes::WORST_REMOVE);
    for (kind, questions) in &work.questions {
        for question in questions.iter().filter(|_| *kind == Kind::Hit) {
            let mut query = C::Reader::query(Form::Native, &question.prompt);
            let is_right = reader.answer(&mut query, Shape::List).is_empty();
            ledger.judge("after removal", &row::<C>(Shape::List), is_right);
        }
    }
}

/// Returns the nanoseconds of a search for a prompt, in three cases: the prompt is asked for the first time, the second
/// time, and later.
fn time_searches<R: Reader>(
    reader: &R,
    questions: &[Question],
    form: Form,
    shape: Shape,
    repetition: usize,
) -> [f64; 3] {
    let depth = questions
        .first()
        .map_or(0, |question| question.prompt.blocks.len());
    // A batch of queries fits into the second-level cache.
    let batch = match form {
        Form::Native | Form::BlockHashes => (16_384 / depth.max(1)).clamp(2, 16),
        Form::Tokens => (4_096 / depth.max(1)).clamp(1, 16),
    };
    let passes = if form == Form::Tokens {
        2
    } else {
        1024_usize.div_ceil(questions.len()).max(3)
    };
    // The first two passes are counted separately. They fill the caches, and whatever an index remembers of queries.
    let mut times = [Vec::new(), Vec::new(), Vec::new()];
    for pass in 0..=passes {
        let order = shuffled(questions.len(), (repetition * (passes + 1) + pass) as u64 + 2);
        for asked in order.chunks(batch) {
            let mut queries: Vec<R::Query> = asked
                .iter()
                .map(|&number| R::query(form, &questions[number].prompt))
                .collect();
            let started = Instant::now();
            for query in &mut queries {
                black_box(reader.find(query, shape));
            }
            let elapsed = started.elapsed().as_nanos() as f64 - timer_cost_ns();
            times[pass.min(2)].push(elapsed / queries.len() as f64);
        }
    }
    times.map(|times| Spread::of(&times).map_or(f64::NAN, |spread| spread.median))
}

fn store_all<C: Contender>(work: &Work<'_>, writer: &mut C::Writer) -> Applied {
    let mut applied = Applied::default();
    for holdings in work.plan.layout.holdings().chunks(EVENTS_AT_ONCE) {
        let events = holdings.iter().map(|&(number, holder)| {
            let prompt = &work.prompts[number as usize];
            let run = Run {
                parent: None,
                position: 0,
                blocks: &prompt.blocks,
                sequence: &prompt.sequence,
            };
            C::Writer::stored(holder, run)
        });
        applied.add(&writer.apply(events.collect(), Timing::Each));
    }
    applied
}

/// Removes all sequences in a random order. Each removal names the last block first.
fn remove_all<C: Contender>(work: &Work<'_>, writer: &mut C::Writer) -> Applied {
    let holdings = work.plan.layout.holdings();
    let mut applied = Applied::default();
    for numbers in shuffled(holdings.len(), 7).chunks(EVENTS_AT_ONCE) {
        let events = numbers.iter().map(|&number| {
            let (sequence, holder) = holdings[number];
            let mut hashes = work.prompts[sequence as usize].sequence.clone();
            hashes.reverse();
            C::Writer::removed(holder, &hashes)
        });
        applied.add(&writer.apply(events.collect(), Timing::Each));
    }
    applied
}

fn record_writes<C: Contender>(
    work: &Work<'_>,
    ledger: &mut Ledger,
    applied: &Applied,
    what: &str,
    worst: [&str; 2],
) {
    let layout = &work.plan.layout;
    let blocks = f64::from(layout.depth) * layout.holdings().len() as f64;
    let micros = |time: std::time::Duration| time.as_nanos() as f64 / 1e3;
    let per_block = applied.processor.as_nanos() as f64 / blocks;
    ledger.record(&write_figure(layout, what), C::NAME, per_block);
    ledger.record(
        &write_figure(layout, worst[0]),
        C::NAME,
        micros(applied.worst_wall),
    );
    ledger.record(
        &write_figure(layout, worst[1]),
        C::NAME,
        micros(applied.worst_processor),
    );
    if applied.refused > 0 {
        progress(&format!("{}: refused {} events", C::NAME, applied.refused));
    }
}

/// Prints the tables of `plans`: first a table of searches for each form of query, and then a table of writes.
pub fn print(title: &str, plans: &[Plan], ledger: &Ledger) {
    let rows = contender::rows();
    for form in Form::ALL {
        for plan in plans.iter().filter(|plan| plan.forms.contains(&form)) {
            let first = (form != Form::Native).then(|| {
                [
                    Column::new("hit, asked first", first_figure(&plan.layout, form)),
                    Column::new("asked again", second_figure(&plan.layout, form)),
                ]
            });
            let kinds = plan.kinds.iter();
            let columns: Vec<Column> = kinds
                .map(|&kind| Column::new(kind.as_str(), find_figure(&plan.layout, form, kind)))
                .chain(first.into_iter().flatten())
                .collect();
            let heading = format!(
                "{title}. {}. Search, ns, from {}",
                plan.layout.name,
                form.as_str()
            );
            ledger.print(&heading, &rows, &columns);
        }
    }
    for plan in plans {
        let column = |heading: &str, what: &str| Column::new(heading, write_figure(&plan.layout, what));
        let columns = [
            column("store, ns a block", writes::STORE),
            column("remove, ns a block", writes::REMOVE),
            column("longest store event, µs", writes::WORST_STORE[0]),
            column("in processor time", writes::WORST_STORE[1]),
            column("longest removal event, µs", writes::WORST_REMOVE[0]),
            column("in processor time", writes::WORST_REMOVE[1]),
        ];
        ledger.print(
            &format!(
                "{title}. {}. Writes, events of {} blocks",
                plan.layout.name, plan.layout.depth
            ),
            &contender::names(),
            &columns,
        );
    }
}
