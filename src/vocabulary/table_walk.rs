//! The traversal for tables: the same set as [`traverse`](super::traverse), in fewer instructions a node.
//!
//! # What was tried
//!
//! Time a node, as a multiple of `toktrie`'s in the same run, on a vocabulary of 131,072 tokens (266,312 nodes) with tables of
//! regular expressions. The first three rows are whole walks in an exploratory program; those below say what one idea alone
//! changed. The left column is for expressions that accept nearly all, the right one for those that reject nearly all.
//!
//! | idea | accepting | rejecting |
//! |---|---|---|
//! | the notes' loop, a stack of states, indices that are checked | 1.1 | 1.2 |
//! | the same without checks | 0.97 | 1.1 |
//! | a branch on leaves, which then neither push nor pop | 1.55 | 1.0 |
//! | the state just computed stays in a register; the stack is read before it is written | + 0.05–0.1 | + 0.1 |
//! | no branch on a leaf's state: only a rejected node with children branches | + 0.2 | 0 |
//! | classes of bytes, for rows that fit the nearest cache | + 0.02 | + 0.05 |
//! | prefetching where a skip would lead to | + 0.12 | 0 |
//! | the stack holds pointers to rows | + 0.02 | 0 |
//! | pops in the node such that one shift and one addition apply them | − 0.08 | 0 |
//! | bogus tokens spread over 16 words | − 0.02; − 0.15 where a tenth is rejected | 0 |
//! | pointers instead of indices | − 0.1 | − 0.05 |
//! | 25 bits for a token instead of 24, so that 2^24 tokens have room and bogus ones too | + 0.04 | 0 |
//! | runs of allowed roots from a list, see [`next_run`] | 0 | − 0.4 to − 0.8 |
//!
//! So the chain of the notes (load a state, load the transition, store the state) is not what costs: siblings and their subtrees don't wait
//! for each other, and the processor works on several at once. Keeping the state in a register shortens the chain and lost, because of
//! its instructions. What gained is below; `benches/peers/tokens/run.sh` measures it as a whole: 0.85 accepting, 0.2 to 0.7
//! rejecting. Without `unsafe`, the accepting walk is no faster than the one for any recogniser (0.93 to 1.0), hence `unsafe`.

#![allow(
    unsafe_code,
    reason = "an eighth of the time, measured by benches/peers/tokens; the safety argument is at `walk_run`"
)]

use std::hint::select_unpredictable;
use std::ops::Range;

use super::mask::TokenMask;
use super::table::{State, TransitionTable};
use super::token::{TOKEN_BYTES_MAX, TokenNode};
use super::token_trie::TokenTrie;
use super::traverse::next_run;

/// States on a stack for tries that are less deep than this, which is almost all; clearing the larger one takes as long as a small walk.
const SMALL_STACK: usize = 128;
const LARGE_STACK: usize = TOKEN_BYTES_MAX + 1;

/// Adds to `mask`, which must be for the trie's vocabulary, every token that the table allows after `state`.
pub(super) fn walk(trie: &TokenTrie, table: &TransitionTable, state: State, mask: &mut TokenMask) {
    assert_eq!(mask.size(), trie.vocabulary_size());
    if trie.flat().depth_max() < SMALL_STACK {
        walk_roots::<SMALL_STACK>(trie, table, state, mask);
    } else {
        walk_roots::<LARGE_STACK>(trie, table, state, mask);
    }
}

fn walk_roots<const STACK: usize>(
    trie: &TokenTrie,
    table: &TransitionTable,
    state: State,
    mask: &mut TokenMask,
) {
    // A state of another table may have no row here.
    let Some(row) = table.row(state) else { return };
    let mut stack = [TransitionTable::DEAD; STACK];
    if let Some(first) = stack.first_mut() {
        *first = state.0;
    }
    let mut roots = trie.roots();
    let is_allowed = |byte: u8| {
        row.get(usize::from(byte))
            .is_some_and(|next| *next != TransitionTable::DEAD)
    };
    while let Some((run, rest)) = next_run(trie, roots, is_allowed) {
        walk_run(trie, run, table, &mut stack, mask.all_words_mut());
        roots = rest;
    }
}

/// Walks whole subtrees of roots. The first entry of `stack` is the state at the roots.
///
/// The safety argument, in terms of what `assert!` checks and what types promise:
///
/// - *Nodes.* `run` is checked to lie within the nodes, and both ends are starts of roots or the end of the trie. The links of a `FlatTrie` are
///   sound, so from any node of the run, one step into its subtree or past it leads to a node of the run or to its end. (A node that
///   is not a leaf has a child, so a step into it stays within its subtree.)
/// - *Stack.* Since pops are sound too, `top` is the entry of the depth above the node: `stack[depth - 1]`. Depths are from 1 to
///   `depth_max`, which is checked to be less than `STACK`, and the entry written is `stack[depth]`. At the end of the run `top` is the
///   first entry again.
/// - *Table.* Every entry of the stack is the checked start or has been read from the table, whose every place has a whole row of 256 after it.
/// - *Mask.* It is for this vocabulary, which `walk` checks: it has words for all tokens and all bogus tokens.
#[inline(always)]
fn walk_run<const STACK: usize>(
    trie: &TokenTrie,
    run: Range<usize>,
    table: &TransitionTable,
    stack: &mut [u32; STACK],
    mask: &mut [u64],
) {
    assert!(trie.flat().depth_max() < STACK);
    let Some(nodes) = trie.nodes().get(run) else {
        return;
    };
    let Range { start: mut node, end } = nodes.as_ptr_range();
    let places = table.places().as_ptr();
    let mut top = stack.as_mut_ptr();
    let words = mask.as_mut_ptr();
    while node < end {
        // SAFETY: `node` is a node of the run: see 'Nodes'.
        let current = unsafe { *node };
        // SAFETY: `top` is an entry of the stack, and its value is the place of a whole row: see 'Stack' and 'Table'.
        let next = unsafe { *places.add(*top as usize + usize::from(current.byte())) };
        if next == TransitionTable::DEAD {
            let size = if current.is_oversize() {
                oversize(trie, node)
            } else {
                current.stored_size()
            };
            // SAFETY: past the subtree is a node of the run or its end, and the depth falls by as many entries as there are.
            unsafe {
                node = node.add(size);
                top = top.offset(current.depth_change() + 1);
            }
        } else {
            let token = current.token_bits();
            // SAFETY: the mask has this word: see 'Mask'. Depths are below `STACK`, so there is an entry above `top`. A leaf pops
            // to where the next node needs it, another node pushes its own entry; and there is a node behind this one, or the end.
            unsafe {
                *words.add((token >> 6) as usize) |= 1_u64.wrapping_shl(token);
                *top.add(1) = next;
                top = top.offset(select_unpredictable(current.is_leaf(), current.depth_change(), 0) + 1);
                node = node.add(1);
            }
        }
    }
}

/// The size of a subtree that has no room in its node.
#[cold]
fn oversize(trie: &TokenTrie, node: *const TokenNode) -> usize {
    let nodes = trie.nodes().as_ptr_range();
    let index = (node.addr() - nodes.start.addr()) / size_of::<TokenNode>();
    trie.flat().subtree_end(index) - index
}
