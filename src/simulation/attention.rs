//! Kinds of attention of a simulated model, and the places where a request can resume from a worker's cache.
//!
//! A *place* is a boundary between two blocks of a prompt. To resume at a place, a request needs:
//!
//! - for full attention, every block before the place;
//! - for windows of `n` blocks, the `n` blocks just before the place;
//! - for recurrent states, the block that ends at the place.
//!
//! An engine keeps the blocks of windows and states apart, and far fewer of them. So full attention often has more of a prompt
//! than a request can reuse. The rules here are those of vLLM 0.33, with one block size for all groups of layers.

use std::fmt;
use std::num::NonZeroUsize;

/// Kind of attention of a simulated model. The kind decides which blocks the model's cache must keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Attention {
    /// All layers attend to all earlier blocks.
    #[default]
    Full,
    /// Some layers attend only to this many blocks before a token.
    Window(NonZeroUsize),
    /// Some layers carry a state from block to block.
    States,
}

/// Places in a prompt where an engine keeps blocks of windows and states. All variants keep these blocks in two
/// places: at the end of the prompt, and at the end of the part that it has in common with an earlier prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Retention {
    /// No further places: only the end of the prompt, and the end of the part that it has in common with an earlier
    /// prompt. This is vLLM's default, `prefix_cache_retention_interval` 0.
    #[default]
    Boundaries,
    /// One further place in each interval of this many blocks.
    Every(NonZeroUsize),
    /// Every block of the prompt.
    All,
}

/// Rules that decide which blocks a simulated engine's cache keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CacheModel {
    /// Kind of attention that the model has.
    pub attention: Attention,
    /// Places where blocks of windows and states are kept.
    pub retention: Retention,
}

impl CacheModel {
    /// Whether windows or states limit where a request can resume.
    pub fn is_hybrid(self) -> bool {
        self.tail_blocks() > 0
    }

    /// Returns how many blocks of windows or states a request needs just before the place (boundary between two blocks)
    /// where the request resumes from the cache.
    fn tail_blocks(self) -> usize {
        match self.attention {
            Attention::Full => 0,
            Attention::Window(blocks) => blocks.get(),
            Attention::States => 1,
        }
    }

    /// Returns the positions of the blocks of windows or states that a request needs to resume after its first
    /// `blocks` blocks.
    pub(super) fn tail(self, blocks: usize) -> std::ops::Range<usize> {
        blocks.saturating_sub(self.tail_blocks())..blocks
    }

    /// Whether a cache keeps the block of a window or state at `position`. `boundaries` are the boundaries between
    /// blocks at which further requests are expected to resume.
    pub(super) fn keeps(self, position: usize, boundaries: &[usize]) -> bool {
        let retained = match self.retention {
            _ if !self.is_hybrid() => false,
            Retention::All => true,
            Retention::Boundaries => false,
            Retention::Every(blocks) => {
                position % blocks.get() >= blocks.get().saturating_sub(self.tail_blocks())
            }
        };
        retained || boundaries.iter().any(|end| self.tail(*end).contains(&position))
    }

    /// Returns how many leading blocks of a prompt of `blocks` blocks a request can reuse.
    ///
    /// - `matched` is the number of leading blocks that the cache has for full attention.
    /// - `is_kept` returns whether the cache has the block of a window or state at a position.
    ///
    /// With full attention alone, all matched blocks can be reused. With windows or states the last block is always
    /// computed, because it has the prompt's last token. So at most the blocks before it are reused.
    pub(super) fn usable_blocks(
        self,
        blocks: usize,
        matched: usize,
        is_kept: impl Fn(usize) -> bool,
    ) -> usize {
        if !self.is_hybrid() {
            return matched;
        }
        let (mut usable, mut kept_in_a_row) = (0, 0);
        for position in 0..matched.min(blocks.saturating_sub(1)) {
            kept_in_a_row = if is_kept(position) { kept_in_a_row + 1 } else { 0 };
            if kept_in_a_row >= self.tail_blocks().min(position + 1) {
                usable = position + 1;
            }
        }
        usable
    }
}

impl fmt::Display for CacheModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.attention {
            Attention::Full => return f.write_str("full attention"),
            Attention::Window(blocks) if blocks.get() == 1 => f.write_str("window of 1 block")?,
            Attention::Window(blocks) => write!(f, "window of {blocks} blocks")?,
            Attention::States => f.write_str("states")?,
        }
        match self.retention {
            Retention::Boundaries => Ok(()),
            Retention::Every(blocks) => write!(f, ", kept every {blocks} blocks"),
            Retention::All => f.write_str(", all kept"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(blocks: usize, retention: Retention) -> CacheModel {
        CacheModel {
            attention: Attention::Window(NonZeroUsize::new(blocks).unwrap()),
            retention,
        }
    }

    fn kept(model: CacheModel, boundaries: &[usize]) -> Vec<usize> {
        (0..12)
            .filter(|position| model.keeps(*position, boundaries))
            .collect()
    }

    #[test]
    fn a_tail_is_kept_before_each_boundary_and_interval() {
        let every = Retention::Every(NonZeroUsize::new(4).unwrap());
        assert_eq!(kept(window(2, Retention::Boundaries), &[1, 7]), [0, 5, 6]);
        assert_eq!(kept(window(2, every), &[1]), [0, 2, 3, 6, 7, 10, 11]);
        // A window as long as the interval needs every block.
        assert_eq!(kept(window(9, every), &[]).len(), 12);
        assert_eq!(kept(window(1, Retention::All), &[]).len(), 12);
        assert_eq!(kept(CacheModel::default(), &[12]), [0; 0]);
    }

    #[test]
    fn a_request_resumes_behind_a_whole_window_and_before_its_last_token() {
        let model = window(2, Retention::Boundaries);
        let usable = |blocks, matched, kept: &[usize]| {
            model.usable_blocks(blocks, matched, |position| kept.contains(&position))
        };
        assert_eq!(usable(9, 9, &[3, 4, 6]), 5);
        assert_eq!(usable(9, 4, &[3, 4, 6]), 0);
        // Near the start a window is shorter.
        assert_eq!(usable(9, 9, &[0, 4]), 1);
        assert_eq!(usable(5, 5, &[0, 3, 4]), 1);
        assert_eq!(usable(6, 5, &[0, 3, 4]), 5);
        assert_eq!(CacheModel::default().usable_blocks(5, 5, |_| false), 5);
        assert_eq!(model.usable_blocks(0, 0, |_| true), 0);
    }
}
