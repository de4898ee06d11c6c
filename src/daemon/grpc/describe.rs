//! Description of the service as data, for clients that ask the server which requests it takes (reflection). Only methods that
//! are answered are described.

use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{
    DescriptorProto, EnumDescriptorProto, EnumValueDescriptorProto, FieldDescriptorProto,
    FileDescriptorProto, FileDescriptorSet, MethodDescriptorProto, ServiceDescriptorProto,
};

/// Package name of the messages.
const PACKAGE: &str = "kv_indexer.v1";
/// Name of the service within the package.
const SERVICE: &str = "KVIndexer";

/// A field: its name, number and type, the name of its message or enumeration, and whether it may come several times.
type Field = (&'static str, i32, Type, &'static str, bool);

const MESSAGES: [(&str, &[Field]); 19] = [
    (
        "MatchExternalKvPrefixRequest",
        &[
            ("hashes", 1, Type::Sfixed64, "", true),
            ("max_blocks", 2, Type::Uint32, "", false),
        ],
    ),
    (
        "ExternalKvPrefixMatch",
        &[
            ("worker_address", 1, Type::String, "", false),
            ("matched_prefix_blocks", 2, Type::Uint32, "", false),
            ("worker_id", 3, Type::String, "", false),
        ],
    ),
    (
        "MatchExternalKvPrefixResponse",
        &[
            ("matches", 1, Type::Message, "ExternalKvPrefixMatch", true),
            ("best_prefix_blocks", 2, Type::Uint32, "", false),
            ("blocks_read", 3, Type::Uint32, "", false),
        ],
    ),
    (
        "MatchExternalKvRequest",
        &[
            ("hashes", 1, Type::Sfixed64, "", true),
            ("count_as_hit", 2, Type::Bool, "", false),
        ],
    ),
    (
        "TierHashes",
        &[
            ("tier", 1, Type::Enum, "TierType", false),
            ("hashes", 2, Type::Sfixed64, "", true),
            ("component_masks", 3, Type::Uint32, "", true),
            ("block_sizes", 4, Type::Uint32, "", true),
        ],
    ),
    (
        "ExternalKvNodeMatch",
        &[
            ("worker_id", 1, Type::String, "", false),
            ("address", 2, Type::String, "", false),
            ("hashes_by_tier", 3, Type::Message, "TierHashes", true),
        ],
    ),
    (
        "MatchExternalKvResponse",
        &[("matches", 1, Type::Message, "ExternalKvNodeMatch", true)],
    ),
    (
        "WorkerCacheSpec",
        &[
            ("version", 1, Type::Uint32, "", false),
            ("components", 2, Type::Uint32, "", false),
            ("swa_window_tokens", 3, Type::Uint32, "", false),
            ("full_tier_mask", 4, Type::Uint32, "", false),
            ("swa_tier_mask", 5, Type::Uint32, "", false),
            ("mamba_tier_mask", 6, Type::Uint32, "", false),
        ],
    ),
    (
        "ExternalKvAction",
        &[
            ("type", 1, Type::Enum, "ExternalKvActionType", false),
            ("tier", 2, Type::Enum, "TierType", false),
            ("hashes", 3, Type::Sfixed64, "", true),
            ("component_masks", 4, Type::Uint32, "", true),
            ("block_sizes", 5, Type::Uint32, "", true),
        ],
    ),
    (
        "ApplyExternalKvBatchRequest",
        &[
            ("worker_id", 1, Type::String, "", false),
            ("seq", 2, Type::Uint64, "", false),
            ("actions", 3, Type::Message, "ExternalKvAction", true),
            ("worker_address", 4, Type::String, "", false),
            ("cache_spec", 6, Type::Message, "WorkerCacheSpec", false),
            ("worker_epoch", 7, Type::String, "", false),
            ("enforce_sequence", 8, Type::Bool, "", false),
        ],
    ),
    (
        "ApplyExternalKvBatchResponse",
        &[
            ("applied_seq", 4, Type::Uint64, "", false),
            ("duplicate", 5, Type::Bool, "", false),
        ],
    ),
    (
        "ReplaceExternalKvSnapshotRequest",
        &[
            ("worker_id", 1, Type::String, "", false),
            ("worker_address", 2, Type::String, "", false),
            ("worker_epoch", 3, Type::String, "", false),
            ("applied_seq", 4, Type::Uint64, "", false),
            ("hashes_by_tier", 5, Type::Message, "TierHashes", true),
            ("cache_spec", 6, Type::Message, "WorkerCacheSpec", false),
        ],
    ),
    (
        "ReplaceExternalKvSnapshotResponse",
        &[("applied_seq", 1, Type::Uint64, "", false)],
    ),
    (
        "ExpectedWorker",
        &[
            ("worker_id", 1, Type::String, "", false),
            ("worker_address", 2, Type::String, "", false),
            ("cache_spec", 3, Type::Message, "WorkerCacheSpec", false),
        ],
    ),
    (
        "ConfigureExpectedWorkersRequest",
        &[("workers", 1, Type::Message, "ExpectedWorker", true)],
    ),
    (
        "ConfigureExpectedWorkersResponse",
        &[
            ("total_workers", 1, Type::Uint32, "", false),
            ("ready_workers", 2, Type::Uint32, "", false),
        ],
    ),
    (
        "GetExternalKvHitCountsRequest",
        &[("hashes", 1, Type::Sfixed64, "", true)],
    ),
    (
        "HitCountEntry",
        &[
            ("hash", 1, Type::Sfixed64, "", false),
            ("hit_count_total", 2, Type::Uint64, "", false),
        ],
    ),
    (
        "GetExternalKvHitCountsResponse",
        &[("entries", 1, Type::Message, "HitCountEntry", true)],
    ),
];

