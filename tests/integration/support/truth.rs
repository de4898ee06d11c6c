//! Truth about the blocks of holders, by which scenarios with faults judge the replies of a daemon.
//!
//! The truth keeps every state that a holder was ever in. A reply to a query may show any state of the query's
//! *window*. The window begins with the *floor*: the newest state of each holder that the daemon is known to have seen
//! when the query was sent. The window ends with the newest state at the time of the reply.
//!
//! - A reply is **wrong** if it marks a holder exact and claims more blocks, or fewer, than the holder had in any state
//!   of the window.
//! - A reply is **blind** if it names no holder although some holder had the first block during the whole window.
//! - A claim that is marked degraded may be anything. There is one exception. If the only reason is that the index has
//!   no room (`capacity`), the holder has at least the claimed blocks. Then a claim above every state of the window is
//!   **wrong**, too.
//!
//! ```text
//! let truth = Truth::default();
//! truth.apply("gpu-0", 0, cursor, &events);      // before the batch leaves
//! let window = truth.window();                   // before a query is asked
//! let reply = client.ask_with(query).await;
//! tally.count(truth.judge(&window, &chain, reply.as_ref()));
//! truth.raise_floors(&client.status().await?);   // now and then: what the daemon has applied can't be un-applied
//! ```

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops::Range;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use kvatlas_client::ClientError;
use kvatlas_core::hash::SequenceHash;
use kvatlas_core::wire::{
    BatchCursor, BlockNames, DegradedReason, DegradedReasons, Event, HolderMatch, QueryReply, RemovedBlocks,
    StatusReply, StoredBlocks,
};

use super::{Client, PATIENCE};

/// Prefix of the names of hostile workers. A hostile worker may claim anything, so replies are judged without these
/// workers.
pub const HOSTILE: &str = "hostile-";

/// Names a holder by its worker and rank.
pub type Holder = (String, u32);

/// Number of the version at which a block changed, and whether the holder has the block from then on.
type Change = (usize, bool);

/// All states of one holder, numbered as versions. Version 0 is the empty state before the first batch.
#[derive(Debug, Default)]
struct History {
    changes: HashMap<SequenceHash, Vec<Change>>,
    held: HashMap<SequenceHash, ()>,
    /// Numbers of the versions whose batch emptied the holder: by a clear, by a goodbye, or because the numbers of the
    /// batches began again. The daemon applies a batch block by block, so a query may see the holder empty.
    emptied: Vec<usize>,
    /// Cursor of each batch, in order. Batch number `n`, counted from 1, made version `n`.
    cursors: Vec<BatchCursor>,
    floor: usize,
}

impl History {
    fn head(&self) -> usize {
        self.cursors.len()
    }

    fn set(&mut self, hash: SequenceHash, is_held: bool) {
        let before = if is_held {
            self.held.insert(hash, ())
        } else {
            self.held.remove(&hash)
        };
        if before.is_some() != is_held {
            let version = self.head();
            self.changes.entry(hash).or_default().push((version, is_held));
        }
    }

    fn clear(&mut self) {
        let held: Vec<SequenceHash> = self.held.keys().copied().collect();
        held.into_iter().for_each(|hash| self.set(hash, false));
        self.emptied.push(self.head());
    }

    fn apply(&mut self, cursor: BatchCursor, events: &[Event]) {
        // A batch of a replaced epoch has no effect.
        if self.cursors.last().is_some_and(|last| cursor.epoch < last.epoch) {
            return;
        }
        // A higher epoch begins with no blocks, and so does a publisher whose numbers begin again.
        let begins_anew = self
            .cursors
            .last()
            .is_some_and(|last| cursor.epoch > last.epoch || cursor.seq <= last.seq);
        self.cursors.push(cursor);
        if begins_anew {
            self.clear();
        }
        for event in events {
            match event {
                Event::Stored(StoredBlocks {
                    names: BlockNames::Sequence { hashes, .. },
                    ..
                }) => hashes.iter().for_each(|hash| self.set(*hash, true)),
                Event::Removed(RemovedBlocks { hashes, .. }) => {
                    hashes.iter().for_each(|hash| self.set(*hash, false));
                }
                Event::Cleared | Event::Goodbye => self.clear(),
                Event::Resumable(_) | Event::Doubted(_) => {}
                Event::Stored(_) => panic!("the truth knows blocks by their sequence hashes"),
            }
        }
    }

