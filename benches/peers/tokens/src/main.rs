//! Token tries of kvatlas and of toktrie 1.9.1: equal masks, and the time for each node.
//!
//! ```sh
//! benches/peers/tokens/run.sh            # fetches a vocabulary, checks, measures
//! benches/peers/tokens/run.sh --check    # only checks
//! benches/peers/tokens/run.sh --measure  # only measures
//! ```
//!
//! kvatlas and toktrie walk tries of the same vocabulary. Both use the same transition table of the same regular
//! expression.
//!
//! - `stack` is a recogniser that implements the traits of both, so both can walk with it.
//! - `adapter` is toktrie's own `StackRecognizer`.
//! - `table` is kvatlas's walk for tables.
//!
//! Each round measures four walks in a rotating order: toktrie's with `stack` and with `adapter`, and kvatlas's with
//! `stack` and with `table`. It also gives the ratio of each of kvatlas's walks to the faster of toktrie's. The output
//! has the median of the rounds, with the least and the greatest.

mod recognizers;
mod rounds;

use std::error::Error;
use std::path::Path;

use kvatlas_vocab::{RegexAutomaton, RegexLimits, TokenId, TokenTrie, Vocabulary};
use toktrie::{TokRxInfo, TokTrie};

use recognizers::{Counting, Rows};

const EXPRESSIONS: [(&str, &str); 10] = [
    ("any bytes", r"(?s-u:.)*"),
    ("any line", r".*"),
    ("small letters", r"[a-z ]+"),
    ("letters of all scripts", r"[\p{L} ]*"),
    ("no vowels", r"[^aeiou]*"),
    ("adverbs", r"(?i)[a-z]+ly"),
    ("up to 21 words", r"(\w+ ){0,20}\w+"),
    ("a number", r"[0-9]{1,5}"),
    ("a fixed object", r#"\{"name": "[^"]*", "age": [0-9]+\}"#),
    (
        "a flat JSON object",
        r#"\s*\{\s*"[a-z_]+"\s*:\s*("([^"\\]|\\.)*"|-?[0-9]+(\.[0-9]+)?|true|false|null)(,\s*"[a-z_]+"\s*:\s*("([^"\\]|\\.)*"|-?[0-9]+(\.[0-9]+)?|true|false|null))*\}"#,
    ),
];

/// Number of texts that are generated for each expression.
const TEXTS: u64 = 40;
/// Maximum number of tokens of a generated text.
const TEXT_TOKENS_MAX: usize = 12;

/// Tries of both sides for one vocabulary.
struct Tries {
    ours: TokenTrie,
    theirs: TokTrie,
    vocabulary: Vocabulary,
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments
        .next()
        .ok_or("name the file of a vocabulary, or use run.sh")?;
    let (checks, measures) = match arguments.next().as_deref() {
        None => (true, true),
        Some("--check") => (true, false),
        Some("--measure") => (false, true),
        Some(other) => return Err(format!("{other} is neither --check nor --measure").into()),
    };
    let (vocabulary, format) = Vocabulary::load(Path::new(&path), None)?;
    let theirs = toktrie_of(&vocabulary);
    let ours = TokenTrie::new(&vocabulary);
    println!(
        "{} vocabulary: {} tokens, {} nodes",
        format.as_str(),
        vocabulary.size(),
        ours.len()
    );
    let tries = Tries {
        ours,
        theirs,
        vocabulary,
    };
    if checks {
        let mut masks = 0;
        for (name, expression) in EXPRESSIONS {
            let automaton = RegexAutomaton::new(expression, RegexLimits::default())?;
            masks += check(&tries, name, &automaton);
        }
        println!("{masks} masks of each are equal");
        check_tokenisation(&tries)?;
    }
    if measures {
        rounds::print_header();
        for (name, expression) in EXPRESSIONS {
            rounds::measure(&tries, name, expression)?;
        }
        rounds::measure_others(&tries);
    }
    Ok(())
}

/// Compares masks along random texts that the expression allows. Returns the number of masks.
fn check(tries: &Tries, name: &str, automaton: &RegexAutomaton) -> usize {
    let table = automaton.table();
    let start = table.start().expect("the expression matches something");
    let mut compared = 0;
    for seed in 0..TEXTS {
        let mut random = seed;
        let mut state = start;
        for _ in 0..TEXT_TOKENS_MAX {
            let mut mask = tries.ours.empty_mask();
            tries
                .ours
                .allow_by_table(table, state, &mut mask)
                .expect("the mask fits");
            let mut by_stack = tries.ours.empty_mask();
            let rows = Rows::new(table, state);
            let mut recognizer = rows.stack();
            tries
                .ours
                .allow(&mut recognizer, &mut by_stack)
                .expect("the mask fits");
            assert_eq!(mask, by_stack, "{name}: the two walks of kvatlas differ");
            let mut theirs = tries.theirs.alloc_token_set();
            tries.theirs.add_bias(&mut recognizer, &mut theirs, &[]);
            let same = (0..tries.ours.vocabulary_size() as u32)
                .all(|token| mask.contains(TokenId(token)) == theirs.is_allowed(token));
            assert!(same, "{name}: the masks of kvatlas and toktrie differ");
            compared += 1;
            let allowed: Vec<TokenId> = mask.iter().collect();
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let Some(token) = allowed.get((random >> 33) as usize % allowed.len().max(1)) else {
                break;
            };
            let bytes = tries.vocabulary.bytes(*token).expect("the token exists");
            state = table.advance(state, bytes).expect("the token is allowed");
        }
    }
    compared
}

/// Returns a text in many scripts, made of the vocabulary's own tokens in random order.
fn text(vocabulary: &Vocabulary) -> Vec<u8> {
    let size = vocabulary.size() as u64;
    let shuffled = (0..20_000_u64).map(|number| TokenId((number * 7_919 % size) as u32));
    shuffled
        .flat_map(|token| vocabulary.bytes(token).unwrap_or_default().to_vec())
        .collect()
}

/// Compares greedy tokenisation of both sides.
fn check_tokenisation(tries: &Tries) -> Result<(), Box<dyn Error>> {
    let text = text(&tries.vocabulary);
    let ours: Vec<u32> = tries
        .ours
        .tokenize_greedily(&text)?
        .iter()
        .map(|token| token.0)
        .collect();
    assert_eq!(ours, tries.theirs.greedy_tokenize(&text));
    println!("{} greedy tokens of {} bytes are equal", ours.len(), text.len());
    Ok(())
}

/// Makes toktrie's trie of the same tokens.
fn toktrie_of(vocabulary: &Vocabulary) -> TokTrie {
    let words: Vec<Vec<u8>> = vocabulary.iter().map(|(_, bytes)| bytes.to_vec()).collect();
    TokTrie::from(&TokRxInfo::new(words.len() as u32, 2), &words)
}

/// Returns the number of nodes that toktrie's walk visits.
fn visited(tries: &Tries, rows: &Rows) -> usize {
    let mut counting = Counting::new(rows.stack());
    let mut mask = tries.theirs.alloc_token_set();
    tries.theirs.add_bias(&mut counting, &mut mask, &[]);
    counting.visits
}
