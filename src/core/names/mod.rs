//! Translates the events of one holder into changes of the holder's blocks in the index.
//!
//! The index knows blocks by sequence and lineage hashes. An event may give blocks in other ways:
//!
//! - by the engine's own names, of which one block can have several;
//! - after a parent that has not arrived;
//! - only by content.
//!
//! This module finds the hashes and places of such blocks, for each holder separately. If a publisher uses the
//! contract's hashes, this module stores nothing: the blocks are in the holder's share of the index
//! ([`Share`](crate::index::share::Share)) and nowhere else.
//!
//! A block that the holder has is in one of two places:
//!
//! - among the runs, at a [`Spot`](crate::index::runs::Spot) that determines its whole prefix.
//! - among the orphans. An *orphan* is a block whose parent the holder has never had, so the block's place is
//!   unknown.
//!
//! A *waiting event* is a stored event that is kept until its parent arrives. A *turn* is the time in which one
//! thread has the locks of the holder and of the runs. The holder's lane, which applies the events, and the threads
//! that evict blocks change the holder only in turns. A long event takes several turns.
//!
//! Each file uses only the files above it:
//!
//! | file | what |
//! |---|---|
//! | `applied.rs`, `marks.rs` | the outcome of an event; which of its blocks are resumable |
//! | `alias.rs`, `copies.rs`, `table.rs` | names of one block; further names; the table of a holder's names |
//! | `form.rs` | how a block is named, as a note that the share keeps with the block |
//! | `blocks.rs` | blocks to be stored |
//! | `orphans.rs`, `parking.rs` | blocks whose parent is not known; events that wait for their parent |
//! | `state.rs` | the whole state of a holder: its names, orphans, waiting events and share |
//! | `find.rs`, `naming.rs` | finding blocks by name or hash; giving names and taking them away |
//! | `resolve.rs`, `claims.rs` | hashes, names and place of the blocks of a stored event; parents that do not exist |
//! | `settle.rs`, `store.rs`, `remove.rs` | storing single blocks; storing consecutive blocks; removing blocks |
//! | `holder.rs`, `dump.rs`, `turn.rs` | one holder, its blocks as events, and applying events |
//! | `writer.rs`, `walked.rs` | the writer that a lane has; holders in walks |

mod alias;
mod applied;
mod blocks;
mod claims;
mod copies;
mod dump;
mod find;
mod form;
mod holder;
mod marks;
mod naming;
mod orphans;
mod parking;
mod remove;
mod resolve;
mod settle;
mod state;
mod store;
mod table;
mod turn;
mod walked;
mod writer;

pub use applied::{Applied, RejectReason};
pub use walked::RestoredRun;
pub use writer::HolderWriter;

#[cfg(test)]
pub(crate) use parking::UNPLACED_MAX;
