//! Mutation fuzzer with a seed, for every decoder. It checks that no decoder panics. It also checks that a decoded
//! message, encoded and decoded again, stays the same.

use fastrand::Rng;
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::super::{
    BatchReply, EventBatch, NamespaceName, QueryReply, QueryRequest, StatusReply, Subjects, WireLimits,
};
use super::generate;

fn setting(name: &str, default: u64) -> u64 {
    let text = std::env::var(name).ok();
    text.map_or(default, |text| {
        text.parse().unwrap_or_else(|_| panic!("{name} must be a number"))
    })
}

/// Returns valid payloads of every kind, made from a seed.
fn corpus(seed: u64) -> Vec<Vec<u8>> {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let random = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let mut runner = TestRunner::new_with_rng(Config::default(), random);
    let mut payloads = vec![Vec::new(), vec![0x80]];
    for _ in 0..40 {
        payloads.push(
            generate::batch()
                .new_tree(&mut runner)
                .unwrap()
                .current()
                .encode(),
        );
        payloads.push(
            generate::request()
                .new_tree(&mut runner)
                .unwrap()
                .current()
                .encode(),
        );
        payloads.push(
            generate::query_reply()
                .new_tree(&mut runner)
                .unwrap()
                .current()
                .encode(),
        );
        payloads.push(
            generate::batch_reply()
                .new_tree(&mut runner)
                .unwrap()
                .current()
                .encode(),
        );
        payloads.push(
            generate::status_reply()
                .new_tree(&mut runner)
                .unwrap()
                .current()
                .encode(),
        );
    }
    payloads
}

/// Runs every decoder on the payload. Returns the number of decoders that accepted it.
fn decode_all(payload: &[u8]) -> usize {
    let limits = WireLimits::default();
    let mut taken = 0;
    let batch = EventBatch::decode(payload, &limits);
    let in_any_form = EventBatch::decode_any_form(payload, &limits);
    assert_eq!(batch, in_any_form, "{payload:02x?}");
    if let Ok(batch) = batch {
        taken += 1;
        assert_eq!(
            EventBatch::decode(&batch.encode(), &limits),
            Ok(batch),
            "{payload:02x?}"
        );
    }
    if let Ok(request) = QueryRequest::decode(payload, &limits) {
        taken += 1;
        assert_eq!(
            QueryRequest::decode(&request.encode(), &limits),
            Ok(request),
            "{payload:02x?}"
        );
    }
    if let Ok(reply) = QueryReply::decode(payload) {
        taken += 1;
        assert_eq!(
            QueryReply::decode(&reply.encode()).unwrap(),
            reply,
            "{payload:02x?}"
        );
    }
    if let Ok(reply) = BatchReply::decode(payload) {
        taken += 1;
        assert_eq!(
            BatchReply::decode(&reply.encode()).unwrap(),
            reply,
            "{payload:02x?}"
        );
    }
    if let Ok(reply) = StatusReply::decode(payload) {
        taken += 1;
        assert_eq!(
            StatusReply::decode(&reply.encode()).unwrap(),
            reply,
            "{payload:02x?}"
        );
    }
    taken
}

/// First bytes of MessagePack values that a decoder may get wrong: values that are longer than the payload, values that
/// contain other values, and bytes that are not MessagePack.
const MARKERS: [u8; 22] = [
    0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf, 0xc0, 0xc1, 0xc4, 0xc6, 0xc7, 0xc9, 0xcb, 0xcf, 0xd3, 0xd8, 0xd9,
    0xdb, 0xdc, 0xdd, 0xde, 0xdf,
];

fn mutate(random: &mut Rng, payload: &mut Vec<u8>, other: &[u8]) {
    let place = random.usize(..payload.len() + 1);
    match random.usize(..8) {
        0 | 1 if !payload.is_empty() => {
            let place = random.usize(..payload.len());
            payload[place] ^= 1 << random.usize(..8);
        }
        2 if !payload.is_empty() => {
            let place = random.usize(..payload.len());
            payload[place] = random.u8(..);
        }
        3 => payload.truncate(place),
        4 => {
            let from = random.usize(..other.len() + 1);
            let to = from + random.usize(..other.len() - from + 1);
            payload.splice(place..place, other[from..to].iter().copied());
        }
        5 => {
            payload.truncate(place);
            payload.extend_from_slice(&other[random.usize(..other.len() + 1)..]);
        }
        6 => payload.insert(place, MARKERS[random.usize(..MARKERS.len())]),
        _ => {
            let to = place + random.usize(..(payload.len() - place).min(20) + 1);
            payload.drain(place..to);
        }
    }
}