    fn changes_of(&self, hash: SequenceHash) -> &[Change] {
        self.changes.get(&hash).map(Vec::as_slice).unwrap_or_default()
    }

    fn matched(&self, chain: &[SequenceHash], version: usize) -> u32 {
        let held = chain
            .iter()
            .take_while(|hash| is_held(self.changes_of(**hash), version));
        u32::try_from(held.count()).unwrap()
    }

    /// Returns the smallest and the largest number of leading blocks of `chain` that the holder had in any state from
    /// `floor` on.
    ///
    /// The chain is walked block by block. At each block, `spans` has the states in which the holder had all blocks up
    /// to this block.
    fn bounds(&self, chain: &[SequenceHash], floor: usize) -> (u32, u32) {
        let end = self.head() + 1;
        let all = floor..end;
        let mut spans = vec![all.clone()];
        let mut least = None;
        for (depth, hash) in (0..).zip(chain) {
            spans = overlap(&spans, held_spans(self.changes_of(*hash), floor, end));
            let is_held_throughout = spans.first() == Some(&all);
            if !is_held_throughout && least.is_none() {
                least = Some(depth);
            }
            if spans.is_empty() {
                return (least.unwrap_or(depth), depth);
            }
        }
        let most = u32::try_from(chain.len()).unwrap();
        (least.unwrap_or(most), most)
    }

    /// Returns the same bounds as [`Self::bounds`], except for a holder that a batch has emptied since `floor`. Its
    /// smallest number is 0, because a query can see the holder before the batch has filled it again.
    fn visible_bounds(&self, chain: &[SequenceHash], floor: usize) -> (u32, u32) {
        let (least, most) = self.bounds(chain, floor);
        let is_emptied = self.emptied.last().is_some_and(|version| *version > floor);
        (if is_emptied { 0 } else { least }, most)
    }

    /// Returns the number of the newest version whose batch is not later than `cursor`.
    fn version_at(&self, cursor: BatchCursor) -> usize {
        let seen = self.cursors.iter().rposition(|made| *made <= cursor);
        seen.map_or(0, |index| index + 1)
    }
}

/// Whether a block with these changes is held at `version`.
fn is_held(changes: &[Change], version: usize) -> bool {
    let after = changes.partition_point(|(since, _)| *since <= version);
    after.checked_sub(1).is_some_and(|last| changes[last].1)
}

/// Returns the ranges of versions, from `floor` to before `end`, in which a block with these changes is held.
fn held_spans(changes: &[Change], floor: usize, end: usize) -> impl Iterator<Item = Range<usize>> {
    let before = changes.partition_point(|(since, _)| *since <= floor);
    let changes = &changes[before.saturating_sub(1)..];
    let spans = changes.iter().enumerate().filter(|(_, (_, is_held))| *is_held);
    spans.map(move |(index, (since, _))| {
        let until = changes.get(index + 1).map_or(end, |(until, _)| *until);
        floor.max(*since)..until
    })
}

/// Returns the overlap of `spans` and `others` in as few spans as possible. Both arguments must be ascending.
fn overlap(spans: &[Range<usize>], others: impl Iterator<Item = Range<usize>>) -> Vec<Range<usize>> {
    let mut both: Vec<Range<usize>> = Vec::new();
    let mut rest = spans;
    for other in others.filter(|other| !other.is_empty()) {
        rest = &rest[rest.partition_point(|span| span.end <= other.start)..];
        for span in rest.iter().take_while(|span| span.start < other.end) {
            let (start, end) = (span.start.max(other.start), span.end.min(other.end));
            match both.last_mut() {
                // A block that is removed and stored within one version is held before and after it.
                Some(last) if last.end == start => last.end = end,
                _ => both.push(start..end),
            }
        }
    }
    both
}

