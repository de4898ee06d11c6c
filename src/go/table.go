package kvatlas

// A table is all that a holder has: what a full state is made of.
type table struct {
	blocks    map[uint64]held
	blocksMax int
	// isShort says that blocks are missing that the holder may still have: there was no room for them, or another block has their hash.
	isShort bool
}

// A held block: where it stands, and in which tiers, a bit each. Its sequence hash is the key.
type held struct {
	parent   uint64
	position uint32
	tiers    uint8
}

func newTable(blocksMax int) *table {
	return &table{blocks: map[uint64]held{}, blocksMax: blocksMax}
}

func (t *table) apply(next *change) {
	switch next.kind {
	case kindStored:
		t.store(next)
	case kindRemoved:
		t.remove(next)
	case kindCleared, kindGoodbye:
		t.blocks, t.isShort = map[uint64]held{}, false
	}
}

func (t *table) store(stored *change) {
	parent, position := stored.parent, stored.position
	for _, hash := range stored.hashes {
		known, is := t.blocks[hash]
		if !is && len(t.blocks) >= t.blocksMax {
			t.isShort = true
			return
		}
		if known.parent != parent || known.position != position {
			// The name moves to this block. Nobody can tell whether the holder still has the other one.
			t.isShort = t.isShort || is
			known = held{parent: parent, position: position}
		}
		known.tiers |= 1 << stored.tier
		t.blocks[hash] = known
		parent, position = hash, position+1
	}
}

func (t *table) remove(removed *change) {
	for _, hash := range removed.hashes {
		known, is := t.blocks[hash]
		if !is {
			continue
		}
		known.tiers &^= 1 << removed.tier
		if known.tiers == 0 {
			delete(t.blocks, hash)
		} else {
			t.blocks[hash] = known
		}
	}
}

// state gives the events that make a fresh holder equal to this one, parents before children.
func (t *table) state(give func(change)) {
	// Most blocks have one child. A list for each would take several times as long.
	firstChild := make(map[uint64]uint64, len(t.blocks))
	siblings := map[uint64][]uint64{}
	var waiting []uint64
	for hash, block := range t.blocks {
		parent, is := t.blocks[block.parent]
		if block.position == 0 || !is || parent.position+1 != block.position {
			waiting = append(waiting, hash)
		} else if _, has := firstChild[block.parent]; has {
			siblings[block.parent] = append(siblings[block.parent], hash)
		} else {
			firstChild[block.parent] = hash
		}
	}
	for len(waiting) > 0 {
		last := waiting[len(waiting)-1]
		waiting = waiting[:len(waiting)-1]
		piece := []uint64{last}
		for {
			child, has := firstChild[last]
			if !has {
				break
			}
			waiting = append(waiting, siblings[last]...)
			if t.blocks[child].tiers != t.blocks[last].tiers {
				waiting = append(waiting, child)
				break
			}
			piece, last = append(piece, child), child
		}
		t.give(piece, give)
	}
}

// give gives a piece of a chain once for each tier that its blocks are in.
func (t *table) give(piece []uint64, give func(change)) {
	first := t.blocks[piece[0]]
	for tier := Device; tier < tiers; tier++ {
		if first.tiers>>tier&1 == 1 {
			give(change{kind: kindStored, tier: tier, position: first.position, parent: first.parent, hashes: piece})
		}
	}
}
