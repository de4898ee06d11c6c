//! The notes' traversal, for any recogniser.

use std::hint::select_unpredictable;
use std::ops::Range;

use super::mask::AllowToken;
use super::recognizer::Recognizer;
use super::token_trie::{Root, TokenTrie};

/// Allows every token that the recogniser does.
pub(super) fn traverse(trie: &TokenTrie, recognizer: &mut impl Recognizer, allowed: &mut impl AllowToken) {
    recognizer.traversal_started();
    let mut roots = trie.roots();
    while let Some((run, rest)) = next_run(trie, roots, |byte| recognizer.byte_allowed(byte)) {
        traverse_run(trie, run, recognizer, allowed);
        roots = rest;
    }
    recognizer.traversal_finished();
}

/// The first run of neighbouring roots that are allowed, as a range of nodes, and the roots after it.
///
/// The roots are the widest part of the trie, with the longest skips. From one rejected root to the next over the nodes, each step waits for
/// the load of the node that it goes to; over this list, nothing waits.
pub(super) fn next_run<'a>(
    trie: &TokenTrie,
    roots: &'a [Root],
    mut is_allowed: impl FnMut(u8) -> bool,
) -> Option<(Range<usize>, &'a [Root])> {
    let first = roots.iter().position(|root| is_allowed(root.byte))?;
    let (start, rest) = roots.get(first..)?.split_first()?;
    let length = rest.iter().position(|root| !is_allowed(root.byte));
    let after = rest.get(length.unwrap_or(rest.len())..).unwrap_or_default();
    let end = after.first().map_or(trie.len(), |root| root.start as usize);
    Some((start.start as usize..end, after))
}

fn traverse_run(
    trie: &TokenTrie,
    run: Range<usize>,
    recognizer: &mut impl Recognizer,
    allowed: &mut impl AllowToken,
) {
    let end = run.end;
    let mut rest = trie.nodes().get(run).unwrap_or_default().iter();
    let mut pops = 0;
    while let Some(node) = rest.next() {
        recognizer.pop_bytes(pops);
        if recognizer.try_push_byte(node.byte()) {
            allowed.allow(node.token_bits());
            // Which nodes are leaves can't be predicted.
            pops = select_unpredictable(node.is_leaf(), node.num_parents(), 0);
        } else {
            pops = node.num_parents() - 1;
            if node.is_oversize() {
                let index = end - rest.len() - 1;
                let after = trie.nodes().get(trie.flat().subtree_end(index)..end);
                rest = after.unwrap_or_default().iter();
            } else if let Some(below) = node.stored_size().checked_sub(2) {
                rest.nth(below);
            }
        }
    }
    recognizer.pop_bytes(pops);
}
