//! Token tries without a vocabulary file: the time for each node of a trie, in each of the two ways to walk it.
//!
//! ```sh
//! cargo bench --bench vocabulary
//! ```
//!
//! The vocabulary is made up: 100,000 words of made-up syllables. Figures are the median of the rounds, with the least
//! and the greatest. `benches/peers/tokens/run.sh` measures with a real vocabulary, and compares with toktrie.

#![allow(
    missing_docs,
    clippy::unwrap_used,
    reason = "a bench is no library, and fails by panicking"
)]

use std::hint::black_box;
use std::time::Instant;

use kvatlas_vocab::{Recognizer, RegexAutomaton, RegexLimits, TokenTrie, Vocabulary, VocabularyBuilder};

const WORDS: u64 = 100_000;
const ROUNDS: usize = 15;

fn main() {
    let vocabulary = vocabulary();
    let started = Instant::now();
    let trie = TokenTrie::new(&vocabulary);
    println!(
        "{} tokens, {} nodes, built in {:.0?}",
        vocabulary.size(),
        trie.len(),
        started.elapsed()
    );
    for expression in [".*", "[a-m]+", "(?:ka|to)[a-z]*", "[0-9]+"] {
        measure(&trie, expression);
    }
}

/// Returns a vocabulary of all bytes, and of words of one to five syllables, some of which begin with a blank.
fn vocabulary() -> Vocabulary {
    const SYLLABLES: [&str; 16] = [
        "ka", "to", "mi", "ren", "sol", "u", "ba", "lin", "da", "ex", "or", "ti", "qua", "ph", "en", "ar",
    ];
    let mut builder = VocabularyBuilder::new();
    for byte in 0..=u8::MAX {
        builder.insert(u64::from(byte), vec![byte]).unwrap();
    }
    for number in 0..WORDS {
        let mut rest = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        let mut word = String::from(if rest % 3 == 0 { " " } else { "" });
        while rest > 0 {
            word.push_str(SYLLABLES[usize::try_from(rest % 16).unwrap()]);
            rest /= 20;
        }
        builder.insert(256 + number, word.into_bytes()).unwrap();
    }
    builder.build().unwrap()
}

/// Recogniser that counts the nodes that a walk visits.
struct Counting<R>(R, usize);

impl<R: Recognizer> Recognizer for Counting<R> {
    fn try_push_byte(&mut self, byte: u8) -> bool {
        self.1 += 1;
        self.0.try_push_byte(byte)
    }

    fn pop_bytes(&mut self, count: usize) {
        self.0.pop_bytes(count);
    }

    fn byte_allowed(&mut self, byte: u8) -> bool {
        let is_allowed = self.0.byte_allowed(byte);
        self.1 += usize::from(!is_allowed);
        is_allowed
    }
}

fn measure(trie: &TokenTrie, expression: &str) {
    let automaton = RegexAutomaton::new(expression, RegexLimits::default()).unwrap();
    let table = automaton.table();
    let start = table.start().unwrap();
    let mut mask = trie.empty_mask();
    let mut counting = Counting(table.recognizer(start), 0);
    trie.allow(&mut counting, &mut mask).unwrap();
    let nodes = counting.1;
    let repeats = 1_000_000 / nodes + 1;
    let time = |walk: &mut dyn FnMut()| -> Vec<f64> {
        let round = |_| {
            let started = Instant::now();
            (0..repeats).for_each(|_| walk());
            started.elapsed().as_nanos() as f64 / (repeats * nodes) as f64
        };
        (0..ROUNDS).map(round).collect()
    };
    let mut recognizer = table.recognizer(start);
    let by_recognizer = time(&mut || trie.allow(black_box(&mut recognizer), &mut mask).unwrap());
    let by_table = time(&mut || trie.allow_by_table(black_box(table), start, &mut mask).unwrap());
    print(&format!("{expression}, recognizer"), nodes, by_recognizer);
    print(&format!("{expression}, table"), nodes, by_table);
}

fn print(name: &str, nodes: usize, mut rounds: Vec<f64>) {
    rounds.sort_by(f64::total_cmp);
    let (least, middle, most) = (rounds[0], rounds[rounds.len() / 2], rounds[rounds.len() - 1]);
    println!("{name:<32}{nodes:>8} nodes{middle:>8.2} ns each  ({least:.2}–{most:.2})");
}
