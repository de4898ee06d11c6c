//! The memory that a mirror reports for its blocks, compared with the memory that an allocator counts.

#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod common;

use kvatlas_core::hash::BlockSize;
use kvatlas_engines::{
    DecodeLimits, Decoder, EngineBatch, Format, Mirror, MirrorSettings, SavedMirror, Translation,
};

use common::allocations::{Counting, taken_by};
use common::{Change, Engine, Store, translator};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Number of tokens in a block.
const SIZE: u32 = 16;
/// Number of blocks in a prompt.
const DEPTH: u32 = 500;

fn settings() -> MirrorSettings {
    MirrorSettings {
        block_size: BlockSize::new(SIZE).unwrap(),
        bytes_max: 1 << 30,
        has_special: false,
        proves_ancestors: true,
    }
}

/// The saved form of a mirror with `prompts` prompts.
fn saved(prompts: u32) -> SavedMirror {
    let (mut mirror, mut translator) = (Mirror::new(settings()), translator(SIZE));
    let mut decoder = Decoder::new(Format::Vllm, DecodeLimits::default());
    let (mut batch, mut output) = (EngineBatch::default(), Translation::default());
    for prompt in 0..prompts {
        let names: Vec<u64> = (0..DEPTH)
            .map(|block| u64::from(prompt * DEPTH + block))
            .collect();
        let tokens: Vec<u32> = (0..DEPTH * SIZE)
            .map(|token| prompt * DEPTH * SIZE + token)
            .collect();
        let store = Change::Store(Store::new(&names, None, &tokens, SIZE));
        decoder
            .decode(&Engine::PLAIN.payload(&[store]), &mut batch)
            .unwrap();
        output.clear();
        mirror.translate(&mut translator, &batch, &mut output);
        mirror.take_changes();
    }
    mirror.save()
}

#[test]
fn a_mirror_takes_as_much_memory_as_it_says() {
    // With these numbers, the hash table and the list of tokens have just grown or are nearly full.
    for prompts in [115, 116, 160, 200, 229, 230] {
        let saved = saved(prompts);
        let (mirror, taken) = taken_by(|| Mirror::restore(settings(), &saved).unwrap());
        let blocks = (prompts * DEPTH) as usize;
        let (said, held) = (mirror.bytes(), taken.held);
        println!(
            "{blocks} blocks: {} bytes each, {} said",
            held / blocks,
            said / blocks
        );
        assert!(
            held <= said + said / 8 && held >= said * 3 / 4,
            "{held} held, {said} said"
        );
    }
}
