package kvatlas

import (
	"fmt"
	"time"
)

// A Reply is the answer to one query.
type Reply struct {
	// QueryBlocks is how many blocks were asked for.
	QueryBlocks uint64
	// BlockSize is how many tokens a block has; 0 where an older daemon does not say.
	BlockSize uint64
	// Holders come with the most usable blocks first, then the most matched, then by worker and rank.
	Holders []HolderMatch
	// HoldersTotal is how many matched before the limit cut the list.
	HoldersTotal uint64
	// ForeignHolders is how many holders a query by tokens or block hashes cannot find.
	ForeignHolders uint64
	// DoubtfulHolders is how many holders are not in the list while their state is not certain.
	DoubtfulHolders uint64
	// UnseenBlocksMax is, of a compressed chain, how many blocks a holder of none of the blocks sent can hold.
	UnseenBlocksMax uint64
	// Gathered is what a gateway has put the reply together from; nil in a daemon's own reply.
	Gathered *Gathered
	// Behind is the age of the oldest event of the namespace that was known of and not applied.
	Behind time.Duration
	// Predicted are, with Predicted, those who will have more of the prompt soon than is known, the most first. Never exact.
	Predicted []Predicted
}

// A Predicted is a holder to which a router has sent a request with the same beginning, of which no event has told yet.
type Predicted struct {
	Worker string `msgpack:"worker"`
	Rank   uint32 `msgpack:"rank"`
	// Blocks is how many leading blocks it should have soon.
	Blocks uint64 `msgpack:"blocks"`
	// Address is where requests for it go; empty where that is not known.
	Address string `msgpack:"address"`
}

// Exact says whether the whole answer is certain: who is named, how much each has, and that nobody else has more.
func (r *Reply) Exact() bool {
	if r.ForeignHolders > 0 || r.DoubtfulHolders > 0 || r.Gathered != nil && len(r.Gathered.Missing) > 0 {
		return false
	}
	for index := range r.Holders {
		if !r.Holders[index].Exact {
			return false
		}
	}
	return true
}

// Gathered is what a gateway's reply was put together from.
type Gathered struct {
	// Shards is how many there are; Missing are those that did not answer in time: nothing is known of their workers.
	Shards  uint64   `msgpack:"shards"`
	Missing []uint64 `msgpack:"missing"`
}

// A HolderMatch is one holder of the beginning of the prompt.
type HolderMatch struct {
	Worker string
	Rank   uint32
	// Kind is "pool" for storage that every worker of the namespace can load from, and empty for workers.
	Kind string
	// MatchedBlocks is how many leading blocks it holds without a hole; of a compressed chain at least so many, and at most MatchedBlocksMax.
	MatchedBlocks    uint64
	MatchedBlocksMax uint64
	// UsableBlocks is how many leading blocks a request can reuse: what a router goes by.
	UsableBlocks uint64
	// Tiers is how much lies near; nil unless the query asks for tiers.
	Tiers *TierMatch
	// Exact says whether what is said of the holder is known for certain; Degraded are the reasons where it is not.
	Exact    bool
	Degraded []string
	// DroppedOut is, with Explain, the first block that the holder does not have; nil where it has them all.
	DroppedOut *DropOut
	// LimitedBy is, with Explain, why no more blocks are usable; empty where the whole query is.
	LimitedBy string
	// Address is where requests for it go, and Labels say what it is; empty where that is not known.
	Address string
	Labels  map[string]string
}

// A TierMatch is how many of the matched blocks lie on the device, and on device and host together.
type TierMatch struct{ DeviceBlocks, HostBlocks, DeviceUsableBlocks, HostUsableBlocks uint64 }

// A DropOut is the first block that a holder does not have, and how many others hold the query up to and including it.
type DropOut struct {
	Position     uint32
	LineageHash  LineageHash
	OtherHolders uint64
}

// A Result is the answer to one query of several: a reply, or the error that the daemon has for it.
type Result struct {
	Reply *Reply
	Err   error
}

