//! The translator before the index: it turns the events of one holder into changes of the holder's share of the
//! index.
//!
//! The index knows blocks by sequence and lineage hashes. Events may give blocks in other ways: by the engine's own
//! names, by several names for one block, after parents that have not arrived, or only by content. The translator
//! resolves all this, for each holder separately. For a publisher that uses the contract's hashes, the translator
//! stores nothing: its blocks are in the holder's share of the index ([`Share`](crate::index::share::Share)) and
//! nowhere else.
//!
//! A block that the holder has is in one of two places:
//!
//! - among the runs, at a [`Spot`](crate::index::runs::Spot) that determines its whole prefix.
//! - among the orphans, while the holder has never had its parent.
//!
//! The holder's lane and the threads that evict blocks take turns at the holder, under a lock. Each file uses only
//! the files above it:
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
