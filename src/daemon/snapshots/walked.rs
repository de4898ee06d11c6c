//! Holders of a snapshot whose blocks a walk over the index finds. For each namespace, the file has the blocks of all
//! these holders together, as a *forest*, with each block once.

use std::collections::BTreeMap;

use tokio::runtime::Handle;

use crate::lanes::{DumpPosition, HolderDump, LanePool, Revisited};
use kvatlas_core::index::{HolderWalk, WalkedHolder};
use kvatlas_core::snapshot::forest::{ForestEncoder, Pushed};
use kvatlas_core::snapshot::{HolderFrame, InForest};
use kvatlas_core::stream::StreamGeneration;
use kvatlas_core::wire::{DegradedReason, DegradedReasons, NamespaceName, Rank, WorkerName};

use super::directory::FileWriter;
use super::save::SaveError;

type HolderName = (NamespaceName, WorkerName, Rank);

/// Holders whose blocks a walk over the index finds. Each has the number of its frame (record) in the file.
#[derive(Debug, Default)]
pub(super) struct Walked {
    holders: Vec<HolderVisit>,
    /// Number of each holder's last frame (record) in the file. The holders' frames are counted from 1.
    last_frames: BTreeMap<HolderName, u64>,
    frames: u64,
}

#[derive(Debug)]
struct HolderVisit {
    /// Number of the frame (record) with this state of the holder. The holders' frames in the file are counted from 1.
    own_frame: u64,
    lane: usize,
    position: DumpPosition,
    walked: WalkedHolder,
    frame: HolderFrame,
}

impl Walked {
    /// Notes a dumped holder whose frame (record) is written next. `lane` is the number of the lane that has dumped the
    /// holder. If a walk is to find the holder's blocks, gives the holder a number, and stores the number in the frame.
    /// The file's forests (blocks of many holders) name the holder by this number.
    pub(super) fn note(&mut self, lane: usize, position: &DumpPosition, dump: &mut HolderDump) {
        self.frames += 1;
        self.last_frames.insert(name_of(&dump.frame), self.frames);
        let Some(walked) = dump.walked.take() else { return };
        dump.frame.forest = Some(InForest {
            // This number fits a `u32`: an index has at most 65,536 slots for holders, and there are fewer than 65,536
            // namespaces.
            number: u32::try_from(self.holders.len()).unwrap_or(u32::MAX),
            tier: walked.tier(),
        });
        self.holders.push(HolderVisit {
            own_frame: self.frames,
            lane,
            position: position.clone(),
            walked,
            frame: dump.frame.clone(),
        });
    }

    /// Walks over the indexes and writes the blocks. All blocks of an index are written as one forest, which has each
    /// distinct block once.
    pub(super) fn write_forests(&mut self, writer: &mut FileWriter<'_, '_>) -> Result<(), SaveError> {
        // A namespace has two indexes if it was forgotten and made again between two dumps.
        let mut indexes: BTreeMap<(&NamespaceName, usize), Vec<u32>> = BTreeMap::new();
        for (number, visit) in (0..).zip(&self.holders) {
            let index = (&visit.frame.namespace, visit.walked.index_number());
            indexes.entry(index).or_default().push(number);
        }
        let forests: Vec<Vec<u32>> = indexes.into_values().collect();
        for numbers in forests {
            self.write_forest(numbers, writer)?;
        }
        Ok(())
    }

    fn write_forest(&mut self, numbers: Vec<u32>, writer: &mut FileWriter<'_, '_>) -> Result<(), SaveError> {
        let holders = numbers.iter().filter_map(|number| {
            let visit = self.holders.get(*number as usize)?;
            Some((*number, &visit.walked))
        });
        let Some(mut walk) = HolderWalk::new(holders) else {
            return Ok(());
        };
        let mut encoder = ForestEncoder::new(numbers);
        let mut left_out = Vec::new();
        while let Some((run, parts)) = walk.next() {
            match encoder.push(run, parts) {
                Pushed::Taken => {}
                Pushed::Unheld => walk.skip_subtree(),
                Pushed::TooWide => {
                    left_out.extend(parts.iter().map(|part| part.holder));
                    walk.skip_subtree();
                }
            }
            if let Some(frame) = encoder.take_frame() {
                writer.write_forest(&frame)?;
            }
        }
        for frame in encoder.finish() {
            writer.write_forest(&frame)?;
        }
        for number in left_out {
            if let Some(visit) = self.holders.get_mut(number as usize) {
                visit.walked.give_up();
            }
        }
        Ok(())
    }

    /// Writes a holder again, as events, if its dump is no longer valid. A dump is valid as long as two things together
    /// give the holder's present state: the blocks that the walk found, and the batches after the dump.
    pub(super) fn write_changed(
        self,
        writer: &mut FileWriter<'_, '_>,
        pool: &LanePool,
        generation: StreamGeneration,
        runtime: &Handle,
    ) -> Result<(), SaveError> {
        for visit in self.holders {
            if self.last_frames.get(&name_of(&visit.frame)) != Some(&visit.own_frame) {
                // The holder left and came back. Its later frame has been written.
                continue;
            }
            let mut frame = visit.frame.clone();
            let revisiting = pool.revisit(visit.lane, visit.position, visit.walked, visit.frame, generation);
            match runtime.block_on(revisiting)? {
                Revisited::Unchanged => {}
                Revisited::Changed(dump) => write_dump(writer, *dump)?,
                Revisited::Gone => {
                    // The holder left, perhaps before the walk found all its blocks. If it comes back, it must not
                    // count as whole.
                    let reasons = DegradedReasons::from_bits(frame.degraded_bits).with(DegradedReason::Gap);
                    frame.degraded_bits = reasons.bits();
                    (frame.blocks, frame.forest) = (0, None);
                    writer.write_holder(&frame)?;
                }
            }
        }
        Ok(())
    }
}

/// Writes a dumped holder: first its frame (the record with its cursor), then its events, as batches.
pub(super) fn write_dump(writer: &mut FileWriter<'_, '_>, dump: HolderDump) -> Result<(), SaveError> {
    writer.write_holder(&dump.frame)?;
    for batch in dump.batches() {
        writer.write_batch(&batch)?;
    }
    Ok(())
}

fn name_of(frame: &HolderFrame) -> HolderName {
    (frame.namespace.clone(), frame.worker.clone(), frame.rank)
}