const TIERS: [&str; 4] = ["TIER_UNKNOWN", "TIER_HBM", "TIER_DRAM", "TIER_SSD"];
const ACTIONS: [&str; 4] = [
    "ACTION_UNKNOWN",
    "ACTION_REPORT",
    "ACTION_REVOKE",
    "ACTION_CLEAR_ALL_AT_TIER",
];

/// The methods that are always answered. The request and the response of a method are named after it.
const METHODS: [&str; 3] = [
    "MatchExternalKvPrefix",
    "MatchExternalKv",
    "GetExternalKvHitCounts",
];
/// The methods that report workers' blocks. They are described only if reports are taken.
const REPORTS: [&str; 3] = [
    "ConfigureExpectedWorkers",
    "ReplaceExternalKvSnapshot",
    "ApplyExternalKvBatch",
];

fn named(name: &str) -> Option<String> {
    Some(name.to_owned())
}

/// Returns `.PACKAGE.NAME`, the form in which descriptors refer to a message or an enumeration.
fn within(name: &str) -> Option<String> {
    Some(format!(".{PACKAGE}.{name}"))
}

fn field((name, number, kind, of, is_list): &Field) -> FieldDescriptorProto {
    let label = if *is_list {
        Label::Repeated
    } else {
        Label::Optional
    };
    FieldDescriptorProto {
        name: named(name),
        number: Some(*number),
        label: Some(label.into()),
        r#type: Some((*kind).into()),
        type_name: if of.is_empty() { None } else { within(of) },
        json_name: None,
        ..FieldDescriptorProto::default()
    }
}

fn method(name: &str) -> MethodDescriptorProto {
    MethodDescriptorProto {
        name: named(name),
        input_type: within(&format!("{name}Request")),
        output_type: within(&format!("{name}Response")),
        ..MethodDescriptorProto::default()
    }
}

fn enumeration(name: &str, words: &[&str]) -> EnumDescriptorProto {
    let values = (0..).zip(words).map(|(number, word)| EnumValueDescriptorProto {
        name: named(word),
        number: Some(number),
        ..EnumValueDescriptorProto::default()
    });
    EnumDescriptorProto {
        name: named(name),
        value: values.collect(),
        ..EnumDescriptorProto::default()
    }
}