// A Status is how far a daemon has followed a namespace.
type Status struct {
	// BlockSize is how many tokens a block has; DistinctBlocks how many blocks some holder can be asked for.
	BlockSize      uint64
	DistinctBlocks uint64
	// BatchesWaiting is how many batches were received and not applied yet, of all namespaces.
	BatchesWaiting uint64
	// UnsizedHolders is of how many holders the block size is only guessed.
	UnsizedHolders uint64
	// RefusedHolders is how many holders there was no room for.
	RefusedHolders uint64
	// UnheardHolders tells whether there may be holders of which nothing has been heard or applied yet: 0 or 1, or up to the number of shards.
	UnheardHolders uint64
	Holders        []HolderStatus
	Gathered       *Gathered
	Behind         time.Duration
}

// Holder is the status of one holder, if the daemon knows it.
func (s *Status) Holder(worker string, rank uint32) (HolderStatus, bool) {
	for _, holder := range s.Holders {
		if holder.Worker == worker && holder.Rank == rank {
			return holder, true
		}
	}
	return HolderStatus{}, false
}

// A HolderStatus is how far a daemon has followed one holder.
type HolderStatus struct {
	Worker string
	Rank   uint32
	// Cursor is the last batch applied.
	Cursor       Cursor
	Blocks       uint64
	ParkedEvents uint64
	ForeignChain bool
	// EpochAhead is how far the epoch lies ahead of the daemon's clock; 0 where clocks may differ by that.
	EpochAhead time.Duration
	// Since is when it began not to be exact; the zero time where it is, or where that is not known.
	Since    time.Time
	Exact    bool
	Degraded []string
	// Address and Labels are those of a HolderMatch.
	Address string
	Labels  map[string]string
}

// The answers as they travel. What the contract requires is a pointer, so that a map without it is noticed.

type wireReply struct {
	V               *uint64      `msgpack:"v"`
	QueryBlocks     *uint64      `msgpack:"query_blocks"`
	BlockSize       uint64       `msgpack:"block_size"`
	Holders         *[]wireMatch `msgpack:"holders"`
	HoldersTotal    *uint64      `msgpack:"holders_total"`
	ForeignHolders  uint64       `msgpack:"foreign_holders"`
	DoubtfulHolders uint64       `msgpack:"doubtful_holders"`
	UnseenBlocksMax uint64       `msgpack:"unseen_blocks_max"`
	Gathered        *Gathered    `msgpack:"gathered"`
	BehindUs        uint64       `msgpack:"behind_us"`
	Predicted       []Predicted  `msgpack:"predicted"`
}

type wireMatch struct {
	Worker             *string           `msgpack:"worker"`
	Rank               *uint32           `msgpack:"rank"`
	Kind               string            `msgpack:"kind"`
	MatchedBlocks      *uint64           `msgpack:"matched_blocks"`
	MatchedBlocksMax   *uint64           `msgpack:"matched_blocks_max"`
	UsableBlocks       *uint64           `msgpack:"usable_blocks"`
	DeviceBlocks       *uint64           `msgpack:"device_blocks"`
	HostBlocks         *uint64           `msgpack:"host_blocks"`
	DeviceUsableBlocks *uint64           `msgpack:"device_usable_blocks"`
	HostUsableBlocks   *uint64           `msgpack:"host_usable_blocks"`
	Exact              *bool             `msgpack:"exact"`
	Degraded           []string          `msgpack:"degraded"`
	Address            string            `msgpack:"address"`
	Labels             map[string]string `msgpack:"labels"`
	DroppedOut         *wireDropOut      `msgpack:"dropped_out"`
	LimitedBy          string            `msgpack:"limited_by"`
}

type wireDropOut struct {
	Position     *uint32 `msgpack:"position"`
	LineageHash  []byte  `msgpack:"lineage_hash"`
	OtherHolders *uint64 `msgpack:"other_holders"`
}

type wireResults struct {
	V       *uint64 `msgpack:"v"`
	Results *[]struct {
		Reply *wireReply `msgpack:"reply"`
		Error *struct {
			Code int    `msgpack:"code"`
			Text string `msgpack:"text"`
		} `msgpack:"error"`
	} `msgpack:"results"`
}

type wireStatus struct {
	V              *uint64       `msgpack:"v"`
	BlockSize      *uint64       `msgpack:"block_size"`
	DistinctBlocks *uint64       `msgpack:"distinct_blocks"`
	BatchesWaiting *uint64       `msgpack:"batches_waiting"`
	UnsizedHolders uint64        `msgpack:"unsized_holders"`
	RefusedHolders uint64        `msgpack:"refused_holders"`
	UnheardHolders uint64        `msgpack:"unheard_holders"`
	Holders        *[]wireHolder `msgpack:"holders"`
	Gathered       *Gathered     `msgpack:"gathered"`
	BehindUs       uint64        `msgpack:"behind_us"`
}