/// All states of every holder: the blocks that the holder really had, and when.
#[derive(Default)]
pub struct Truth(Mutex<BTreeMap<Holder, History>>);

/// Start of a query's window: for each holder, the number of the oldest state that an exact reply may show.
#[derive(Debug, Clone, Default)]
pub struct Window(HashMap<Holder, usize>);

/// Judgement of a reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The reply marks every holder exact, and rightly so. Also the verdict on an error while no holder needs to be
    /// named.
    Exact,
    /// The reply marks some holder degraded. All its exact marks are right.
    Degraded,
    /// The reply marks some holder degraded, but only for reasons that concern the moment of the query: a batch was
    /// being applied, or events were waiting.
    Momentary,
    /// The reply claims too many or too few blocks of a holder that it marks exact, or too many blocks of a holder that
    /// is inexact only for lack of room. The text names the holder.
    Wrong(String),
    /// The reply is an error or names no holder, although one holder had the first block during the whole window. The
    /// text names this holder.
    Blind(String),
}

impl Truth {
    /// Applies a holder's batch, and returns the version that it makes. Call this before the batch can reach a daemon.
    pub fn apply(&self, worker: &str, rank: u32, cursor: BatchCursor, events: &[Event]) -> usize {
        let mut holders = self.0.lock().unwrap();
        let history = holders.entry((worker.to_owned(), rank)).or_default();
        history.apply(cursor, events);
        history.head()
    }

    /// Raises the floor as [`Self::raise_floor`] does, to a version that [`Self::apply`] has returned.
    pub fn raise_floor_to(&self, holder: &Holder, version: usize) {
        let mut holders = self.0.lock().unwrap();
        if let Some(history) = holders.get_mut(holder) {
            history.floor = history.floor.max(version);
        }
    }

    /// Raises the floor of a holder: from now on, an exact answer must not show a state from before `cursor`.
    pub fn raise_floor(&self, worker: &str, rank: u32, cursor: BatchCursor) {
        let mut holders = self.0.lock().unwrap();
        if let Some(history) = holders.get_mut(&(worker.to_owned(), rank)) {
            history.floor = history.floor.max(history.version_at(cursor));
        }
    }

    /// Raises every floor (the oldest state that an exact answer may show) to the state that a daemon has applied. If
    /// there are several daemons, `status` must be that of the slowest.
    pub fn raise_floors(&self, status: &StatusReply) {
        for holder in &status.holders {
            let cursor = BatchCursor {
                epoch: holder.epoch,
                seq: holder.seq,
            };
            self.raise_floor(holder.worker.as_str(), holder.rank, cursor);
        }
    }

    /// Returns the window of a query that is sent now.
    pub fn window(&self) -> Window {
        let holders = self.0.lock().unwrap();
        Window(
            holders
                .iter()
                .map(|(id, history)| (id.clone(), history.floor))
                .collect(),
        )
    }

    /// Judges the reply to a query about `chain`. `window` must have been taken just before the query was sent.
    pub fn judge(
        &self,
        window: &Window,
        chain: &[SequenceHash],
        reply: Result<&QueryReply, &ClientError>,
    ) -> Verdict {
        let holders = self.0.lock().unwrap();
        let floor = |id: &Holder| window.0.get(id).copied().unwrap_or_default();
        let first = chain.get(..1).unwrap_or_default();
        let always_there = holders
            .iter()
            .find(|(id, history)| history.bounds(first, floor(id)).0 > 0)
            .map(|(id, _)| id);
        let reply = match (reply, always_there) {
            (Err(error), Some(id)) => return Verdict::Blind(format!("{id:?} has it, but: {error}")),
            // No holder need have the block, so an error is as good as an empty list.
            (Err(_), None) => return Verdict::Exact,
            (Ok(reply), Some(id)) if honest(reply).next().is_none() => {
                return Verdict::Blind(format!("{id:?} has it, but nobody is named"));
            }
            (Ok(reply), _) => reply,
        };
        for found in honest(reply).filter(|found| promises_something(found)) {
            let id = (found.worker.to_string(), found.rank);
            let (least, most) = holders
                .get(&id)
                .map_or((0, 0), |history| history.visible_bounds(chain, floor(&id)));
            let is_too_little = found.exact && found.matched_blocks < least;
            if is_too_little || found.matched_blocks > most {
                let (claimed, word) = (
                    found.matched_blocks,
                    if found.exact { "exact" } else { "capacity" },
                );
                return Verdict::Wrong(format!(
                    "{id:?} has {least} to {most} blocks, {word} says {claimed}"
                ));
            }
        }
        // While a holder's first batch is applied, the holder is not verified yet.
        let is_momentary = |degraded: DegradedReasons| {
            let is_first = degraded.contains(DegradedReason::Changing);
            let of_first = degraded.without(DegradedReason::Unverified);
            degraded.are_of_the_moment() || is_first && of_first.are_of_the_moment()
        };
        if honest(reply).all(|found| found.exact) {
            Verdict::Exact
        } else if honest(reply).all(|found| found.exact || is_momentary(found.degraded)) {
            Verdict::Momentary
        } else {
            Verdict::Degraded
        }
    }

