package kvatlas

import "fmt"

// A Tier is where blocks lie. Blocks on the device are what a request reuses at once.
type Tier uint8

// The tiers that have names; 4 to 7 are free.
const (
	Device Tier = iota
	Host
	Disk
	Remote
	tiers = 8
)

// An Event is one change to what a holder holds: Stored, Removed or Cleared.
type Event interface {
	change(blockSize int) (change, error)
}

// Stored says that the holder has these consecutive blocks of one sequence now, in one tier.
//
// Their hashes are the contract's chain. With Tokens or BlockHashes, SequenceHashes may be left out; where both are given they have to agree.
type Stored struct {
	Tier Tier
	// Position is that of the first block. Where it is above 0, Parent is the sequence hash of the block before it.
	Position uint32
	Parent   uint64
	// SequenceHashes are the rolling hashes of the blocks.
	SequenceHashes []uint64
	// BlockHashes are what the blocks consist of.
	BlockHashes []uint64
	// Tokens are those of all blocks, instead of BlockHashes. LoraName and CacheSalt may stand beside them.
	Tokens    []uint32
	LoraName  string
	CacheSalt string
}

// Removed says that the holder no longer has these blocks in one tier. Those that it does not have are passed over.
type Removed struct {
	Tier           Tier
	SequenceHashes []uint64
}

// Cleared says that the holder has no block any more, in no tier.
type Cleared struct{}

// The kinds of changes, as the contract calls them.
const (
	kindStored  = "stored"
	kindRemoved = "removed"
	kindCleared = "cleared"
	kindGoodbye = "goodbye"
	kindDoubted = "doubted"
)

// What a batch and an event take beside their hashes, never less than they do.
const (
	batchBytes = 128
	eventBytes = 128
	// eventBlocksMax is the most blocks in one event.
	eventBlocksMax = 1 << 16
)

// A change is an event whose hashes are known, and the publisher's own.
type change struct {
	kind     string
	tier     Tier
	position uint32
	parent   uint64
	hashes   []uint64
	blocks   []uint64
}

func (s Stored) change(blockSize int) (change, error) {
	blocks, err := s.content(blockSize)
	if err != nil {
		return change{}, err
	}
	hashes := append([]uint64(nil), s.SequenceHashes...)
	if blocks != nil {
		chain := s.chain(blocks)
		if s.SequenceHashes == nil {
			hashes = chain
		}
		if !equal(hashes, chain) {
			return change{}, fmt.Errorf("%w: SequenceHashes are not the chain of what the blocks consist of", ErrInvalid)
		}
	}
	if uint64(s.Position)+uint64(len(hashes)) > PositionMax+1 {
		return change{}, fmt.Errorf("%w: the blocks are not at positions 0 to %d", ErrInvalid, PositionMax)
	}
	if s.Position == 0 && s.Parent != 0 {
		return change{}, fmt.Errorf("%w: position 0 has no parent", ErrInvalid)
	}
	// No block has the hash 0, unless what the blocks consist of proves it.
	if s.Position > 0 && s.Parent == 0 && (blocks == nil || s.SequenceHashes == nil) {
		return change{}, fmt.Errorf("%w: a position above 0 needs a parent", ErrInvalid)
	}
	return change{kindStored, s.Tier, s.Position, s.Parent, hashes, blocks}, checkTier(s.Tier)
}

// content are the block hashes, if they are known.
func (s Stored) content(blockSize int) ([]uint64, error) {
	switch {
	case s.Tokens == nil && (s.LoraName != "" || s.CacheSalt != ""):
		return nil, fmt.Errorf("%w: LoraName and CacheSalt stand beside Tokens only", ErrInvalid)
	case s.Tokens == nil:
		return append([]uint64(nil), s.BlockHashes...), nil
	case s.BlockHashes != nil:
		return nil, fmt.Errorf("%w: give BlockHashes or Tokens, not both", ErrInvalid)
	case len(s.Tokens)%blockSize != 0:
		return nil, fmt.Errorf("%w: %d tokens are not whole blocks of %d", ErrInvalid, len(s.Tokens), blockSize)
	default:
		return BlockHashes(s.Tokens, blockSize, CacheSeed(s.LoraName, s.CacheSalt)), nil
	}
}

func (s Stored) chain(blocks []uint64) []uint64 {
	if s.Position == 0 {
		return SequenceHashes(blocks)
	}
	return ExtendSequence(s.Parent, blocks)
}

func (r Removed) change(int) (change, error) {
	hashes := append([]uint64(nil), r.SequenceHashes...)
	return change{kind: kindRemoved, tier: r.Tier, hashes: hashes}, checkTier(r.Tier)
}

func (Cleared) change(int) (change, error) {
	return change{kind: kindCleared}, nil
}

func checkTier(tier Tier) error {
	if tier >= tiers {
		return fmt.Errorf("%w: there is no tier %d; tiers are numbered from 0 to %d", ErrInvalid, tier, tiers-1)
	}
	return nil
}

// hasTier says whether the change is about one tier. The others fit into any batch.
func (c *change) hasTier() bool { return c.kind == kindStored || c.kind == kindRemoved }

// blockBytes is what one block of the change takes.
func (c *change) blockBytes() int {
	if c.blocks != nil {
		return 16
	}
	return 8
}

// size is about how many bytes the change takes; never less than it does.
func (c *change) size() int { return eventBytes + c.blockBytes()*len(c.hashes) }

// cut divides the change where it takes more than so many bytes: what fits, and the rest, which has no hashes where there is none.
func (c *change) cut(bytesMax int) (change, change) {
	count := atMost((bytesMax-eventBytes)/c.blockBytes(), eventBlocksMax)
	if count < 1 {
		count = 1
	}
	head, rest := *c, *c
	rest.hashes = nil
	if count >= len(c.hashes) {
		return head, rest
	}
	head.hashes, rest.hashes = c.hashes[:count], c.hashes[count:]
	if c.blocks != nil {
		head.blocks, rest.blocks = c.blocks[:count], c.blocks[count:]
	}
	rest.position, rest.parent = c.position+uint32(count), c.hashes[count-1]
	return head, rest
}

func (c *change) entries() fields {
	entries := fields{"type": c.kind}
	switch c.kind {
	case kindStored:
		if c.position > 0 {
			entries["position"], entries["parent"] = c.position, c.parent
		}
		if c.blocks != nil {
			entries["block_hashes"] = hashBlob(c.blocks)
		}
		entries["sequence_hashes"] = hashBlob(c.hashes)
	case kindRemoved:
		entries["sequence_hashes"] = hashBlob(c.hashes)
	case kindDoubted:
		// The only doubt of a publisher that tells what it knows at first hand: its table lacks some blocks.
		entries["reasons"] = []string{"upstream_gap"}
	}
	return entries
}

func equal(one, other []uint64) bool {
	if len(one) != len(other) {
		return false
	}
	for index := range one {
		if one[index] != other[index] {
			return false
		}
	}
	return true
}
