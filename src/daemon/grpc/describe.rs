//! Description of the service as data, for clients that ask the server which requests it takes (reflection). Only methods that
//! are answered are described.

use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{
    DescriptorProto, EnumDescriptorProto, EnumValueDescriptorProto, FieldDescriptorProto,
    FileDescriptorProto, FileDescriptorSet, MethodDescriptorProto, ServiceDescriptorProto,
};

use super::messages::{Field, MESSAGES};

/// Package name of the messages.
const PACKAGE: &str = "kv_indexer.v1";
/// Name of the service within the package.
const SERVICE: &str = "KVIndexer";

const TIERS: [&str; 4] = ["TIER_UNKNOWN", "TIER_HBM", "TIER_DRAM", "TIER_SSD"];
const ACTIONS: [&str; 4] = [
    "ACTION_UNKNOWN",
    "ACTION_REPORT",
    "ACTION_REVOKE",
    "ACTION_CLEAR_ALL_AT_TIER",
];

/// The methods that are always answered. The request and the response of a method are named after it.
const METHODS: [&str; 2] = ["MatchExternalKvPrefix", "MatchExternalKv"];
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

/// Returns the description of a field. Its name in Rust may have `r#` before it.
fn field(field: &Field) -> FieldDescriptorProto {
    let word = field.form.split([',', ' ']).next().unwrap_or_default();
    let (kind, of) = match word {
        "enumeration" => (Some(Type::Enum), field.form.split('"').nth(1)),
        "message" => (
            Some(Type::Message),
            field.of.split(['<', '>', ' ']).rfind(|word| !word.is_empty()),
        ),
        scalar => (
            Type::from_str_name(&format!("TYPE_{}", scalar.to_uppercase())),
            None,
        ),
    };
    let label = if field.form.ends_with("repeated") {
        Label::Repeated
    } else {
        Label::Optional
    };
    FieldDescriptorProto {
        name: named(field.name.trim_start_matches("r#")),
        number: Some(field.number),
        label: Some(label.into()),
        r#type: kind.map(Into::into),
        type_name: of.and_then(within),
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
    use super::super::messages::{ExternalKvActionType, TierType};
    use super::*;

    #[test]
    fn every_kind_of_field_is_described() {
        let file = descriptors(true).file.remove(0);
        let described = |message: &str| -> Vec<_> {
            let mut messages = file.message_type.iter();
            let message = messages.find(|known| known.name() == message).unwrap();
            let fields = message.field.iter();
            fields
                .map(|field| {
                    let of = field.type_name().rsplit('.').next().unwrap_or_default();
                    (field.name(), field.number(), field.r#type(), of, field.label())
                })
                .collect()
        };
        let (one, list) = (Label::Optional, Label::Repeated);
        assert_eq!(
            described("ExternalKvAction"),
            [
                ("type", 1, Type::Enum, "ExternalKvActionType", one),
                ("tier", 2, Type::Enum, "TierType", one),
                ("hashes", 3, Type::Sfixed64, "", list),
                ("component_masks", 4, Type::Uint32, "", list),
                ("block_sizes", 5, Type::Uint32, "", list),
            ]
        );
        assert_eq!(
            described("ApplyExternalKvBatchRequest"),
            [
                ("worker_id", 1, Type::String, "", one),
                ("seq", 2, Type::Uint64, "", one),
                ("actions", 3, Type::Message, "ExternalKvAction", list),
                ("worker_address", 4, Type::String, "", one),
                ("cache_spec", 6, Type::Message, "WorkerCacheSpec", one),
                ("worker_epoch", 7, Type::String, "", one),
                ("enforce_sequence", 8, Type::Bool, "", one),
            ]
        );
        let fields = file.message_type.iter().flat_map(|message| &message.field);
        assert!(fields.clone().all(|field| field.r#type.is_some()));
        assert_eq!((file.message_type.len(), fields.count()), (16, 50));
    }

    #[test]
    fn enumerations_have_the_words_of_their_numbers() {
        for (tier, name) in [
            (TierType::Unknown, "TIER_UNKNOWN"),
            (TierType::Hbm, "TIER_HBM"),
            (TierType::Dram, "TIER_DRAM"),
            (TierType::Ssd, "TIER_SSD"),
        ] {
            assert_eq!(TIERS[tier as usize], name);
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
        assert_eq!((methods(false), methods(true)), (2, 5));
    }
}