    /// Returns the holders of `chain` at present, as a reply must list them.
    pub fn expected(&self, chain: &[SequenceHash]) -> Vec<(String, u32, u32)> {
        let holders = self.0.lock().unwrap();
        let mut expected: Vec<_> = holders
            .iter()
            .map(|((worker, rank), history)| (worker.clone(), *rank, history.matched(chain, history.head())))
            .filter(|(_, _, matched)| *matched > 0)
            .collect();
        // The order is by depth, then by worker and rank, which the map keeps.
        expected.sort_by_key(|(_, _, matched)| std::cmp::Reverse(*matched));
        expected
    }

    /// Describes the first holder in a reply that is neither right nor short only for lack of room; `None` if there is
    /// no such holder. A holder is right if it is marked exact and has the present number of blocks. It is short for
    /// lack of room if `capacity` is the only reason for doubt and the claim does not exceed the present number.
    pub fn excess(&self, chain: &[SequenceHash], reply: &QueryReply) -> Option<String> {
        let expected: HashMap<_, _> = self
            .expected(chain)
            .into_iter()
            .map(|(worker, rank, matched)| ((worker, rank), matched))
            .collect();
        let is_right = |holder: &&HolderMatch| {
            let id = (holder.worker.to_string(), holder.rank);
            let has = expected.get(&id).copied().unwrap_or_default();
            match holder.exact {
                true => holder.matched_blocks == has,
                false => promises_something(holder) && holder.matched_blocks <= has,
            }
        };
        let wrong = honest(reply).find(|holder| !is_right(holder))?;
        Some(format!("expected {expected:?}, found {wrong:?}"))
    }

    /// Describes how a reply differs from the present truth; `None` if the reply has exactly the true holders, each
    /// with the right number of blocks and marked exact.
    pub fn difference(&self, chain: &[SequenceHash], reply: &QueryReply) -> Option<String> {
        let expected = self.expected(chain);
        let found: Vec<_> = honest(reply).map(found).collect();
        let is_exact = honest(reply).all(|holder| holder.exact);
        (found != expected || !is_exact)
            .then(|| format!("expected {expected:?}, all exact; found {:?}", reply.holders))
    }
}

/// Returns the holders of a reply without those of hostile workers.
fn honest(reply: &QueryReply) -> impl Iterator<Item = &HolderMatch> {
    let is_honest = |holder: &&HolderMatch| !holder.worker.as_str().starts_with(HOSTILE);
    reply.holders.iter().filter(is_honest)
}

/// Whether the reply states at least a lower bound for this holder: the holder is exact, or inexact only because the
/// index has no room.
fn promises_something(found: &HolderMatch) -> bool {
    found.exact || found.degraded == DegradedReasons::of(DegradedReason::Capacity)
}

fn found(holder: &HolderMatch) -> (String, u32, u32) {
    (holder.worker.to_string(), holder.rank, holder.matched_blocks)
}

