package kvatlas

import (
	"fmt"
	"math"
	"time"
)

const (
	// For so long a publisher is new, and so long it waits before it puts its epoch above another one again.
	riseInterval = time.Minute
	// Clocks of several machines may differ by so much. A publisher that is not new any more takes no heed of less.
	skewMax = 5 * time.Second
	// An epoch may lie ahead of the clock by so much. By default, daemons drop batches of epochs further ahead.
	aheadMax = 24 * time.Hour
	// warningInterval is the shortest time between two warnings of epochs that are not believed.
	warningInterval = time.Minute
	// chunkBatchesMax is the most batches in one chunk of an answer.
	chunkBatchesMax = 1024
	// binBytes is what a chunk takes for each batch beside its bytes.
	binBytes = 5
)

// An outbox numbers the batches of one holder, keeps what daemons may ask for, and answers them. It sends nothing, and its caller takes care
// that its methods are called one at a time.
type outbox struct {
	options PublisherOptions
	cursor  Cursor
	table   *table
	ring    ring
	// timeUs is when the last batch was made. It grows from batch to batch.
	timeUs  uint64
	hasLeft bool
	// room is how many bytes of batches a message may have now.
	room int

	started, risen, warned time.Time
}

// A clock before this time has not been set, so nothing is known to lie ahead of it.
var earliest = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// isFarAhead says whether daemons would drop the batches of an epoch above this one, because it lies too far ahead of the clock.
func isFarAhead(known uint64, now time.Time) bool {
	return !now.Before(earliest) && known > unixMicro(now.Add(aheadMax))
}

// newOutbox takes options that are complete.
func newOutbox(options PublisherOptions, now time.Time) *outbox {
	epoch := options.Epoch
	if epoch == 0 {
		epoch = unixMicro(now)
	}
	return &outbox{
		options: options, cursor: Cursor{Epoch: epoch}, table: newTable(options.BlocksMax), room: math.MaxInt, started: now,
		ring: ring{batchesMax: options.RingBatchesMax, bytesMax: options.RingBytesMax},
	}
}

// number makes the next batch. Without changes it is a heartbeat.
func (o *outbox) number(tier Tier, changes []change, now time.Time) ([]byte, Cursor, error) {
	o.cursor.Seq++
	o.timeUs = larger(unixMicro(now), o.timeUs+1)
	made := o.batch(tier, changes)
	payload, err := made.encode(o.cursor, o.timeUs)
	if err == nil {
		o.ring.push(payload)
	} else {
		// It shows as a gap, and the full state has it.
		o.ring.restart(o.cursor.Seq)
	}
	for index := range changes {
		o.table.apply(&changes[index])
		o.hasLeft = o.hasLeft || changes[index].kind == kindGoodbye
	}
	return payload, o.cursor, err
}

func (o *outbox) batch(tier Tier, changes []change) batch {
	made := batch{rank: o.options.Rank, blockSize: o.options.BlockSize, tier: tier, changes: changes}
	if o.options.Address != "" || len(o.options.Labels) > 0 {
		made.profile = &profile{o.options.Address, o.options.Labels}
	}
	return made
}

// A resyncRequest is a daemon's question: what has come after this batch?
type resyncRequest struct {
	V     *uint64 `msgpack:"v"`
	Rank  uint32  `msgpack:"rank"`
	Epoch *uint64 `msgpack:"epoch"`
	Seq   *uint64 `msgpack:"seq"`
	Full  bool    `msgpack:"full"`
}

// decodeRequest reads a question, and refuses what this publisher cannot answer.
func (o *outbox) decodeRequest(payload []byte) (*resyncRequest, error) {
	var request resyncRequest
	if err := decode(payload, &request); err != nil {
		return nil, &RefusedError{400, "the request is not one MessagePack map of the contract"}
	}
	switch {
	case request.V != nil && *request.V != protocolVersion:
		return nil, &RefusedError{505, "another version of the contract is not spoken here; send v = 1"}
	case request.Epoch == nil || request.Seq == nil:
		return nil, &RefusedError{400, "the request needs numbers for epoch and seq"}
	case request.Rank != o.options.Rank:
		return nil, &RefusedError{400, fmt.Sprintf("this publisher is for rank %d", o.options.Rank)}
	}
	return &request, nil
}