/// Returns the descriptor file of the service. `takes_reports` adds the methods of [`REPORTS`].
pub(super) fn descriptors(takes_reports: bool) -> FileDescriptorSet {
    let messages = MESSAGES.iter().map(|(name, fields)| DescriptorProto {
        name: named(name),
        field: fields.iter().map(field).collect(),
        ..DescriptorProto::default()
    });
    let reports = REPORTS.into_iter().filter(|_| takes_reports);
    let file = FileDescriptorProto {
        name: named("kv_indexer.proto"),
        package: named(PACKAGE),
        syntax: named("proto3"),
        message_type: messages.collect(),
        enum_type: vec![
            enumeration("TierType", &TIERS),
            enumeration("ExternalKvActionType", &ACTIONS),
        ],
        service: vec![ServiceDescriptorProto {
            name: named(SERVICE),
            method: METHODS.into_iter().chain(reports).map(method).collect(),
            ..ServiceDescriptorProto::default()
        }],
        ..FileDescriptorProto::default()
    };
    FileDescriptorSet { file: vec![file] }
}

#[cfg(test)]
mod tests {
    use prost::Message;
    use prost::encoding::{DecodeContext, WireType, decode_key, skip_field};

    use super::super::messages::*;
    use super::*;

    /// Returns the numbers of the fields in an encoded message, each with its wire type.
    fn written(message: &impl Message) -> Vec<(i32, WireType)> {
        let bytes = message.encode_to_vec();
        let (mut rest, mut fields) = (bytes.as_slice(), Vec::new());
        while !rest.is_empty() {
            let (number, wire) = decode_key(&mut rest).unwrap();
            skip_field(wire, number, &mut rest, DecodeContext::default()).unwrap();
            fields.push((i32::try_from(number).unwrap(), wire));
        }
        fields
    }

    /// Returns the numbers and wire types of the fields that the description of message `name` lists.
    fn described(name: &str) -> Vec<(i32, WireType)> {
        let (_, fields) = MESSAGES.iter().find(|(known, _)| *known == name).unwrap();
        let wire = |kind: Type, is_list: bool| match kind {
            Type::Uint32 | Type::Uint64 | Type::Bool | Type::Enum if !is_list => WireType::Varint,
            Type::Sfixed64 if !is_list => WireType::SixtyFourBit,
            _ => WireType::LengthDelimited,
        };
        let of_field = |(_, number, kind, _, is_list): &Field| (*number, wire(*kind, *is_list));
        fields.iter().map(of_field).collect()
    }

    #[test]
    fn what_is_described_is_what_is_sent() {
        let prefix = ExternalKvPrefixMatch {
            worker_address: "a".to_owned(),
            matched_prefix_blocks: 1,
            worker_id: "b".to_owned(),
        };
        let hashes = TierHashes {
            tier: TierType::Ssd.into(),
            hashes: vec![-1],
            component_masks: vec![1],
            block_sizes: vec![1],
        };
        let node = ExternalKvNodeMatch {
            worker_id: "a".to_owned(),
            address: "b".to_owned(),
            hashes_by_tier: vec![hashes.clone()],
        };
        let question = MatchExternalKvPrefixRequest {
            hashes: vec![-1],
            max_blocks: 1,
        };
        let answer = MatchExternalKvPrefixResponse {
            matches: vec![prefix.clone()],
            best_prefix_blocks: 1,
            blocks_read: 1,
        };
        let about_tiers = MatchExternalKvRequest {
            hashes: vec![-1],
            count_as_hit: true,
        };
        let of_tiers = MatchExternalKvResponse {
            matches: vec![node.clone()],
        };
        for (name, fields) in [
            ("MatchExternalKvPrefixRequest", written(&question)),
            ("ExternalKvPrefixMatch", written(&prefix)),
            ("MatchExternalKvPrefixResponse", written(&answer)),
            ("MatchExternalKvRequest", written(&about_tiers)),
            ("TierHashes", written(&hashes)),
            ("ExternalKvNodeMatch", written(&node)),
            ("MatchExternalKvResponse", written(&of_tiers)),
        ] {
            assert_eq!(described(name), fields, "{name}");
        }
        for (tier, name) in [
            (TierType::Unknown, "TIER_UNKNOWN"),
            (TierType::Hbm, "TIER_HBM"),
            (TierType::Dram, "TIER_DRAM"),
            (TierType::Ssd, "TIER_SSD"),
        ] {
            assert_eq!(TIERS[tier as usize], name);
        }
    }