/// Counts of the replies in a scenario, by verdict.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Tally {
    pub asked: u64,
    pub exact: u64,
    pub degraded: u64,
    /// Number of the degraded replies whose verdict was [`Verdict::Momentary`].
    pub momentary: u64,
    pub wrong: u64,
    pub blind: u64,
    /// Descriptions of the first few wrong replies.
    pub examples: Vec<String>,
    /// Descriptions of the first few blind replies.
    pub blind_examples: Vec<String>,
    /// Time from the end of the faults until every reply equalled the truth, as the scenario's last wait measured it.
    pub time_to_exactness: Option<Duration>,
}

impl Tally {
    const EXAMPLES_MAX: usize = 5;

    pub fn count(&mut self, verdict: Verdict) {
        self.asked += 1;
        let (examples, example) = match verdict {
            Verdict::Exact => {
                self.exact += 1;
                return;
            }
            Verdict::Degraded | Verdict::Momentary => {
                self.degraded += 1;
                self.momentary += u64::from(verdict == Verdict::Momentary);
                return;
            }
            Verdict::Wrong(text) => {
                self.wrong += 1;
                (&mut self.examples, text)
            }
            Verdict::Blind(text) => {
                self.blind += 1;
                (&mut self.blind_examples, text)
            }
        };
        if examples.len() < Self::EXAMPLES_MAX {
            examples.push(example);
        }
    }

    pub fn add(&mut self, other: Self) {
        self.asked += other.asked;
        self.exact += other.exact;
        self.degraded += other.degraded;
        self.momentary += other.momentary;
        self.wrong += other.wrong;
        self.blind += other.blind;
        for (all, more) in [
            (&mut self.examples, other.examples),
            (&mut self.blind_examples, other.blind_examples),
        ] {
            all.extend(more);
            all.truncate(Self::EXAMPLES_MAX);
        }
    }

    /// Fails the test if any reply was blind: an error or an empty answer although a holder had the first block.
    pub fn require_sight(&self) {
        assert_eq!(self.blind, 0, "{:#?}", self.blind_examples);
    }

    /// Prints the counts of the scenario and the first blind replies. Fails the test if a reply was wrong, or if there
    /// was no query.
    pub fn report(&self, scenario: &str) {
        println!("{scenario}: {self}");
        for example in &self.blind_examples {
            println!("  blind: {example}");
        }
        assert_eq!(
            self.wrong, 0,
            "{scenario}: answers were wrong: {:#?}",
            self.examples
        );
        assert!(self.asked > 0, "{scenario}: nothing was asked");
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            asked,
            exact,
            degraded,
            wrong,
            blind,
            ..
        } = self;
        write!(
            formatter,
            "queries {asked}, exact {exact}, degraded {degraded}, wrong {wrong}, blind {blind}"
        )?;
        match self.time_to_exactness {
            Some(time) => write!(formatter, ", exact after {:.3} s", time.as_secs_f64()),
            None => Ok(()),
        }
    }
}

/// Queries each of `prompts` once, and counts the verdicts on the replies.
pub async fn ask_all(client: &Client, truth: &Truth, prompts: &[Vec<SequenceHash>], tally: &mut Tally) {
    for chain in prompts {
        let window = truth.window();
        let reply = client.ask_with(super::by_sequence(chain)).await;
        tally.count(truth.judge(&window, chain, reply.as_ref()));
    }
}

/// Queries all `prompts` again and again until every reply equals the truth with all holders exact, and notes how long
/// that took. Call this when the faults have ended and no worker publishes any more. All replies are counted.
pub async fn settle(client: &Client, truth: &Truth, prompts: &[Vec<SequenceHash>], tally: &mut Tally) {
    settle_by(client, truth, prompts, tally, Truth::difference).await;
}

/// Queries as [`settle`] does, but for a daemon whose index has too little room. Here a holder may also be inexact, if
/// lack of room is the only reason and the reply claims no more blocks than the holder has.
pub async fn settle_below(client: &Client, truth: &Truth, prompts: &[Vec<SequenceHash>], tally: &mut Tally) {
    settle_by(client, truth, prompts, tally, Truth::excess).await;
}

