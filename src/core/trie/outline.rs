//! Outline: the layout of a trie as a stream. Each node comes with the number of levels to pop after it.

/// Reason why a stream of records is not a forest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OutlineError {
    /// [`Outline::leave`] was called although no node was open.
    #[error("no node is open to be left; leave each node once")]
    NothingOpen,
    /// A record's number of levels to pop is greater than the number of open levels.
    #[error("record {record} pops {pops} levels, and only {open} are open; the data is damaged")]
    PopsTooFar {
        /// Index of the record, from 0.
        record: u64,
        /// Number of levels that the record pops.
        pops: u64,
        /// Number of open levels, including the level of the record.
        open: u64,
    },
    /// A path has more levels than are allowed.
    #[error("record {record} opens more than {depth_max} levels; the data is damaged")]
    TooDeep {
        /// Index of the record, from 0.
        record: u64,
        /// Maximum number of levels that are allowed.
        depth_max: u64,
    },
    /// The stream ends, but its last record does not pop all open levels.
    #[error("{open} levels are open after the last record; the data has been cut")]
    Cut {
        /// Number of open levels.
        open: u64,
    },
}

/// Record of a stream: one node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutlineRecord<P> {
    /// The user's payload of the node.
    pub payload: P,
    /// Number of levels to pop after the node. 0 if its first child comes next, otherwise the `num_parents` of the
    /// layout.
    pub pops: u64,
}

/// Turns a walk into records. The walk is given as nodes that are entered and left. The outline holds back the last
/// node, because only the next node determines how many levels to pop after it.
#[derive(Debug, Clone)]
pub struct Outline<P> {
    held: Option<P>,
    open: u64,
    pops: u64,
}

impl<P> Default for Outline<P> {
    fn default() -> Self {
        Self {
            held: None,
            open: 0,
            pops: 0,
        }
    }
}

impl<P> Outline<P> {
    /// Makes an outline without nodes.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Opens a node as a child of the open node, or as a root. Returns the record of the node entered before, if
    /// there is one.
    pub fn enter(&mut self, payload: P) -> Option<OutlineRecord<P>> {
        self.open += 1;
        let pops = std::mem::take(&mut self.pops);
        let before = self.held.replace(payload)?;
        Some(OutlineRecord {
            payload: before,
            pops,
        })
    }

    /// Ends the open node's subtree.
    ///
    /// # Errors
    ///
    /// If no node is open.
    pub fn leave(&mut self) -> Result<(), OutlineError> {
        self.open = self.open.checked_sub(1).ok_or(OutlineError::NothingOpen)?;
        self.pops += 1;
        Ok(())
    }

    /// Ends the subtrees of all open nodes. Returns the last record, if there was any node.
    #[must_use]
    pub fn finish(self) -> Option<OutlineRecord<P>> {
        let payload = self.held?;
        Some(OutlineRecord {
            payload,
            pops: self.pops + self.open,
        })
    }
}

/// Reader that checks how many levels each record of an untrusted source pops, and returns each record's depth.
#[derive(Debug, Clone)]
pub struct OutlineReader {
    depth_max: u64,
    /// Number of open levels before the next record.
    open: u64,
    records: u64,
}

impl OutlineReader {
    /// Makes a reader that allows paths of at most `depth_max` nodes.
    #[must_use]
    pub fn new(depth_max: u64) -> Self {
        Self {
            depth_max,
            open: 0,
            records: 0,
        }
    }

    /// Takes the number of levels that the next record pops after itself, and returns the record's depth. Roots have
    /// depth 1.
    ///
    /// # Errors
    ///
    /// If the record is too deep, or pops more levels than are open.
    pub fn take(&mut self, pops: u64) -> Result<u64, OutlineError> {
        let record = self.records;
        if self.open >= self.depth_max {
            return Err(OutlineError::TooDeep {
                record,
                depth_max: self.depth_max,
            });
        }
        let depth = self.open + 1;
        self.open = depth.checked_sub(pops).ok_or(OutlineError::PopsTooFar {
            record,
            pops,
            open: depth,
        })?;
        self.records += 1;
        Ok(depth)
    }

    /// Checks that the stream is complete after the last record.
    ///
    /// # Errors
    ///
    /// If levels are still open.
    pub fn finish(self) -> Result<(), OutlineError> {
        match self.open {
            0 => Ok(()),
            open => Err(OutlineError::Cut { open }),
        }
    }
}
