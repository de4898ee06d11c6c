//! Facts about an engine's groups of layers. The engine's events don't tell these facts, but its configuration states them.

use serde::{Deserialize, Serialize};

/// Maximum number of groups of layers whose kinds an operator or a client can give.
const GROUPS_MAX: usize = 256;

/// Kinds of groups of layers, by the blocks that a request needs in the group's cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum GroupKind {
    /// Main attention. A request needs all blocks of the prefix.
    Main,
    /// A sliding window of this many tokens. A request needs the blocks that have the last tokens of the prefix.
    Window(u32),
    /// A recurrent state. A request needs only the block that ends where the request continues.
    State,
    /// A kind that kvatlas does not know.
    Other,
}

/// Facts about an engine's groups of layers.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct GroupFacts {
    /// The kinds of the groups by their number, for engines whose events don't tell them.
    pub kinds: Vec<GroupKind>,
    /// Whether the events leave out a fact on which the reusable prefix depends. This holds for SGLang's events of a
    /// model with windows or states. It also holds for vLLM's events if cache hits may end within a block.
    pub is_hybrid: bool,
    /// Whether the engine reuses one block less than the cached prefix has. An example is an engine with both EAGLE
    /// (speculative decoding) and a KV connector.
    pub has_eagle_drop: bool,
    /// Whether a KV connector loads blocks of main attention from host, disk or remote storage even if the other
    /// groups of layers have no blocks there.
    pub has_divergent_hits: bool,
}

impl GroupFacts {
    /// Whether it is unknown how much of a cached prefix a request can reuse, whatever the events tell.
    pub fn hide_hits(&self) -> bool {
        self.is_hybrid || self.has_eagle_drop
    }

    /// Whether the facts state that the engine has no other groups of layers than main attention.
    #[cfg(feature = "translate")]
    pub(crate) fn has_main_only(&self) -> bool {
        !self.kinds.is_empty() && self.components() == 0
    }

    /// Minimum number of groups of layers other than main attention, for an engine whose events name several groups.
    /// It is the number of such groups among the given `kinds`, or one if no kinds are given.
    #[cfg(feature = "translate")]
    pub(crate) fn components(&self) -> usize {
        let is_beside = |kind: &&GroupKind| **kind != GroupKind::Main;
        match self.kinds.is_empty() {
            true => 1,
            false => self.kinds.iter().filter(is_beside).count(),
        }
    }

    /// Reads kinds of groups as people write them: `full`, `window:TOKENS` or `state`, in the order of their numbers.
    ///
    /// # Errors
    ///
    /// A text that says what is wrong.
    pub fn read_kinds<'a>(words: impl IntoIterator<Item = &'a str>) -> Result<Vec<GroupKind>, String> {
        let kind = |word: &str| match word.split_once(':') {
            None if word == "full" => Ok(GroupKind::Main),
            None if word == "state" => Ok(GroupKind::State),
            Some(("window", tokens)) => match tokens.parse() {
                Ok(tokens @ 1..) => Ok(GroupKind::Window(tokens)),
                _ => Err(format!(
                    "a window has {tokens:?} tokens, which is no number above 0"
                )),
            },
            _ => Err(format!(
                "a group is {word:?}; known are full, window:TOKENS, state"
            )),
        };
        let kinds: Vec<GroupKind> = words.into_iter().map(kind).collect::<Result<_, _>>()?;
        match kinds.len() {
            0..=GROUPS_MAX => Ok(kinds),
            _ => Err(format!("there are more than {GROUPS_MAX} groups")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_read_from_words() {
        let read = |words: &[&str]| GroupFacts::read_kinds(words.iter().copied());
        let kinds = [GroupKind::Main, GroupKind::Window(128), GroupKind::State];
        assert_eq!(read(&["full", "window:128", "state"]).unwrap(), kinds);
        assert_eq!(read(&[]).unwrap(), []);
        for wrong in ["window", "window:0", "window:x", "full:1", "mamba", ""] {
            assert!(read(&[wrong]).is_err(), "{wrong:?}");
        }
        assert!(read(&["full"; 257]).is_err());
    }
}
