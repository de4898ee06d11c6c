//! Models whose first groups of layers are not main attention on the device.

use super::*;

fn settings_of_vllm() -> TranslatorSettings {
    TranslatorSettings {
        block_size: BlockSize::new(SIZE).unwrap(),
        ..TranslatorSettings::for_format(Format::Vllm)
    }
}

fn of_vllm() -> Translator {
    Translator::new(settings_of_vllm())
}

/// A store of all blocks of one group of main attention in this range of tokens.
fn of_main(group: u32, medium: &'static str, tokens_of: std::ops::Range<u32>) -> Change {
    changed(main(tokens_of), |store| {
        (store.group, store.medium) = (Some((group, Some("mla_attention"))), Some(medium));
    })
}

/// Tests events of vLLM's HiSparse. Those of group 1, on the device, come first. Those of group 0, in a pool on the
/// host, follow.
#[test]
fn groups_of_main_attention_in_different_tiers_are_never_exact() {
    let mut told = Told::of(of_vllm());
    told.step(&[of_main(1, "GPU", 0..40)]);
    assert!(told.translator.hides_groups(), "nobody knows what group 0 has");
    told.step(&[of_main(0, "CPU", 0..40)]);
    assert!(told.translator.hides_groups(), "no tier has all groups");
    told.translator = restarted(&told.translator, settings_of_vllm());
    assert!(told.translator.hides_groups());
    told.step(&[Change::Clear, Change::Clear, of_main(1, "GPU", 0..8)]);
    told.step(&[of_main(0, "CPU", 0..8)]);
    assert!(told.translator.hides_groups());
    // With a connector, the host has copies of the device's blocks, so the groups are not in different tiers.
    let mut told = Told::of(of_vllm());
    told.step(&[of_main(0, "GPU", 0..8), of_main(1, "GPU", 0..8)]);
    told.step(&[of_main(0, "CPU", 0..8), of_main(1, "CPU", 0..8)]);
    assert_eq!(
        (told.translator.hides_groups(), told.naive.blocks(0).len()),
        (false, 2)
    );
}

#[test]
fn a_window_may_be_the_first_group() {
    let mut told = Told::of(of_vllm());
    let first = |ends: &[u64]| stored(0, "sliding_window", Some(9), SIZE, 0..24, ends);
    told.step(&[first(&[]), of_main(1, "GPU", 0..24)]);
    assert!(!told.translator.hides_groups());
    // The kind of group 0 is unknown until it has a block. So it is unknown which of its blocks a request needs.
    let mut told = Told::of(of_vllm());
    told.step(&[of_main(1, "GPU", 0..4)]);
    assert!(told.translator.hides_groups());
    told.step(&[first(&[20, 24]), of_main(1, "GPU", 4..24)]);
    assert_eq!(
        (told.resumable(), told.translator.hides_groups()),
        (BTreeSet::from([24]), false)
    );
}

/// Events of Qwen3-Next with decode context parallelism: a state has half as many tokens in a block as main attention.
#[test]
fn states_with_smaller_blocks_than_main_attention_are_never_exact() {
    let mut told = Told::new();
    told.step(&[stored(1, "mamba", None, SIZE / 2, 0..8, &[8]), main(0..8)]);
    assert!(told.translator.hides_groups());
    told.step(&[Change::Clear]);
    assert!(told.translator.hides_groups());
}
