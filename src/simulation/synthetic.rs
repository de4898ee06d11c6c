//! A synthetic load: many conversations of several turns on top of a few shared system prompts.
//!
//! The prompt of every turn begins with the whole conversation so far. The worker that served the previous turn holds nearly
//! the whole prompt, and any worker holds the system prompt. So a router must tell the workers apart.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use kvatlas_core::hash::SequenceHash;

use super::request::{Request, extend_chain};
use fastrand::Rng;

/// Number of conversations that exist at the same time.
const CONVERSATIONS: u64 = 160;
/// Number of system prompts.
const SYSTEM_PROMPTS: u64 = 6;
/// Smallest and largest number of blocks of a system prompt.
const SYSTEM_PROMPT_BLOCKS: (u64, u64) = (8, 40);
/// Smallest and largest number of turns of a conversation.
const TURNS: (u64, u64) = (1, 12);
/// Smallest and largest number of blocks that a person adds in a turn.
const QUESTION_BLOCKS: (u64, u64) = (1, 6);
/// Smallest and largest number of blocks that the model adds in a turn.
const ANSWER_BLOCKS: (u64, u64) = (1, 8);
/// Smallest and largest number of tokens of an answer.
const ANSWER_TOKENS: (u64, u64) = (50, 800);
/// Shortest and longest time between an answer and the next question, in milliseconds.
const PAUSE_MS: (u64, u64) = (2_000, 60_000);

/// The state of one conversation.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Conversation {
    next_turn_ms: u64,
    /// Number of the conversation. Turns that begin at the same time are served in the order of these numbers.
    number: u64,
    turns_left: u64,
    chain: Vec<SequenceHash>,
}

/// Endless iterator over requests, in the order of their arrival. Equal seeds give equal requests.
#[derive(Debug)]
pub struct SyntheticLoad {
    random: Rng,
    system_prompts: Vec<Vec<SequenceHash>>,
    conversations: BinaryHeap<Reverse<Conversation>>,
    conversations_begun: u64,
    next_block_id: u64,
}

impl SyntheticLoad {
    /// Creates the load of `seed`.
    pub fn new(seed: u64) -> Self {
        let mut load = Self {
            random: Rng::with_seed(seed),
            system_prompts: Vec::new(),
            conversations: BinaryHeap::new(),
            conversations_begun: 0,
            next_block_id: 0,
        };
        for _ in 0..SYSTEM_PROMPTS {
            let mut prompt = Vec::new();
            load.say(&mut prompt, SYSTEM_PROMPT_BLOCKS);
            load.system_prompts.push(prompt);
        }
        for _ in 0..CONVERSATIONS {
            let begins_ms = load.random.u64(..PAUSE_MS.1);
            load.begin(begins_ms);
        }
        load
    }

    /// Begins a conversation with a system prompt. The prompt's number is the lower of two random numbers, so that some prompts
    /// are more popular.
    fn begin(&mut self, at_ms: u64) {
        let prompts = self.system_prompts.len();
        let drawn = self.random.usize(..prompts).min(self.random.usize(..prompts));
        let chain = self.system_prompts.get(drawn).cloned().unwrap_or_default();
        let turns_left = self.random.u64(TURNS.0..=TURNS.1);
        self.conversations_begun += 1;
        self.conversations.push(Reverse(Conversation {
            next_turn_ms: at_ms,
            number: self.conversations_begun,
            turns_left,
            chain,
        }));
    }

    /// Appends a random number of blocks, from `least` to `most`, to the chain. No other conversation has these blocks.
    fn say(&mut self, chain: &mut Vec<SequenceHash>, (least, most): (u64, u64)) {
        let blocks = self.random.u64(least..=most);
        extend_chain(chain, self.next_block_id..self.next_block_id + blocks);
        self.next_block_id += blocks;
    }
}

impl Iterator for SyntheticLoad {
    type Item = Request;

    fn next(&mut self) -> Option<Request> {
        let Reverse(mut conversation) = self.conversations.pop()?;
        self.say(&mut conversation.chain, QUESTION_BLOCKS);
        let request = Request {
            arrival_ms: conversation.next_turn_ms,
            chain: conversation.chain.clone(),
            output_tokens: self.random.u64(ANSWER_TOKENS.0..=ANSWER_TOKENS.1),
        };
        let next_ms = conversation.next_turn_ms + self.random.u64(PAUSE_MS.0..=PAUSE_MS.1);
        if conversation.turns_left > 1 {
            self.say(&mut conversation.chain, ANSWER_BLOCKS);
            conversation.turns_left -= 1;
            conversation.next_turn_ms = next_ms;
            self.conversations.push(Reverse(conversation));
        } else {
            self.begin(next_ms);
        }
        Some(request)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn the_seed_determines_the_load() {
        let load = |seed| SyntheticLoad::new(seed).take(500).collect::<Vec<_>>();
        assert_eq!(load(1), load(1));
        assert_ne!(load(1), load(2));
    }

    #[test]
    fn requests_arrive_in_order_and_share_prefixes() {
        let requests: Vec<_> = SyntheticLoad::new(5).take(2000).collect();
        assert!(requests.is_sorted_by_key(|request| request.arrival_ms));
        let first_blocks: HashSet<_> = requests.iter().map(|request| request.chain[0]).collect();
        assert_eq!(first_blocks.len(), 6);
        let mut seen = HashSet::new();
        let (mut repeated, mut blocks) = (0, 0);
        for block in requests.iter().flat_map(|request| &request.chain) {
            repeated += usize::from(!seen.insert(*block));
            blocks += 1;
        }
        // A prompt mostly repeats what was said before, but not only.
        assert!(
            repeated * 10 > blocks * 7 && repeated < blocks,
            "{repeated} of {blocks}"
        );
    }

    #[test]
    fn conversations_grow_turn_by_turn() {
        let requests: Vec<_> = SyntheticLoad::new(9).take(1000).collect();
        let asked: HashSet<_> = requests
            .iter()
            .filter_map(|request| request.chain.last())
            .collect();
        // A later turn contains the last block of an earlier one.
        let continued = requests
            .iter()
            .filter(|request| {
                let (_, before) = request.chain.split_last().unwrap();
                before.iter().any(|block| asked.contains(block))
            })
            .count();
        assert!(continued > 500, "{continued}");
    }
}
