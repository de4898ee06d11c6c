//! The messages as data, for clients that ask the server what it takes. What is not answered is not described.

use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{
    DescriptorProto, EnumDescriptorProto, EnumValueDescriptorProto, FieldDescriptorProto,
    FileDescriptorProto, FileDescriptorSet, MethodDescriptorProto, ServiceDescriptorProto,
};

/// The package of the messages.
const PACKAGE: &str = "kv_indexer.v1";
/// The service's name within it.
const SERVICE: &str = "KVIndexer";

/// A field: its name, number and type, the name of its message or enumeration, and whether it may come several times.
type Field = (&'static str, i32, Type, &'static str, bool);

const MESSAGES: [(&str, &[Field]); 7] = [
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
];

const TIERS: [&str; 4] = ["TIER_UNKNOWN", "TIER_HBM", "TIER_DRAM", "TIER_SSD"];

/// The methods that are answered. Their messages are named after them.
const METHODS: [&str; 2] = ["MatchExternalKvPrefix", "MatchExternalKv"];

fn named(name: &str) -> Option<String> {
    Some(name.to_owned())
}

/// A name with its package, as descriptors refer to it.
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

/// The file that describes the service.
pub(super) fn descriptors() -> FileDescriptorSet {
    let messages = MESSAGES.iter().map(|(name, fields)| DescriptorProto {
        name: named(name),
        field: fields.iter().map(field).collect(),
        ..DescriptorProto::default()
    });
    let tiers = (0..).zip(TIERS).map(|(number, name)| EnumValueDescriptorProto {
        name: named(name),
        number: Some(number),
        ..EnumValueDescriptorProto::default()
    });
    let file = FileDescriptorProto {
        name: named("kv_indexer.proto"),
        package: named(PACKAGE),
        syntax: named("proto3"),
        message_type: messages.collect(),
        enum_type: vec![EnumDescriptorProto {
            name: named("TierType"),
            value: tiers.collect(),
            ..EnumDescriptorProto::default()
        }],
        service: vec![ServiceDescriptorProto {
            name: named(SERVICE),
            method: METHODS.into_iter().map(method).collect(),
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

    use super::super::messages::{
        ExternalKvNodeMatch, ExternalKvPrefixMatch, MatchExternalKvPrefixRequest,
        MatchExternalKvPrefixResponse, MatchExternalKvRequest, MatchExternalKvResponse, TierHashes, TierType,
    };
    use super::*;

    /// The fields on the wire, by number, and how they are written.
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

    /// How fields are written by their description.
    fn described(name: &str) -> Vec<(i32, WireType)> {
        let (_, fields) = MESSAGES.iter().find(|(known, _)| *known == name).unwrap();
        let wire = |kind: Type, is_list: bool| match kind {
            Type::Uint32 | Type::Bool | Type::Enum => WireType::Varint,
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
}