    fn cache_spec() -> WorkerCacheSpec {
        WorkerCacheSpec {
            version: 1,
            components: 1,
            swa_window_tokens: 1,
            full_tier_mask: 1,
            swa_tier_mask: 1,
            mamba_tier_mask: 1,
        }
    }

    fn text() -> String {
        "a".to_owned()
    }

    fn batch() -> ApplyExternalKvBatchRequest {
        ApplyExternalKvBatchRequest {
            worker_id: text(),
            seq: 1,
            actions: vec![ExternalKvAction {
                r#type: ExternalKvActionType::Report.into(),
                tier: TierType::Hbm.into(),
                hashes: vec![-1],
                component_masks: vec![1],
                block_sizes: vec![1],
            }],
            worker_address: text(),
            cache_spec: Some(cache_spec()),
            worker_epoch: text(),
            enforce_sequence: true,
        }
    }

    fn snapshot() -> ReplaceExternalKvSnapshotRequest {
        ReplaceExternalKvSnapshotRequest {
            worker_id: text(),
            worker_address: text(),
            worker_epoch: text(),
            applied_seq: 1,
            hashes_by_tier: vec![TierHashes::default()],
            cache_spec: Some(cache_spec()),
        }
    }

    #[test]
    fn reports_are_described_as_they_are_sent() {
        let worker = ExpectedWorker {
            worker_id: text(),
            worker_address: text(),
            cache_spec: Some(cache_spec()),
        };
        let applied = ApplyExternalKvBatchResponse {
            applied_seq: 1,
            duplicate: true,
        };
        let ready = ConfigureExpectedWorkersResponse {
            total_workers: 1,
            ready_workers: 1,
        };
        let count = HitCountEntry {
            hash: -1,
            hit_count_total: 1,
        };
        for (name, fields) in [
            ("WorkerCacheSpec", written(&cache_spec())),
            ("ExternalKvAction", written(&batch().actions[0])),
            ("ApplyExternalKvBatchRequest", written(&batch())),
            ("ApplyExternalKvBatchResponse", written(&applied)),
            ("ReplaceExternalKvSnapshotRequest", written(&snapshot())),
            (
                "ReplaceExternalKvSnapshotResponse",
                written(&ReplaceExternalKvSnapshotResponse { applied_seq: 1 }),
            ),
            ("ExpectedWorker", written(&worker)),
            (
                "ConfigureExpectedWorkersRequest",
                written(&ConfigureExpectedWorkersRequest {
                    workers: vec![worker],
                }),
            ),
            ("ConfigureExpectedWorkersResponse", written(&ready)),
            (
                "GetExternalKvHitCountsRequest",
                written(&GetExternalKvHitCountsRequest { hashes: vec![-1] }),
            ),
            ("HitCountEntry", written(&count)),
            (
                "GetExternalKvHitCountsResponse",
                written(&GetExternalKvHitCountsResponse { entries: vec![count] }),
            ),
        ] {
            assert_eq!(described(name), fields, "{name}");
        }
        assert_eq!(
            ACTIONS[ExternalKvActionType::ClearAllAtTier as usize],
            "ACTION_CLEAR_ALL_AT_TIER"
        );
        assert_eq!(ACTIONS[ExternalKvActionType::Report as usize], "ACTION_REPORT");
    }

    #[test]
    fn what_is_not_answered_is_not_described() {
        let methods = |takes_reports| descriptors(takes_reports).file[0].service[0].method.len();
        assert_eq!((methods(false), methods(true)), (3, 6));
    }
}
