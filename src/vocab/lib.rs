//! Token vocabularies, for finding the tokens that may come next, and for cutting a text into tokens.
//!
//! A [`Vocabulary`] has the bytes of each token; [`load`](Vocabulary::load) reads it from the usual files. A
//! [`TokenTrie`] is the flat trie of a vocabulary, with eight bytes for each node.
//! It answers one question: *which tokens does a recogniser of bytes allow next?* The answer is a [`TokenMask`], or is
//! written into logits. A recogniser of any kind implements [`Recognizer`], with a stack of bytes. A recogniser that is
//! a [`TransitionTable`] needs no stack and is faster. A [`RegexAutomaton`] makes such a table from a regular
//! expression.
//!
//! # What is allowed
//!
//! The allowed tokens are those that this function allows, called with the root:
//!
//! ```text
//! fn traverse(n) {
//!     allow(n.token);                    // nodes without a token name a bogus one
//!     for c in n.children {
//!         if try_push_byte(c.byte) {
//!             traverse(c);
//!             pop_bytes(1);
//!         }
//!     }
//! }
//! ```
//!
//! # The odd cases
//!
//! - Up to [`VOCABULARY_SIZE_MAX`] (2^24) tokens of up to [`TOKEN_BYTES_MAX`] bytes.
//! - Several tokens with the same bytes are all allowed if one is; look-ups and tokenisation return the lowest of them.
//! - Special tokens have no bytes here. A traversal never adds them to a mask, and tokenisation never returns them. No
//!   text leads to such a token, and a model that always chose it would never end. To allow such a token, set its bit
//!   in the mask.
//! - Nodes without a token have made-up numbers, which are called bogus tokens. A finished mask never shows them,
//!   because it has exactly the tokens of the vocabulary.
//!
//! # Where the time goes
//!
//! If `traverse` is a loop with a stack of states, its steps form a chain, in which each waits for the one before: load
//! the state, load the transition, store the state, and load it again for the child. Over a table, two walks take
//! turns, one from each end of the trie, so that two chains are always under way. Nodes are packed so that a step needs
//! few instructions (see [`TokenNode`]). If nearly all nodes are rejected, the chain leads from each rejected node to
//! the next. A list of the roots' bytes makes that chain shorter: the walk passes rejected roots without loading their
//! nodes. `table_walk.rs` lists the ideas that were tried and the gain of each.
//!
//! ```sh
//! cargo test -p kvatlas-vocab               # property tests
//! benches/peers/tokens/run.sh --check       # equal to toktrie 1.9.1 on 131,072 tokens
//! benches/peers/tokens/run.sh               # the same, and the time for each node
//! cargo bench --bench vocabulary            # the time for each node, without fetching anything
//! ```

mod allow;
mod error;
mod flat;
mod greedy;
mod load;
mod mask;
mod recognizer;
mod regex;
mod table;
mod table_walk;
mod token;
mod token_trie;
mod tokens;
mod traverse;

#[cfg(test)]
mod tests;

pub use error::{LogitsError, MaskError, UnknownByte, VocabularyError};
pub use load::{LoadError, VOCABULARY_FILE_BYTES_MAX, VocabularyFormat};
pub use mask::TokenMask;
pub use recognizer::Recognizer;
pub use regex::{RegexAutomaton, RegexError, RegexLimits};
pub use table::{State, TABLE_STATES_MAX, TableError, TableRecognizer, TableRow, TransitionTable};
pub use token::{Links, TOKEN_BYTES_MAX, TokenId, TokenNode, VOCABULARY_SIZE_MAX};
pub use token_trie::TokenTrie;
pub use tokens::{Vocabulary, VocabularyBuilder};