async fn settle_by(
    client: &Client,
    truth: &Truth,
    prompts: &[Vec<SequenceHash>],
    tally: &mut Tally,
    fault: impl Fn(&Truth, &[SequenceHash], &QueryReply) -> Option<String>,
) {
    let started = Instant::now();
    loop {
        let mut difference = None;
        for chain in prompts {
            let window = truth.window();
            let reply = client.ask_with(super::by_sequence(chain)).await;
            tally.count(truth.judge(&window, chain, reply.as_ref()));
            let differs = match &reply {
                Ok(reply) => fault(truth, chain, reply),
                Err(error) => (!truth.expected(chain).is_empty()).then(|| error.to_string()),
            };
            difference = difference.or(differs);
        }
        match difference {
            None => break,
            Some(text) => assert!(
                started.elapsed() < PATIENCE,
                "not the truth after {PATIENCE:?}: {text}"
            ),
        }
        let waited = started.elapsed();
        tokio::time::sleep((waited / 10).clamp(Duration::from_millis(5), Duration::from_millis(50))).await;
    }
    tally.time_to_exactness = Some(started.elapsed());
}

/// Random events and prompts, which a seed decides. Some prompts share their first blocks. The events store prompts in
/// part and remove parts of them, so holders have holes.
pub struct Workload {
    state: u64,
    prompts: Vec<Vec<SequenceHash>>,
}

impl Workload {
    /// Number of blocks of a prompt.
    const DEPTH: u64 = 24;
    /// Number of leading blocks that are the same in all prompts of a family.
    const SHARED: u64 = 8;
    /// Number of prompts in a family. All prompts of a family begin with the same [`Self::SHARED`] blocks.
    const FAMILY: u64 = 4;

    pub fn new(seed: u64, prompts: u64) -> Self {
        let block = |prompt: u64, position: u64| {
            let (family, member) = (prompt / Self::FAMILY + 1, prompt % Self::FAMILY);
            let branch = if position < Self::SHARED { 0 } else { member + 1 };
            SequenceHash(family << 32 | branch << 16 | (position + 1))
        };
        let chain = |prompt| (0..Self::DEPTH).map(|position| block(prompt, position)).collect();
        Self {
            state: seed,
            prompts: (0..prompts).map(chain).collect(),
        }
    }

    /// Returns all prompts.
    pub fn prompts(&self) -> &[Vec<SequenceHash>] {
        &self.prompts
    }

    /// Returns a random number below `bound` (SplitMix64).
    pub fn below(&mut self, bound: u64) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }

    fn index(&mut self, bound: usize) -> usize {
        usize::try_from(self.below(bound as u64)).unwrap()
    }

    /// Returns a random prompt.
    pub fn prompt(&mut self) -> Vec<SequenceHash> {
        let number = self.index(self.prompts.len());
        self.prompts[number].clone()
    }

    /// Returns the events of a holder's next batch: mostly stores, some removals, and rarely a clear.
    pub fn events(&mut self) -> Vec<Event> {
        let chain = self.prompt();
        let length = 1 + self.index(chain.len());
        match self.below(40) {
            0 => vec![Event::Cleared, super::stored(chain[..length].to_vec())],
            1..=12 => {
                let first = self.index(chain.len());
                let last = first + 1 + self.index(chain.len() - first);
                vec![super::removed(chain[first..last].to_vec())]
            }
            _ => vec![super::stored(chain[..length].to_vec())],
        }
    }
}

#[test]
fn the_bounds_are_those_of_all_states() {
    let mut random = kvatlas_lab::random::Random::new(11);
    for _ in 0..300 {
        let mut history = History::default();
        let chain: Vec<SequenceHash> = (0..6).map(SequenceHash).collect();
        for seq in 1..=12 {
            history.cursors.push(BatchCursor { epoch: 1, seq });
            for hash in &chain {
                history.set(*hash, random.chance(80));
                history.set(*hash, random.chance(80));
            }
        }
        for floor in 0..=history.head() {
            let matched: Vec<u32> = (floor..=history.head())
                .map(|version| history.matched(&chain, version))
                .collect();
            let (least, most) = (matched.iter().min().unwrap(), matched.iter().max().unwrap());
            assert_eq!(history.bounds(&chain, floor), (*least, *most), "{history:?}");
        }
    }
}
