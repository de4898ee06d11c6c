//! Tokenisation by longest prefix.

use super::error::UnknownByte;
use super::token::TokenId;
use super::token_trie::TokenTrie;

impl TokenTrie {
    /// Cuts a text into tokens. Each token is the longest that fits. A model's own tokeniser merges in another order and gives
    /// other tokens, but they stand for the same bytes.
    ///
    /// # Errors
    ///
    /// If no token begins with a byte of the text.
    pub fn tokenize_greedily(&self, text: &[u8]) -> Result<Vec<TokenId>, UnknownByte> {
        let mut tokens = Vec::new();
        let mut rest = text;
        while let Some(byte) = rest.first() {
            let unknown = UnknownByte {
                offset: text.len() - rest.len(),
                byte: *byte,
            };
            let (token, length) = self.longest_prefix(rest).ok_or(unknown)?;
            tokens.push(token);
            rest = rest.get(length..).unwrap_or_default();
        }
        Ok(tokens)
    }
}
