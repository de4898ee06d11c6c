package main

import (
	"fmt"
	"math"
	"sort"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/vmihailenco/msgpack/v5"
)

const (
	heartbeatInterval = time.Second
	// Events of one batch of a full state. A few hundred bytes each keep a chunk far below the limit of 1 MiB.
	eventsInChunk = 1000
	// For so long a publisher is new, and so long it waits before it puts its epoch above another one again.
	riseInterval = time.Minute
	// Clocks of several machines may differ by so much.
	skewMax = 5 * time.Second
)

// An event of the contract, as MessagePack has it.
type event map[string]interface{}

// A batch of the contract.
type batch struct {
	V      int    `msgpack:"v"`
	Epoch  uint64 `msgpack:"epoch"`
	Seq    uint64 `msgpack:"seq"`
	Rank   uint32 `msgpack:"rank"`
	TimeUs uint64 `msgpack:"time_us"`
	Size   int    `msgpack:"block_size"`
	// Where requests for the worker go. Saying it in every batch is the simplest way: the last one counts.
	Address string  `msgpack:"address,omitempty"`
	Events  []event `msgpack:"events"`
}

// A daemon's question for what it has missed.
type resyncRequest struct {
	V    int    `msgpack:"v"`
	Rank uint32 `msgpack:"rank"`
	// What the daemon has applied last: of an earlier process, where this one has told it nothing yet.
	Epoch uint64 `msgpack:"epoch"`
}

// A part of the answer.
type resyncChunk struct {
	V       int      `msgpack:"v"`
	Rank    uint32   `msgpack:"rank"`
	Epoch   uint64   `msgpack:"epoch"`
	Seq     uint64   `msgpack:"seq"`
	Kind    string   `msgpack:"kind"`
	TimeUs  uint64   `msgpack:"time_us"`
	Chunk   uint32   `msgpack:"chunk"`
	Last    bool     `msgpack:"last"`
	Batches [][]byte `msgpack:"batches"`
}

// A block that the worker holds: what it is called, and where it stands.
type block struct {
	hash, parent uint64
	position     int
}

// Publisher tells daemons what one worker holds, and gives the full state to daemons that have missed something.
type Publisher struct {
	connection *nats.Conn
	subject    string
	address    string
	questions  *nats.Subscription
	stop       chan struct{}
	started    time.Time

	// Guards what follows, and the order of batches: each is numbered, noted and sent in one step.
	lock   sync.Mutex
	epoch  uint64
	seq    uint64
	timeUs uint64
	risen  time.Time
	blocks map[uint64]block
}

// StartPublisher begins a new epoch, whose number is the time, so that it replaces all that the worker said before.
// An address may be empty.
func StartPublisher(connection *nats.Conn, namespace, worker, address string) (*Publisher, error) {
	publisher := &Publisher{
		connection: connection,
		subject:    fmt.Sprintf("kvatlas.v1.events.%s.%s", namespace, worker),
		address:    address,
		stop:       make(chan struct{}),
		started:    time.Now(),
		epoch:      uint64(time.Now().UnixMicro()),
		blocks:     map[uint64]block{},
	}
	asked := fmt.Sprintf("kvatlas.v1.resync.%s.%s.0", namespace, worker)
	questions, err := connection.Subscribe(asked, publisher.answer)
	if err != nil {
		return nil, err
	}
	publisher.questions = questions
	go publisher.heartbeats()
	return publisher, nil
}

// Stored says that the worker holds the blocks of a chain from position 0 on.
func (p *Publisher) Stored(chain, blocks []uint64) error {
	p.lock.Lock()
	defer p.lock.Unlock()
	for position, hash := range chain {
		held := block{hash: hash, position: position}
		if position > 0 {
			held.parent = chain[position-1]
		}
		p.blocks[hash] = held
	}
	return p.send(event{"type": "stored", "sequence_hashes": blob(chain), "block_hashes": blob(blocks)})
}

// Removed says that the worker no longer holds these blocks.
func (p *Publisher) Removed(hashes []uint64) error {
	p.lock.Lock()
	defer p.lock.Unlock()
	for _, hash := range hashes {
		delete(p.blocks, hash)
	}
	return p.send(event{"type": "removed", "sequence_hashes": blob(hashes)})
}

// Goodbye says that the worker shuts down in good order, and ends the heartbeats.
func (p *Publisher) Goodbye() error {
	close(p.stop)
	p.lock.Lock()
	defer p.lock.Unlock()
	if err := p.questions.Unsubscribe(); err != nil {
		return err
	}
	if err := p.send(event{"type": "goodbye"}); err != nil {
		return err
	}
	return p.connection.Flush()
}