type wireHolder struct {
	Worker       *string           `msgpack:"worker"`
	Rank         *uint32           `msgpack:"rank"`
	Epoch        *uint64           `msgpack:"epoch"`
	Seq          *uint64           `msgpack:"seq"`
	Blocks       *uint64           `msgpack:"blocks"`
	ParkedEvents *uint64           `msgpack:"parked_events"`
	ForeignChain bool              `msgpack:"foreign_chain"`
	EpochAheadS  uint64            `msgpack:"epoch_ahead_s"`
	SinceUs      int64             `msgpack:"since_us"`
	Exact        *bool             `msgpack:"exact"`
	Degraded     []string          `msgpack:"degraded"`
	Address      string            `msgpack:"address"`
	Labels       map[string]string `msgpack:"labels"`
}

func decodeReply(payload []byte) (*Reply, error) {
	var wire wireReply
	if err := decode(payload, &wire); err != nil {
		return nil, err
	}
	if err := checkVersion(wire.V); err != nil {
		return nil, err
	}
	return wire.reply()
}

type holderKey struct {
	worker string
	rank   uint32
}

// complete gives each holder the address and labels that only the first result with it has, and notes those of this one.
func (r *Reply) complete(profiles map[holderKey]profile) {
	for index := range r.Holders {
		holder := &r.Holders[index]
		key := holderKey{holder.Worker, holder.Rank}
		if holder.Address != "" || len(holder.Labels) > 0 {
			profiles[key] = profile{holder.Address, holder.Labels}
		} else if known, ok := profiles[key]; ok {
			holder.Address, holder.Labels = known.address, known.labels
		}
	}
}

func decodeResults(payload []byte, queries int) ([]Result, error) {
	var wire wireResults
	if err := decode(payload, &wire); err != nil {
		return nil, err
	}
	if err := checkVersion(wire.V); err != nil {
		return nil, err
	}
	if wire.Results == nil || len(*wire.Results) != queries {
		return nil, fmt.Errorf("%w: it has not one result for each of %d queries", ErrUndecodable, queries)
	}
	results := make([]Result, 0, queries)
	profiles := map[holderKey]profile{}
	for _, found := range *wire.Results {
		switch {
		case found.Error != nil:
			results = append(results, Result{Err: &RefusedError{found.Error.Code, found.Error.Text}})
		case found.Reply != nil:
			reply, err := found.Reply.reply()
			if err != nil {
				return nil, err
			}
			reply.complete(profiles)
			results = append(results, Result{Reply: reply})
		default:
			return nil, fmt.Errorf("%w: a result has neither a reply nor an error", ErrUndecodable)
		}
	}
	return results, nil
}

func (w *wireReply) reply() (*Reply, error) {
	if w.QueryBlocks == nil || w.Holders == nil || w.HoldersTotal == nil {
		return nil, fmt.Errorf("%w: a reply needs query_blocks, holders and holders_total", ErrUndecodable)
	}
	reply := &Reply{
		QueryBlocks: *w.QueryBlocks, BlockSize: w.BlockSize, HoldersTotal: *w.HoldersTotal, ForeignHolders: w.ForeignHolders,
		DoubtfulHolders: w.DoubtfulHolders, UnseenBlocksMax: w.UnseenBlocksMax, Gathered: w.Gathered,
		Behind: microseconds(w.BehindUs), Holders: make([]HolderMatch, 0, len(*w.Holders)), Predicted: w.Predicted,
	}
	for index := range *w.Holders {
		match, err := (*w.Holders)[index].match()
		if err != nil {
			return nil, err
		}
		reply.Holders = append(reply.Holders, match)
	}
	return reply, nil
}

