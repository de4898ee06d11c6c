//! Search for the tokens of a vocabulary that may come next. The result is a mask, or is written into logits.

use super::error::{LogitsError, MaskError};
use super::mask::{Logits, TokenMask};
use super::recognizer::Recognizer;
use super::table::{State, TransitionTable};
use super::token_trie::TokenTrie;
use super::{table_walk, traverse};

impl TokenTrie {
    /// Adds to `mask` every token whose bytes the recogniser allows in sequence, beginning in its current state.
    ///
    /// # Errors
    ///
    /// If the mask is for a vocabulary of another size.
    pub fn allow(&self, recognizer: &mut impl Recognizer, mask: &mut TokenMask) -> Result<(), MaskError> {
        mask.check(self.vocabulary_size())?;
        traverse::traverse(self, recognizer, mask);
        mask.clear_bogus();
        Ok(())
    }

    /// Adds the same tokens as [`allow`](Self::allow), but takes less time. The recogniser must be a table. `state` is
    /// the table's state after the text so far.
    ///
    /// # Errors
    ///
    /// If the mask is for a vocabulary of another size.
    pub fn allow_by_table(
        &self,
        table: &TransitionTable,
        state: State,
        mask: &mut TokenMask,
    ) -> Result<(), MaskError> {
        mask.check(self.vocabulary_size())?;
        table_walk::walk(self, table, state, mask);
        mask.clear_bogus();
        Ok(())
    }

    /// Sets the logits of allowed tokens to 0, and does not change those of the other tokens. The allowed tokens are
    /// the same as with [`allow`](Self::allow).
    ///
    /// There must be one more logit than there are tokens. The last logit is for nodes without a token, and its value
    /// has no meaning.
    ///
    /// # Errors
    ///
    /// If the number of logits is not greater than the number of tokens.
    pub fn allow_logits(
        &self,
        recognizer: &mut impl Recognizer,
        logits: &mut [f32],
    ) -> Result<(), LogitsError> {
        let needed = self.vocabulary_size() + 1;
        let count = logits.len();
        let logits = logits.get_mut(..needed).ok_or(LogitsError {
            logits: count,
            needed,
        })?;
        traverse::traverse(self, recognizer, &mut Logits(logits));
        Ok(())
    }
}
