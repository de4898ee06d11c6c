//! The roster: the list of holders that this daemon knows. A starting replica compares its own roster with the roster
//! of a replica that serves.

use kvatlas_core::index::Namespaces;
use kvatlas_core::stream::StreamTrust;
use kvatlas_core::wire::{
    ErrorCode, PROTOCOL_VERSION, ROSTER_PAGE_MAX, RosterHolder, RosterKey, RosterReply, RosterRequest,
    WireError,
};

/// Lists all holders after `after`, in the order of their keys.
pub(super) fn known_holders(
    namespaces: &Namespaces,
    trust: &StreamTrust,
    after: Option<&RosterKey>,
) -> Vec<RosterHolder> {
    let mut known = Vec::new();
    for namespace in namespaces.all() {
        for holder in namespace.indexer.holders() {
            let key = RosterKey {
                namespace: namespace.name.clone(),
                worker: holder.id.worker.clone(),
                rank: holder.id.rank,
            };
            if after.is_none_or(|after| key > *after) {
                let exact = holder.status.reasons(trust).of_all_queries().is_empty();
                known.push(RosterHolder { key, exact });
            }
        }
    }
    known.sort_unstable_by(|one, other| one.key.cmp(&other.key));
    known
}

/// Returns the number of holders that this daemon knows less well than another replica does: holders that `ours` lacks,
/// and holders that are exact in `theirs` only. `theirs` is the roster of the serving replica, and `ours` is the roster
/// of this daemon. Both rosters are in the order of keys.
pub(super) fn holders_behind(theirs: &[RosterHolder], ours: &[RosterHolder]) -> usize {
    let is_behind = |theirs: &&RosterHolder| {
        let found = ours.binary_search_by(|ours| ours.key.cmp(&theirs.key));
        let ours = found.ok().and_then(|index| ours.get(index));
        !ours.is_some_and(|ours| ours.exact || !theirs.exact)
    };
    theirs.iter().filter(is_behind).count()
}

/// Answers another replica's request for one page of the roster.
pub(super) fn answer(
    namespaces: &Namespaces,
    trust: &StreamTrust,
    payload: &[u8],
) -> Result<Vec<u8>, WireError> {
    let request = RosterRequest::decode(payload)
        .map_err(|error| WireError::new(ErrorCode::BadRequest, error.to_string()))?;
    let mut holders = known_holders(namespaces, trust, request.after.as_ref());
    let more = holders.len() > ROSTER_PAGE_MAX;
    holders.truncate(ROSTER_PAGE_MAX);
    let reply = RosterReply {
        v: PROTOCOL_VERSION,
        holders,
        more,
    };
    Ok(reply.encode())
}

#[cfg(test)]
mod tests {
    use kvatlas_core::index::{Capacity, IndexLimits, NamespaceSettings};
    use kvatlas_core::wire::{HolderId, NamespaceName, WorkerName};

    use super::*;

    fn holder(worker: &str, exact: bool) -> RosterHolder {
        let key = RosterKey {
            namespace: NamespaceName::new("n").unwrap(),
            worker: WorkerName::new(worker).unwrap(),
            rank: 0,
        };
        RosterHolder { key, exact }
    }

    #[test]
    fn a_holder_is_behind_until_it_is_known_as_well() {
        let theirs = [holder("a", true), holder("b", false), holder("c", true)];
        assert_eq!(holders_behind(&theirs, &[]), 3);
        assert_eq!(
            holders_behind(&theirs, &[holder("a", false), holder("c", true)]),
            2
        );
        assert_eq!(
            holders_behind(&theirs, &[holder("a", true), holder("b", false)]),
            1
        );
        let ours = [
            holder("a", true),
            holder("b", false),
            holder("c", true),
            holder("d", false),
        ];
        assert_eq!(holders_behind(&theirs, &ours), 0);
        assert_eq!(holders_behind(&[], &[]), 0);
    }

    #[test]
    fn the_pages_together_are_the_roster() {
        let limits = IndexLimits::default();
        let namespaces = Namespaces::new(
            Capacity::UNBOUNDED,
            NamespaceSettings::default(),
            Vec::new(),
            limits,
            16,
        );
        let name = NamespaceName::new("n").unwrap();
        let namespace = namespaces.get_or_create(&name, None).unwrap();
        let workers = ROSTER_PAGE_MAX + 7;
        let register = |number: usize| {
            let worker = WorkerName::new(&format!("gpu-{number}")).unwrap();
            namespace.indexer.register(&HolderId { worker, rank: 0 }).unwrap()
        };
        // A holder exists as long as its writer is not retired.
        let writers: Vec<_> = (0..workers).map(register).collect();
        let trust = StreamTrust::default();
        let page = |after| {
            let payload = RosterRequest { after }.encode();
            RosterReply::decode(&answer(&namespaces, &trust, &payload).unwrap()).unwrap()
        };
        let first = page(None);
        assert!(first.more && first.holders.len() == ROSTER_PAGE_MAX);
        let second = page(first.holders.last().map(|holder| holder.key.clone()));
        assert!(!second.more);
        let joined: Vec<_> = first.holders.into_iter().chain(second.holders).collect();
        assert_eq!(joined, known_holders(&namespaces, &trust, None));
        assert_eq!(joined.len(), writers.len());
        assert!(answer(&namespaces, &trust, b"garbage").is_err());
    }
}
