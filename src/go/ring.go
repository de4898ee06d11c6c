package kvatlas

// A ring is the last batches of one epoch, without a gap, bounded in number and bytes.
type ring struct {
	batches              [][]byte
	bytes                int
	last                 uint64
	batchesMax, bytesMax int
}

// push takes the next batch up, and forgets the oldest ones that there is no room for.
func (r *ring) push(payload []byte) {
	r.last++
	r.batches, r.bytes = append(r.batches, payload), r.bytes+len(payload)
	for len(r.batches) > 0 && (len(r.batches) > r.batchesMax || r.bytes > r.bytesMax) {
		r.bytes -= len(r.batches[0])
		r.batches[0] = nil
		r.batches = r.batches[1:]
	}
}

// after gives the batches after a number, unless some of them are forgotten, or it is ahead.
func (r *ring) after(seq uint64) ([][]byte, bool) {
	if seq > r.last || r.last-seq > uint64(len(r.batches)) {
		return nil, false
	}
	return r.batches[len(r.batches)-int(r.last-seq):], true
}

// restart forgets all batches: the next one has the number after last.
func (r *ring) restart(last uint64) {
	r.batches, r.bytes, r.last = nil, 0, last
}