// riseAbove begins an epoch above the one that a daemon knows, with all that the holder has. It says whether it did.
//
// The clock of an earlier process was ahead, and daemons take this one for its predecessor. The epoch's first number is skipped: daemons that
// are not answered now learn from the gap that there is more to ask for. Nothing is done where the other epoch has begun by the clock, so
// that a younger process may have replaced this one, where it lies so far ahead that daemons would drop all batches, or where the last time
// was less than a minute ago: two that live would outdo each other without end.
func (o *outbox) riseAbove(known uint64, now time.Time) bool {
	begun := now
	if now.Sub(o.started) > riseInterval {
		begun = now.Add(skewMax)
	}
	isTooSoon := !o.risen.IsZero() && now.Sub(o.risen) < riseInterval
	if known <= o.cursor.Epoch || known == math.MaxUint64 || known <= unixMicro(begun) || isFarAhead(known, now) || isTooSoon || o.hasLeft {
		return false
	}
	o.risen = now
	o.cursor = Cursor{Epoch: known + 1, Seq: 1}
	o.timeUs = larger(unixMicro(now), o.timeUs+1)
	o.ring.restart(1)
	return true
}

// An answer to a daemon, as the payloads of its chunks.
type answer struct {
	isFull bool
	chunks [][]byte
}

// answer answers from the ring where that is enough and the server takes it, else with the full state of this instant.
func (o *outbox) answer(request *resyncRequest) (answer, error) {
	if !request.Full && *request.Epoch == o.cursor.Epoch {
		if batches, is := o.ring.after(*request.Seq); is && o.haveRoom(batches) {
			chunks, err := o.chunks("missing", batches)
			return answer{false, chunks}, err
		}
	}
	batches, err := o.fullState()
	if err != nil {
		return answer{}, err
	}
	chunks, err := o.chunks("full", batches)
	return answer{true, chunks}, err
}

func (o *outbox) haveRoom(batches [][]byte) bool {
	for _, payload := range batches {
		if len(payload) > o.room {
			return false
		}
	}
	return true
}

func (o *outbox) chunkBytesMax() int {
	return atMost(o.options.ChunkBytesMax, o.room)
}

func (o *outbox) fullState() ([][]byte, error) {
	// A state from before the first batch is empty, but a number of 0 is none.
	cursor := Cursor{o.cursor.Epoch, larger(o.cursor.Seq, 1)}
	var batches [][]byte
	var failure error
	parts := batcher{eventsMax: o.options.BatchEventsMax, bytesMax: o.chunkBytesMax(), seal: func(tier Tier, changes []change) {
		made := o.batch(tier, changes)
		payload, err := made.encode(cursor, 0)
		if err != nil {
			failure = err
		}
		batches = append(batches, payload)
	}}
	o.table.state(parts.add)
	if o.table.isShort {
		parts.add(change{kind: kindDoubted})
	}
	parts.flush()
	return batches, failure
}

// chunks spreads batches over chunks. There is always one chunk at least, which has the cursor.
func (o *outbox) chunks(kind string, batches [][]byte) ([][]byte, error) {
	var chunks [][]byte
	for isLast := false; !isLast; {
		count, size := 0, 0
		for count < len(batches) && count < chunkBatchesMax {
			more := len(batches[count]) + binBytes
			if count > 0 && size+more > o.chunkBytesMax() {
				break
			}
			size, count = size+more, count+1
		}
		isLast = count == len(batches)
		entries := fields{
			"v": protocolVersion, "rank": o.options.Rank, "epoch": o.cursor.Epoch, "seq": o.cursor.Seq, "kind": kind,
			"chunk": len(chunks), "last": isLast, "batches": batches[:count:count],
		}
		if count == 0 {
			entries["batches"] = [][]byte{}
		}
		if o.timeUs > 0 {
			entries["time_us"] = o.timeUs
		}
		if kind == "full" && o.options.Recompute {
			entries["recomputed_block_size"] = o.options.BlockSize
		}
		chunk, err := encode(entries)
		if err != nil {
			return nil, err
		}
		chunks, batches = append(chunks, chunk), batches[count:]
	}
	return chunks, nil
}

func unixMicro(now time.Time) uint64 {
	return uint64(now.UnixMicro())
}

func larger(one, other uint64) uint64 {
	if one > other {
		return one
	}
	return other
}
