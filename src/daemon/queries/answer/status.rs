//! Status replies. They describe a namespace and its holders, without a prompt.

use crate::lanes::{FreshnessReading, epoch_ahead_s};
use kvatlas_client::unix_time_us;
use kvatlas_core::index::{HolderRecord, Namespace};
use kvatlas_core::stream::StreamTrust;
use kvatlas_core::wire::{
    DegradedReason, HolderStatusReply, NamespaceName, PROTOCOL_VERSION, Profile, StatusReply,
};

use super::with_wait;
use crate::queries::whole::read_holder_whole;

/// Returns the number of holders whose block size is not known for certain.
pub(crate) fn unsized_holders(namespace: &Namespace) -> u32 {
    match namespace.is_configured {
        true => 0,
        false => namespace.indexer.unsized_holders(),
    }
}

/// Returns the status of `namespace`. `is_listed` says whether every publisher was known before this call.
pub(super) fn status(
    namespace: &Namespace,
    trust: &StreamTrust,
    look: &FreshnessReading<'_>,
    is_listed: bool,
    batches_waiting: u64,
) -> StatusReply {
    // Read before and after the holders, so that a publisher that changes between the two lists is in one of them.
    let count_refused = || namespace.indexer.refused().count(None);
    let refused = count_refused();
    let mut holders = namespace.indexer.holders();
    let is_one_unheard = !is_listed || look.is_unheld_behind(&namespace.name, None, &holders);
    holders.sort_unstable_by(|one, other| one.id.cmp(&other.id));
    let holders = holders
        .iter()
        .map(|holder| report(holder, trust, look, &namespace.name));
    StatusReply {
        v: PROTOCOL_VERSION,
        block_size: namespace.indexer.settings().block_size.as_u32(),
        distinct_blocks: namespace.indexer.sizes().distinct_blocks,
        batches_waiting,
        unsized_holders: unsized_holders(namespace),
        refused_holders: u32::try_from(refused.max(count_refused())).unwrap_or(u32::MAX),
        unheard_holders: u32::from(is_one_unheard),
        holders: holders.collect(),
        gathered: None,
        behind_us: look.behind_us,
    }
}

/// Encodes a status reply. If it would be longer than `bytes_max`, addresses and labels are left out. Even then it can
/// be longer.
pub(in super::super) fn encode_status(reply: &mut StatusReply, bytes_max: usize) -> Vec<u8> {
    let payload = reply.encode();
    if payload.len() <= bytes_max {
        return payload;
    }
    reply.drop_profiles();
    reply.encode()
}

/// Returns the entry for a holder in a status reply. If a batch of the holder was being applied meanwhile, so that the
/// entry may show half of it, the holder is [`DegradedReason::Changing`] and not exact.
pub(crate) fn report(
    holder: &HolderRecord,
    trust: &StreamTrust,
    look: &FreshnessReading<'_>,
    namespace: &NamespaceName,
) -> HolderStatusReply {
    let read = || read_status(holder, trust, look, namespace);
    let (mut reply, is_changing) = read_holder_whole(look, &holder.id, read);
    if is_changing {
        reply.degraded = reply.degraded.with(DegradedReason::Changing);
        reply.exact = false;
    }
    reply
}

fn read_status(
    holder: &HolderRecord,
    trust: &StreamTrust,
    look: &FreshnessReading<'_>,
    namespace: &NamespaceName,
) -> HolderStatusReply {
    let (id, status) = (&holder.id, &holder.status);
    let cursor = status.cursor.load();
    let Profile { address, labels } = status.profile();
    let degraded = with_wait(status.reasons(trust).of_all_queries(), look, namespace, id);
    HolderStatusReply {
        worker: id.worker.clone(),
        rank: id.rank,
        epoch: cursor.epoch,
        seq: cursor.seq,
        blocks: status.blocks.load(),
        parked_events: status.parked_events.load(),
        foreign_chain: status.has_foreign_chain.load(),
        epoch_ahead_s: epoch_ahead_s(cursor.epoch, unix_time_us()),
        exact: degraded.is_empty(),
        degraded,
        since_us: Some(status.inexact_since_us.load()).filter(|since| *since > 0 && !degraded.is_empty()),
        address,
        labels,
    }
}