func (w *wireMatch) match() (HolderMatch, error) {
	if w.Worker == nil || w.Rank == nil || w.MatchedBlocks == nil || w.Exact == nil {
		return HolderMatch{}, fmt.Errorf("%w: a holder needs worker, rank, matched_blocks and exact", ErrUndecodable)
	}
	match := HolderMatch{
		Worker: *w.Worker, Rank: *w.Rank, Kind: w.Kind, MatchedBlocks: *w.MatchedBlocks,
		MatchedBlocksMax: or(w.MatchedBlocksMax, *w.MatchedBlocks), UsableBlocks: or(w.UsableBlocks, *w.MatchedBlocks),
		Exact: *w.Exact, Degraded: w.Degraded, LimitedBy: w.LimitedBy, Address: w.Address, Labels: w.Labels,
	}
	if w.DeviceBlocks != nil && w.HostBlocks != nil {
		match.Tiers = &TierMatch{
			DeviceBlocks: *w.DeviceBlocks, HostBlocks: *w.HostBlocks,
			DeviceUsableBlocks: or(w.DeviceUsableBlocks, *w.DeviceBlocks), HostUsableBlocks: or(w.HostUsableBlocks, *w.HostBlocks),
		}
	}
	if w.DroppedOut != nil {
		found := w.DroppedOut
		if found.Position == nil || found.OtherHolders == nil || len(found.LineageHash) != len(LineageHash{}) {
			return HolderMatch{}, fmt.Errorf("%w: dropped_out needs position, lineage_hash and other_holders", ErrUndecodable)
		}
		match.DroppedOut = &DropOut{Position: *found.Position, OtherHolders: *found.OtherHolders}
		copy(match.DroppedOut.LineageHash[:], found.LineageHash)
	}
	return match, nil
}

func decodeStatus(payload []byte) (*Status, error) {
	var wire wireStatus
	if err := decode(payload, &wire); err != nil {
		return nil, err
	}
	if err := checkVersion(wire.V); err != nil {
		return nil, err
	}
	if wire.BlockSize == nil || wire.DistinctBlocks == nil || wire.BatchesWaiting == nil || wire.Holders == nil {
		return nil, fmt.Errorf("%w: a status needs block_size, distinct_blocks, batches_waiting and holders", ErrUndecodable)
	}
	status := &Status{
		BlockSize: *wire.BlockSize, DistinctBlocks: *wire.DistinctBlocks, BatchesWaiting: *wire.BatchesWaiting,
		UnsizedHolders: wire.UnsizedHolders, RefusedHolders: wire.RefusedHolders, UnheardHolders: wire.UnheardHolders,
		Gathered: wire.Gathered, Behind: microseconds(wire.BehindUs),
		Holders: make([]HolderStatus, 0, len(*wire.Holders)),
	}
	for _, found := range *wire.Holders {
		if found.Worker == nil || found.Rank == nil || found.Epoch == nil || found.Seq == nil || found.Blocks == nil ||
			found.ParkedEvents == nil || found.Exact == nil {
			return nil, fmt.Errorf("%w: a holder lacks what a status says of it", ErrUndecodable)
		}
		var since time.Time
		if found.SinceUs > 0 {
			since = time.UnixMicro(found.SinceUs)
		}
		status.Holders = append(status.Holders, HolderStatus{
			Worker: *found.Worker, Rank: *found.Rank, Cursor: Cursor{*found.Epoch, *found.Seq}, Blocks: *found.Blocks,
			ParkedEvents: *found.ParkedEvents, ForeignChain: found.ForeignChain,
			EpochAhead: microseconds(bounded(found.EpochAheadS) * 1_000_000), Exact: *found.Exact, Degraded: found.Degraded,
			Address: found.Address, Labels: found.Labels, Since: since,
		})
	}
	return status, nil
}

func checkVersion(version *uint64) error {
	if version != nil && *version != protocolVersion {
		return fmt.Errorf("%w: it speaks version %d of the contract", ErrUndecodable, *version)
	}
	return nil
}

func or(found *uint64, otherwise uint64) uint64 {
	if found == nil {
		return otherwise
	}
	return *found
}

// bounded is a number of seconds that a time.Duration can still hold: 200 years.
func bounded(seconds uint64) uint64 {
	const most = 200 * 366 * 24 * 3600
	if seconds > most {
		return most
	}
	return seconds
}

// microseconds is a time that a daemon tells, at most what a time.Duration can hold.
func microseconds(count uint64) time.Duration {
	if seconds := count / 1_000_000; seconds != bounded(seconds) {
		count = bounded(seconds) * 1_000_000
	}
	return time.Duration(count) * time.Microsecond
}
