//! Tokenisation by the longest matching prefix.

use super::error::UnknownByte;
use super::token::TokenId;
use super::token_trie::TokenTrie;

impl TokenTrie {
    /// Cuts a text into tokens. Each token is the longest one that matches the rest of the text. A model's own
    /// tokeniser may give other tokens, because it merges bytes in another order, but the tokens of both stand for the
    /// same bytes.
    ///
    /// # Errors
    ///
    /// If the rest of the text begins with a byte with which no token begins.
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