// Last is the number of the last batch.
func (p *Publisher) Last() (epoch, seq uint64) {
	p.lock.Lock()
	defer p.lock.Unlock()
	return p.epoch, p.seq
}

// send numbers a batch and hands it to NATS. The caller holds the lock.
func (p *Publisher) send(events ...event) error {
	if events == nil {
		// A list that is empty, not one that is absent.
		events = []event{}
	}
	p.seq++
	p.timeUs = uint64(time.Now().UnixMicro())
	payload, err := msgpack.Marshal(batch{V: 1, Epoch: p.epoch, Seq: p.seq, TimeUs: p.timeUs, Size: blockSize, Address: p.address, Events: events})
	if err != nil {
		return err
	}
	return p.connection.Publish(p.subject, payload)
}

// heartbeats prove that nothing was lost: a batch without events takes a number, too.
func (p *Publisher) heartbeats() {
	ticker := time.NewTicker(heartbeatInterval)
	defer ticker.Stop()
	for {
		select {
		case <-p.stop:
			return
		case <-ticker.C:
			p.lock.Lock()
			if err := p.send(); err != nil {
				fmt.Println("heartbeat:", err)
			}
			p.lock.Unlock()
		}
	}
}

// answer gives a daemon the full state. A publisher that keeps its last batches can give just those instead.
func (p *Publisher) answer(question *nats.Msg) {
	var request resyncRequest
	if err := msgpack.Unmarshal(question.Data, &request); err != nil || request.Rank != 0 {
		p.refuse(question, 400, "this publisher answers questions about rank 0")
		return
	}
	p.riseAbove(request.Epoch)
	chunks, err := p.fullState()
	if err != nil {
		p.refuse(question, 503, "the state cannot be encoded: "+err.Error())
		return
	}
	for _, chunk := range chunks {
		if err := question.Respond(chunk); err != nil {
			fmt.Println("answer:", err)
			return
		}
	}
}

// riseAbove begins an epoch above the one that a daemon knows, if that is higher: the clock of an earlier process was ahead. Number 1 is
// skipped, so that other daemons ask, too. An epoch that has begun by the clock is of a younger process, which is left alone; and so is one that
// has just risen itself.
func (p *Publisher) riseAbove(known uint64) {
	p.lock.Lock()
	defer p.lock.Unlock()
	now := time.Now()
	latest := now
	if now.Sub(p.started) > riseInterval {
		latest = now.Add(skewMax)
	}
	if known <= p.epoch || known == math.MaxUint64 || known <= uint64(latest.UnixMicro()) || now.Sub(p.risen) < riseInterval {
		return
	}
	p.risen, p.epoch, p.seq = now, uint64(now.UnixMicro()), 1
	if p.epoch <= known {
		p.epoch = known + 1
	}
}

func (p *Publisher) refuse(question *nats.Msg, code int, text string) {
	refusal := nats.NewMsg(question.Reply)
	refusal.Header.Set("Nats-Service-Error-Code", strconv.Itoa(code))
	refusal.Header.Set("Nats-Service-Error", text)
	if err := question.RespondMsg(refusal); err != nil {
		fmt.Println("refusal:", err)
	}
}

// fullState is all that the worker holds at one instant, parents before children.
func (p *Publisher) fullState() ([][]byte, error) {
	p.lock.Lock()
	defer p.lock.Unlock()
	held := make([]block, 0, len(p.blocks))
	for _, block := range p.blocks {
		held = append(held, block)
	}
	sort.Slice(held, func(one, other int) bool { return held[one].position < held[other].position })
	events := make([]event, 0, len(held))
	for _, block := range held {
		stored := event{"type": "stored", "position": block.position, "sequence_hashes": blob([]uint64{block.hash})}
		if block.position > 0 {
			stored["parent"] = block.parent
		}
		events = append(events, stored)
	}
	answer := resyncChunk{V: 1, Epoch: p.epoch, Seq: p.seq, Kind: "full", TimeUs: p.timeUs}
	var chunks [][]byte
	for !answer.Last {
		count := len(events)
		if count > eventsInChunk {
			count = eventsInChunk
		}
		// The number of a batch in a full state says nothing, but 0 is none.
		part, err := msgpack.Marshal(batch{V: 1, Epoch: p.epoch, Seq: p.seq + 1, Size: blockSize, Address: p.address, Events: events[:count]})
		if err != nil {
			return nil, err
		}
		events = events[count:]
		answer.Last, answer.Batches = len(events) == 0, [][]byte{part}
		chunk, err := msgpack.Marshal(answer)
		if err != nil {
			return nil, err
		}
		chunks = append(chunks, chunk)
		answer.Chunk++
	}
	return chunks, nil
}
