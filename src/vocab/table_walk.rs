//! The traversal for tables. It allows the same tokens as [`traverse`](super::traverse), with fewer instructions for
//! each node.
//!
//! # The chain, and what was tried
//!
//! From a node to its child there is a chain of steps: load the state from the stack, load the transition, store the
//! new state, load it again. Loading a value immediately after its store takes as long as all other steps together. Two
//! things keep the processor busy meanwhile. Siblings don't wait for each other, so the processor works on several of
//! them at the same time. And two *lanes* take turns, one node at a time: one lane walks from the first root forwards,
//! the other from the last root backwards. So two independent chains are under way at any time. So the time depends
//! mostly on the number of instructions for each node.
//!
//! The table has the time for each node, as a multiple of `toktrie`'s time in the same run. The vocabulary has 131,072
//! tokens (266,312 nodes), and the tables come from regular expressions. The first three rows are whole walks in an
//! exploratory program; each later row is the change by a single idea. The column `accepting` is for expressions that
//! accept nearly all, the column `rejecting` for expressions that reject nearly all.
//!
//! | idea | accepting | rejecting |
//! |---|---|---|
//! | the loop with a stack of states, indices that are checked | 1.1 | 1.2 |
//! | the same without checks | 0.97 | 1.1 |
//! | a branch on leaves, which then neither push nor pop | 1.55 | 1.0 |
//! | the state just computed stays in a register; the stack is read before it is written | + 0.05–0.1 | + 0.1 |
//! | no branch on a leaf's state: only a rejected node with children branches | + 0.2 | 0 |
//! | classes of bytes, so that rows fit the nearest cache | + 0.02 | + 0.05 |
//! | prefetching the node to which a skip would lead | + 0.12 | 0 |
//! | the stack holds pointers to rows | + 0.02 | 0 |
//! | bogus tokens spread over 16 words | − 0.02; − 0.15 where a tenth is rejected | 0 |
//! | pointers instead of indices | − 0.1 | − 0.05 |
//! | 25 bits instead of 24 for a token, which leaves room for bogus tokens beside 2^24 real ones | + 0.04 | 0 |
//! | a list of roots, so that rejected roots are skipped without loading their nodes | 0 | − 0.4 to − 0.8 |
//! | two lanes | − 0.06 | − 0.05 |
//! | fields by direction: one for the change of depth into a node, others for the way past | − 0.12 | − 0.03 |
//! | no test and no call for large nodes: to skip one, the walk enters it with the dead state | (included) | |
//!
//! Keeping the state in a register shortens the chain, but is slower because it needs more instructions. A second,
//! independent chain is faster. `benches/peers/tokens/run.sh` measures the whole: 0.63 to 0.71 where much is accepted,
//! 0.14 to 0.45 where nearly all is rejected. A recogniser other than a table has a single stack, so two lanes cannot
//! use it: [`traverse`](super::traverse) takes 0.93 to 1.0 of `toktrie`'s time with the very same recogniser.

#![allow(
    unsafe_code,
    reason = "a tenth of the time, measured by benches/peers/tokens; the safety argument is at `WalkLane::step`"
)]

use std::mem::MaybeUninit;
use std::ops::Range;

use super::mask::TokenMask;
use super::table::{State, TransitionTable};
use super::token::{TOKEN_BYTES_MAX, TokenNode};
use super::token_trie::{Root, TokenTrie};

/// Stack of a walk: one entry for the state at the roots, and one for each byte of the longest token.
type Stack = [MaybeUninit<u32>; TOKEN_BYTES_MAX + 1];

/// Adds to `mask`, which must be for the trie's vocabulary, every token that the table allows after `state`.
///
/// Two walks share the work: one from the first root forwards, one from the last root backwards. The walks take turns,
/// one node at a time. While one walk waits for a state that it has just stored, the other walk continues.
pub(super) fn walk(trie: &TokenTrie, table: &TransitionTable, state: State, mask: &mut TokenMask) {
    assert_eq!(mask.size(), trie.vocabulary_size());
    // A state of another table may have no row here.
    let Some(row) = table.row(state) else { return };
    let is_allowed = |root: &&Root| {
        row.get(usize::from(root.byte))
            .is_some_and(|next| *next != TransitionTable::DEAD)
    };
    let mut roots = trie.roots().iter().filter(is_allowed);
    let shared = WalkedTable {
        places: table.places().as_ptr(),
        words: mask.all_words_mut().as_mut_ptr(),
    };
    let mut stacks = [[const { MaybeUninit::uninit() }; TOKEN_BYTES_MAX + 1]; 2];
    let [front, back] = &mut stacks;
    let (mut front, mut back) = (WalkLane::new(state, front), WalkLane::new(state, back));
    loop {
        if front.is_done() {
            let Some(root) = roots.next() else { break };
            front.begin(trie, root);
        }
        if back.is_done() {
            let Some(root) = roots.next_back() else { break };
            back.begin(trie, root);
        }
        while !front.is_done() && !back.is_done() {
            // SAFETY: neither lane is done, and both come from this trie, this table and this mask.
            unsafe {
                front.step(&shared);
                back.step(&shared);
            }
        }
    }
    for mut lane in [front, back] {
        while !lane.is_done() {
            // SAFETY: as above.
            unsafe { lane.step(&shared) };
        }
    }
}

