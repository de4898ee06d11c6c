//! Traversal of a token trie for any recogniser, as the documentation of the crate defines it.

#![allow(
    unsafe_code,
    reason = "a twentieth of the time, measured by benches/peers/tokens; the safety argument is in `traverse_run`"
)]

use std::ops::Range;

use super::mask::AllowToken;
use super::recognizer::Recognizer;
use super::token::TokenNode;
use super::token_trie::{Root, TokenTrie};

/// Reports to `allowed` every token that the recogniser allows.
pub(super) fn traverse(trie: &TokenTrie, recognizer: &mut impl Recognizer, allowed: &mut impl AllowToken) {
    recognizer.traversal_started();
    let mut roots = trie.roots();
    while let Some((run, rest)) = next_run(roots, |byte| recognizer.byte_allowed(byte)) {
        traverse_run(trie, run, recognizer, allowed);
        roots = rest;
    }
    recognizer.traversal_finished();
}

/// Returns the first run of neighbouring roots that are allowed, as a range of nodes, and the roots after that run.
///
/// A trie usually has more roots than a node has children, and in the array of nodes the roots lie far apart. A walk
/// from root to root in that array would wait for memory at each rejected root. The list `roots` has all roots close
/// together.
fn next_run(roots: &[Root], mut is_allowed: impl FnMut(u8) -> bool) -> Option<(Range<usize>, &[Root])> {
    let first = roots.iter().position(|root| is_allowed(root.byte))?;
    let (start, rest) = roots.get(first..)?.split_first()?;
    let length = rest.iter().take_while(|root| is_allowed(root.byte)).count();
    let (run, after) = rest.split_at_checked(length)?;
    let last = run.last().unwrap_or(start);
    Some((start.start as usize..last.end as usize, after))
}

fn traverse_run(
    trie: &TokenTrie,
    run: Range<usize>,
    recognizer: &mut impl Recognizer,
    allowed: &mut impl AllowToken,
) {
    let nodes = trie.nodes().get(run).unwrap_or_default();
    let Range { start: mut next, end } = nodes.as_ptr_range();
    let mut pops = 0;
    while next < end {
        // SAFETY: `next` is before the end of the run, and every step below leads to a node of the run or to its end, whatever the
        // recogniser says: the links of a `TokenTrie` are sound, and a run is of whole subtrees of roots.
        let node = unsafe { *next };
        recognizer.pop_bytes(pops);
        if recognizer.try_push_byte(node.byte()) {
            // SAFETY: `traverse` is called with a sink that was made for the vocabulary of `trie`.
            unsafe { allowed.allow_of_node(node.token_bits()) };
            pops = (1 - node.depth_into()).cast_unsigned();
            // SAFETY: as above; a node that is no leaf has a child.
            next = unsafe { next.add(1) };
        } else {
            let (mut size, mut depth) = (node.stored_size(), node.depth_past());
            if node.is_large() {
                (size, depth) = past_large(trie, next);
            }
            pops = depth.wrapping_neg().cast_unsigned();
            // SAFETY: as above.
            next = unsafe { next.add(size) };
        }
    }
    recognizer.pop_bytes(pops);
}

/// Returns the size of a large node's subtree, and the change of depth to the node after the subtree. A negative change
/// is the number of levels to pop.
#[cold]
fn past_large(trie: &TokenTrie, node: *const TokenNode) -> (usize, isize) {
    let nodes = trie.nodes().as_ptr_range();
    let index = (node.addr() - nodes.start.addr()) / size_of::<TokenNode>();
    // Every node of a trie has links; if this one had none, going into it would be right, too.
    let links = trie.links(index);
    links.map_or((1, 1), |links| {
        (links.subtree_size, 1 - links.num_parents.cast_signed())
    })
}
