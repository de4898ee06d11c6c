package kvatlas

// A batch as it travels, but for its number.
type batch struct {
	rank      uint32
	blockSize int
	tier      Tier
	changes   []change
	// profile is where requests for the holder go, and how it is labelled; nil where that is not told.
	profile *profile
}

// encode makes the payload. Without timeUs, which is above 0, it is a part of a full state.
func (b *batch) encode(cursor Cursor, timeUs uint64) ([]byte, error) {
	events := make([]fields, 0, len(b.changes))
	for index := range b.changes {
		events = append(events, b.changes[index].entries())
	}
	entries := fields{
		"v": protocolVersion, "epoch": cursor.Epoch, "seq": cursor.Seq, "rank": b.rank, "block_size": b.blockSize, "events": events,
	}
	b.profile.put(entries)
	if b.tier != Device {
		entries["tier"] = uint8(b.tier)
	}
	if timeUs > 0 {
		entries["time_us"] = timeUs
	}
	return encode(entries)
}

// A batcher puts changes into batches of one tier, bounded in events and bytes. What is too large for one batch is cut.
type batcher struct {
	eventsMax, bytesMax int
	// seal takes a batch that is full.
	seal func(tier Tier, changes []change)

	// tier is that of the open batch, once it has a change that is about a tier.
	tier    Tier
	isTier  bool
	changes []change
	size    int
}

// add takes a change, and seals what is full.
func (b *batcher) add(next change) {
	for {
		if len(b.changes) > 0 && !b.hasRoom(&next) {
			b.flush()
		}
		if len(b.changes) == 0 {
			b.tier, b.isTier, b.size = Device, false, batchBytes
		}
		if next.hasTier() {
			b.tier, b.isTier = next.tier, true
		}
		head, rest := next.cut(b.bytesMax - b.size)
		b.changes, b.size = append(b.changes, head), b.size+head.size()
		if len(rest.hashes) == 0 {
			return
		}
		next = rest
	}
}

// hasRoom says whether the open batch can take a change whole.
func (b *batcher) hasRoom(next *change) bool {
	return !b.isOther(next) && len(b.changes) < b.eventsMax && b.size+next.size() <= b.bytesMax && len(next.hashes) <= eventBlocksMax
}

// isOther says whether a change is about another tier than the open batch.
func (b *batcher) isOther(next *change) bool {
	return b.isTier && next.hasTier() && b.tier != next.tier
}

// flush seals what is open, if anything is.
func (b *batcher) flush() {
	if len(b.changes) == 0 {
		return
	}
	tier, changes := b.tier, b.changes
	b.changes, b.size = nil, 0
	b.seal(tier, changes)
}
