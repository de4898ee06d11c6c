package kvatlas

import (
	"fmt"
	"maps"
	"time"
)

const (
	// payloadOverhead is what a chunk or batch may take beside what is counted.
	payloadOverhead = 1 << 10
	// payloadLeast is the least max_payload of a server that a publisher works with.
	payloadLeast = 4 << 10
	// What a server says it takes before it has said anything.
	payloadDefault = 1 << 20
)

// PublisherOptions say how to publish. What is 0 has the default that is said with it, which is right for an engine.
type PublisherOptions struct {
	// Prefix is what every subject begins with: "kvatlas".
	Prefix string
	// Rank is the holder's data-parallel rank.
	Rank uint32
	// BlockSize is how many tokens a block has: 16. Every batch says it.
	BlockSize int
	// Address is where requests for the holder go, as HOST:PORT or a URL, and Labels say what it is, such as its role and zone. Answers have
	// both, so that a router needs no list of its own. Every batch says them.
	Address string
	Labels  map[string]string
	// Recompute says that the daemon's namespace has hashing = "recompute". Stored has to have Tokens or BlockHashes then.
	Recompute bool
	// Epoch is the incarnation, which has to be above every one before: the time in microseconds.
	Epoch uint64
	// HeartbeatInterval is the longest silence: 1 s. A heartbeat ends it.
	HeartbeatInterval time.Duration
	// BatchDelay is the least time between two batches: 2 ms. Events that come sooner share the next one; after a pause they are sent at
	// once. Below 0, every call is a batch.
	BatchDelay time.Duration
	// BatchEventsMax is the most events of a batch: 1024.
	BatchEventsMax int
	// BatchBytesMax is the most bytes of a batch, about: 512 KiB, and never more than the NATS server takes.
	BatchBytesMax int
	// QueueCallsMax and QueueBytesMax are how much waits to be published at most: 1024 calls, 64 MiB.
	QueueCallsMax int
	QueueBytesMax int
	// RingBatchesMax and RingBytesMax are how much is kept at most for daemons that miss batches: 4096 batches, 16 MiB.
	RingBatchesMax int
	RingBytesMax   int
	// BlocksMax is the most blocks that a full state has: 4,194,304. Blocks above leave the holder in doubt after a resync.
	BlocksMax int
	// ChunkBytesMax is the most bytes of one chunk of an answer, about: 256 KiB, and never more than the NATS server takes.
	ChunkBytesMax int
	// AnswersMax is the most answers that are sent at once: 4. Further questions are refused, and come again.
	AnswersMax int
	// Log takes lines about what went wrong, and may be nil.
	Log func(line string)
}

// completed has the defaults, and the bounds of a server that takes so many bytes a message.
func (o PublisherOptions) completed(payloadMax int64) (PublisherOptions, error) {
	if payloadMax > 0 && payloadMax < payloadLeast {
		return o, fmt.Errorf("%w: max_payload of the NATS server is %d; raise it to %d", ErrInvalid, payloadMax, payloadLeast)
	}
	for _, each := range []struct {
		name  string
		value *int
		usual int
	}{
		{"BlockSize", &o.BlockSize, DefaultBlockSize},
		{"BatchEventsMax", &o.BatchEventsMax, 1024},
		{"BatchBytesMax", &o.BatchBytesMax, 512 << 10},
		{"QueueCallsMax", &o.QueueCallsMax, 1024},
		{"QueueBytesMax", &o.QueueBytesMax, 64 << 20},
		{"RingBatchesMax", &o.RingBatchesMax, 4096},
		{"RingBytesMax", &o.RingBytesMax, 16 << 20},
		{"BlocksMax", &o.BlocksMax, 4 << 20},
		{"ChunkBytesMax", &o.ChunkBytesMax, 256 << 10},
		{"AnswersMax", &o.AnswersMax, 4},
	} {
		if *each.value < 0 {
			return o, fmt.Errorf("%w: %s must not be below 0", ErrInvalid, each.name)
		}
		if *each.value == 0 {
			*each.value = each.usual
		}
	}
	if o.BlockSize > blockSizeMax {
		return o, fmt.Errorf("%w: BlockSize goes up to %d", ErrInvalid, blockSizeMax)
	}
	if err := o.takeProfile(); err != nil {
		return o, err
	}
	if o.HeartbeatInterval <= 0 {
		o.HeartbeatInterval = time.Second
	}
	if o.BatchDelay == 0 {
		o.BatchDelay = 2 * time.Millisecond
	}
	if o.Log == nil {
		o.Log = func(string) {}
	}
	// A batch or chunk of fewer bytes has room for nothing, and one of more is not taken by the server.
	room := payloadRoom(payloadMax)
	o.BatchBytesMax = int(larger(uint64(atMost(o.BatchBytesMax, room)), payloadOverhead))
	o.ChunkBytesMax = int(larger(uint64(atMost(o.ChunkBytesMax, room)), payloadOverhead))
	return o, nil
}

// takeProfile checks the address and the labels, and makes them independent of the caller's map.
func (o *PublisherOptions) takeProfile() error {
	if o.Address != "" {
		if err := checkAddress(o.Address); err != nil {
			return err
		}
	}
	if err := checkLabels(o.Labels); err != nil {
		return err
	}
	o.Labels = maps.Clone(o.Labels)
	return nil
}

// payloadRoom is how many bytes of batches fit into a message of a server that takes so many bytes a message.
func payloadRoom(payloadMax int64) int {
	if payloadMax <= 0 {
		payloadMax = payloadDefault
	}
	return int(larger(uint64(payloadMax), payloadLeast)) - payloadOverhead
}