#[test]
fn mutated_payloads_never_panic() {
    let iterations = setting("KVATLAS_TEST_FUZZ_ITERATIONS", 100_000);
    let seed = setting("KVATLAS_TEST_SEED", 1);
    eprintln!("KVATLAS_TEST_SEED={seed} replays this run of {iterations} payloads");
    let corpus = corpus(seed);
    let mut random = Rng::with_seed(seed);
    let mut taken = 0;
    for _ in 0..iterations {
        let mut payload = corpus[random.usize(..corpus.len())].clone();
        for _ in 0..1 + random.usize(..3) {
            let other = random.usize(..corpus.len());
            mutate(&mut random, &mut payload, &corpus[other]);
        }
        taken += decode_all(&payload);
    }
    // If fewer payloads are accepted, the mutations are too coarse to get beyond the first checks.
    assert!(
        taken as u64 > iterations / 50,
        "{taken} of {iterations} payloads were taken"
    );
}

#[test]
fn payloads_cut_anywhere_never_panic() {
    for payload in corpus(2) {
        assert!(payload.len() < 2 || decode_all(&payload) > 0);
        // Cutting a long payload at every byte takes too long. Most of its structure is near its two ends.
        for end in (0..payload.len()).filter(|end| *end < 300 || payload.len() - end < 100) {
            let cut = &payload[..end];
            assert!(EventBatch::decode(cut, &WireLimits::default()).is_err());
            assert!(QueryRequest::decode(cut, &WireLimits::default()).is_err());
            decode_all(cut);
        }
    }
}

#[test]
fn noise_never_panics() {
    let mut random = Rng::with_seed(3);
    for _ in 0..setting("KVATLAS_TEST_FUZZ_ITERATIONS", 100_000) / 2 {
        let noise: Vec<u8> = (0..random.usize(..40)).map(|_| random.u8(..)).collect();
        decode_all(&noise);
        // The noise also comes after the head of a map with a text key.
        decode_all(&[&[0x81, 0xa6][..], b"events", &noise].concat());
    }
}

/// Decodes payloads that are nested as deeply as their size allows. No decoder may recurse without bound.
#[test]
fn deep_nesting_never_overflows_the_stack() {
    for marker in [0x91_u8, 0x81, 0x92, 0xdd] {
        for head in [
            &[][..],
            b"\x81\xa1x",
            b"\x81\xa6events",
            b"\x81\xa7holders",
            b"\x81\xa7results\x91",
        ] {
            let mut payload = head.to_vec();
            payload.resize(1 << 20, marker);
            assert_eq!(decode_all(&payload), 0);
        }
    }
}

/// A test that decodes payloads of a few bytes. In each payload a list claims to have far more elements than the
/// payload has bytes.
#[test]
fn announced_lengths_that_lie_take_no_memory() {
    let heads = [
        "events",
        "queries",
        "tokens",
        "block_hashes",
        "sequence_hashes",
        "lineage_hashes",
        "workers",
        "holders",
        "results",
    ];
    for head in heads {
        for lie in [
            &[0xdd, 0x7f, 0xff, 0xff, 0xff][..],
            &[0xc6, 0xff, 0xff, 0xff, 0xf8],
            &[0xdf, 0xff, 0xff, 0xff, 0xff],
            &[0xdb, 0xff, 0xff, 0xff, 0xff],
        ] {
            let mut payload = vec![0x81, 0xa0 | u8::try_from(head.len()).unwrap()];
            payload.extend(head.bytes());
            payload.extend(lie);
            assert_eq!(decode_all(&payload), 0);
        }
    }
}

#[test]
fn any_subject_is_parsed_or_refused() {
    let subjects = Subjects::new("site.kvatlas").unwrap();
    let namespace = NamespaceName::new("llama").unwrap();
    let worker = super::super::WorkerName::new("gpu-0").unwrap();
    let sound = [
        subjects.events(&namespace, &worker),
        subjects.query(&namespace),
        subjects.status(&namespace),
    ];
    let alphabet: Vec<char> = "abc.>*_- \u{e9}\u{0}".chars().collect();
    let mut random = Rng::with_seed(4);
    for _ in 0..20_000 {
        let mut subject: Vec<char> = sound[random.usize(..3)].chars().collect();
        for _ in 0..random.usize(..4) {
            let place = random.usize(..subject.len().max(1));
            match random.usize(..3) {
                0 => subject[place] = alphabet[random.usize(..alphabet.len())],
                1 => subject.insert(place, alphabet[random.usize(..alphabet.len())]),
                _ => subject.truncate(place.max(1)),
            }
        }
        let subject: String = subject.into_iter().collect();
        // The parts of a parsed subject build the same subject again, so no subject stands for another one.
        if let Ok((namespace, worker)) = subjects.parse_events(&subject, 64) {
            assert_eq!(subjects.events(&namespace, &worker), subject);
        }
        if let Ok(namespace) = subjects.parse_query(&subject, 64) {
            assert_eq!(subjects.query(&namespace), subject);
        }
        if let Ok(namespace) = subjects.parse_status(&subject, 64) {
            assert_eq!(subjects.status(&namespace), subject);
        }
    }
}
