//! The notes' traversal, for any recogniser.

use std::ops::Range;

use super::mask::AllowToken;
use super::recognizer::Recognizer;
use super::token_trie::{Root, TokenTrie};

/// Allows every token that the recogniser does.
pub(super) fn traverse(trie: &TokenTrie, recognizer: &mut impl Recognizer, allowed: &mut impl AllowToken) {
    recognizer.traversal_started();
    let mut roots = trie.roots();
    while let Some((run, rest)) = next_run(roots, |byte| recognizer.byte_allowed(byte)) {
        traverse_run(trie, run, recognizer, allowed);
        roots = rest;
    }
    recognizer.traversal_finished();
}

/// The first run of neighbouring roots that are allowed, as a range of nodes, and the roots after it.
///
/// The roots are the widest part of the trie, with the longest skips. From one rejected root to the next over the nodes, each step waits for
/// the load of the node that it goes to; over this list, nothing waits.
fn next_run<'a>(
    roots: &'a [Root],
    mut is_allowed: impl FnMut(u8) -> bool,
) -> Option<(Range<usize>, &'a [Root])> {
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
    let end = run.end;
    let mut rest = trie.nodes().get(run).unwrap_or_default().iter();
    let mut pops = 0;
    while let Some(node) = rest.next() {
        recognizer.pop_bytes(pops);
        if recognizer.try_push_byte(node.byte()) {
            allowed.allow(node.token_bits());
            pops = node.pops_into();
        } else if node.is_large() {
            let index = end - rest.len() - 1;
            let Some(links) = trie.flat().links(index) else {
                break;
            };
            rest = trie
                .nodes()
                .get(index + links.subtree_size..end)
                .unwrap_or_default()
                .iter();
            pops = links.num_parents - 1;
        } else {
            pops = node.pops_past();
            if let Some(below) = node.stored_size().checked_sub(2) {
                rest.nth(below);
            }
        }
    }
    recognizer.pop_bytes(pops);
}