/// Table and mask, for both lanes. A lane is the forward or the backward walk.
struct WalkedTable {
    places: *const u32,
    words: *mut u64,
}

/// Lane: one of the two walks. A lane walks the subtree of one root, then that of the next root, and so on.
struct WalkLane {
    /// Next node of the walk.
    node: *const TokenNode,
    /// End of the root's subtree: the place after its last node.
    end: *const TokenNode,
    /// Place in the stack of the state at the parent of the next node.
    top: *mut u32,
}

impl WalkLane {
    fn new(state: State, stack: &mut Stack) -> Self {
        let [bottom, ..] = stack;
        bottom.write(state.0);
        let none = std::ptr::null();
        Self {
            node: none,
            end: none,
            top: stack.as_mut_ptr().cast(),
        }
    }

    #[inline(always)]
    fn is_done(&self) -> bool {
        self.node >= self.end
    }

    fn begin(&mut self, trie: &TokenTrie, root: &Root) {
        let subtree = trie.nodes().get(root.start as usize..root.end as usize);
        let Range { start, end } = subtree.unwrap_or_default().as_ptr_range();
        (self.node, self.end) = (start, end);
    }

    /// Walks one node.
    ///
    /// # Safety
    ///
    /// The lane has nodes left, and was made and begun by [`walk`] with the trie, the table and the mask of `shared`.
    ///
    /// The reasons why this is sound, from the checks of `walk` and the guarantees of the types:
    ///
    /// - *Nodes.* `node` and `end` delimit the rest of the subtree of a root. The links of a `TokenTrie` are sound. So
    ///   one step into the subtree of a node or past it leads to a node before `end`, or to `end`. A node that is not
    ///   a leaf has a child. The size of a leaf is 1, and a large node's stored size is 1, which is a step into it.
    /// - *Stack.* The links also give the right number of levels to pop. So `top` is entry `depth - 1` for a node of
    ///   depth `depth`, and the step writes entry `depth`. Depths are from 1 to [`TOKEN_BYTES_MAX`], because no token
    ///   is longer. Every entry that a step reads has been written: entry 0 by `new`, any other entry by the step at
    ///   the node's parent. At `end`, `top` is entry 0 again.
    /// - *Table.* Every entry of the stack is the checked start or has been read from the table. Every place in the
    ///   table is the start of a whole row of 256 entries. The row of the dead state leads only to itself.
    /// - *Mask.* It is for this vocabulary, which `walk` checks: it has words for all tokens and all bogus tokens.
    #[inline(always)]
    unsafe fn step(&mut self, shared: &WalkedTable) {
        // SAFETY: see 'Nodes'.
        let node = unsafe { *self.node };
        // SAFETY: see 'Stack' and 'Table'.
        let next = unsafe { *shared.places.add(*self.top as usize + usize::from(node.byte())) };
        // SAFETY: see 'Stack'. For a rejected node this matters if it is large: the nodes below are then rejected, too.
        unsafe { *self.top.add(1) = next };
        if next == TransitionTable::DEAD {
            // SAFETY: see 'Nodes' and 'Stack'.
            unsafe {
                self.node = self.node.add(node.stored_size());
                self.top = self.top.offset(node.depth_past());
            }
        } else {
            let token = node.token_bits();
            // SAFETY: see 'Mask', 'Nodes' and 'Stack'.
            unsafe {
                *shared.words.add((token >> 6) as usize) |= 1_u64.wrapping_shl(token);
                self.node = self.node.add(1);
                self.top = self.top.offset(node.depth_into());
            }
        }
    }
}
