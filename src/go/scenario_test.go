package kvatlas

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/vmihailenco/msgpack/v5"
)

const namespace, worker = "llama", "gpu-0"

// A world is a router's and an engine's side of one broker with a daemon.
type world struct {
	*testing.T
	nats   *nats.Conn
	client *Client
	daemon *daemon
	ctx    context.Context

	// What becomes of batches: whether one is lost, by its number among all.
	lock        sync.Mutex
	isLosing    bool
	lost        int
	largestSent int
}

func newWorld(t *testing.T, brokerLines ...string) *world {
	t.Helper()
	// Tests mostly wait.
	t.Parallel()
	address := startBroker(t, brokerLines...)
	w := &world{T: t, daemon: newDaemon(t, address), nats: connect(t, address)}
	w.daemon.start()
	ctx, cancel := context.WithTimeout(context.Background(), 4*patience)
	t.Cleanup(cancel)
	w.ctx = ctx
	client, err := NewClient(w.nats, ClientOptions{Patience: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	w.client = client
	eventually(t, "a daemon answers", func() bool {
		_, err := w.look()
		return err == nil || errors.Is(err, ErrUnknownNamespace) || errors.Is(err, ErrUnavailable)
	})
	return w
}

// look is a status with the client's patience: a request to a daemon that was killed has no answer.
func (w *world) look() (*Status, error) { return w.client.Status(context.Background(), namespace) }

func (w *world) publish(subject string, payload []byte) error {
	w.lock.Lock()
	defer w.lock.Unlock()
	if len(payload) > w.largestSent {
		w.largestSent = len(payload)
	}
	if w.isLosing {
		w.lost++
		return nil
	}
	return w.nats.Publish(subject, payload)
}

// losing does something while all batches are lost, of which there has to be one.
func (w *world) losing(do func()) {
	w.Helper()
	w.lock.Lock()
	w.isLosing, w.lost = true, 0
	w.lock.Unlock()
	do()
	eventually(w, "a batch is lost", func() bool {
		w.lock.Lock()
		defer w.lock.Unlock()
		return w.lost > 0
	})
	w.lock.Lock()
	w.isLosing = false
	w.lock.Unlock()
}

// publisher has short silences, and makes every call a batch.
func (w *world) publisher(options PublisherOptions) *Publisher {
	w.Helper()
	options.BatchDelay, options.HeartbeatInterval = -1, 50*time.Millisecond
	options.Log = func(line string) { w.Log(line) }
	started, err := startPublisher(w.nats, namespace, worker, options, w.publish)
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() {
		ended, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = started.Close(ended)
	})
	return started
}

func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

// becomesExact waits until the daemon has exactly so many blocks of the worker.
func (w *world) becomesExact(blocks uint64) {
	w.Helper()
	var last string
	defer func() {
		if w.Failed() {
			w.Log("last:", last)
		}
	}()
	eventually(w, fmt.Sprintf("%d blocks are known for certain", blocks), func() bool {
		status, err := w.look()
		last = fmt.Sprintf("%+v, %v", status, err)
		if err != nil {
			return false
		}
		holder, is := status.Holder(worker, 0)
		return is && holder.Exact && holder.Blocks == blocks
	})
}

func tokens(blocks int) []uint32 {
	made := make([]uint32, blocks*DefaultBlockSize)
	for index := range made {
		made[index] = uint32(index + 1)
	}
	return made
}

func chainOf(tokens []uint32) []uint64 {
	return SequenceHashes(BlockHashes(tokens, DefaultBlockSize, CacheSeed("", "")))
}

// applied flushes, and waits until the daemon has all of it.
func (w *world) applied(publisher *Publisher) {
	w.Helper()
	cursor, err := publisher.Flush(w.ctx)
	w.must(err)
	_, err = w.client.Applied(w.ctx, namespace, worker, 0, cursor)
	w.must(err)
}

func (w *world) expect(query Query, matched, usable uint64) {
	w.Helper()
	// Until everybody must have been heard of, no answer is exact.
	eventually(w, "an exact answer", func() bool {
		reply, err := w.client.Query(w.ctx, namespace, query)
		w.must(err)
		if !reply.Exact() {
			return false
		}
		if len(reply.Holders) != 1 || reply.Holders[0].MatchedBlocks != matched || reply.Holders[0].UsableBlocks != usable {
			w.Fatalf("found %+v, expected %d matched and %d usable blocks", reply, matched, usable)
		}
		return true
	})
}

func TestPublishedBlocksAreFound(t *testing.T) {
	w := newWorld(t)
	publisher := w.publisher(PublisherOptions{Address: "10.0.0.7:8000", Labels: map[string]string{"role": "prefill"}})
	prompt := tokens(4)
	chain := chainOf(prompt)
	w.must(publisher.Publish(w.ctx, Stored{Tokens: prompt}))
	w.applied(publisher)
	w.expect(Query{Tokens: prompt}, 4, 3)
	w.expect(Query{BlockHashes: BlockHashes(prompt, DefaultBlockSize, CacheSeed("", ""))}, 4, 4)
	w.expect(Query{SequenceHashes: chain}, 4, 4)
	w.expect(Query{SequenceHashes: chain, TokenCount: uint64(len(prompt))}, 4, 3)

	// The device loses two blocks, of which one has gone to the host.
	w.must(publisher.Publish(w.ctx, Stored{Tier: Host, Position: 2, Parent: chain[1], SequenceHashes: chain[2:3]}))
	w.must(publisher.Publish(w.ctx, Removed{SequenceHashes: chain[2:]}))
	w.applied(publisher)
	reply, err := w.client.Query(w.ctx, namespace, Query{SequenceHashes: chain, Tiers: true, Explain: true})
	w.must(err)
	found := reply.Holders[0]
	same(t, "tiers", *found.Tiers, TierMatch{2, 3, 2, 3})
	same(t, "the block that is not there", []uint64{uint64(found.DroppedOut.Position), found.DroppedOut.OtherHolders}, []uint64{3, 0})

	results, err := w.client.QueryBatch(w.ctx, namespace, []Query{{SequenceHashes: chain}, {SequenceHashes: chain[:1]}})
	w.must(err)
	for index, matched := range []uint64{3, 1} {
		holder := results[index].Reply.Holders[0]
		same(t, "one of two", holder.MatchedBlocks, matched)
		// The second result does not have it on the wire.
		same(t, "where it is", holder.Address+" "+holder.Labels["role"], "10.0.0.7:8000 prefill")
	}
}

func TestErrorsAreTyped(t *testing.T) {
	w := newWorld(t)
	// A daemon that has just started cannot know yet that nobody publishes.
	eventually(t, "the namespace is not known", func() bool {
		_, err := w.client.Query(w.ctx, "nobody", Query{Tokens: tokens(1)})
		if !errors.Is(err, ErrUnknownNamespace) && !errors.Is(err, ErrUnavailable) {
			t.Fatal(err)
		}
		return errors.Is(err, ErrUnknownNamespace)
	})
	elsewhere, err := NewClient(w.nats, ClientOptions{Prefix: "elsewhere", Patience: time.Second})
	w.must(err)
	if _, err := elsewhere.Status(w.ctx, namespace); !errors.Is(err, ErrNoDaemon) {
		t.Errorf("no daemon: %v", err)
	}
	if _, err := w.client.Query(w.ctx, namespace, Query{SequenceHashes: make([]uint64, 1<<18)}); !errors.Is(err, ErrTooLarge) {
		t.Errorf("a query of 2 MiB: %v", err)
	}
	if _, err := w.client.Query(w.ctx, "a.b", Query{Tokens: tokens(1)}); !errors.Is(err, ErrInvalid) {
		t.Errorf("a namespace that is none: %v", err)
	}
	_, err = w.client.Query(w.ctx, namespace, Query{Tokens: tokens(1), Positions: []uint32{0}})
	if refused := new(RefusedError); !errors.As(err, &refused) || refused.Code != 400 || refused.Text == "" {
		t.Errorf("a query that contradicts itself: %v", err)
	}
	// Somebody listens, and says nothing, or what is no answer.
	silent, err := w.nats.SubscribeSync("elsewhere.v1.query.llama")
	w.must(err)
	w.must(w.nats.Flush())
	ended, cancel := context.WithTimeout(w.ctx, 20*time.Millisecond)
	defer cancel()
	if _, err := elsewhere.Query(ended, namespace, Query{Tokens: tokens(1)}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("no answer: %v", err)
	}
	w.must(silent.Unsubscribe())
	_, err = w.nats.Subscribe("elsewhere.v1.query.llama", func(question *nats.Msg) { _ = question.Respond([]byte("{}")) })
	w.must(err)
	w.must(w.nats.Flush())
	if _, err := elsewhere.Query(w.ctx, namespace, Query{Tokens: tokens(1)}); !errors.Is(err, ErrUndecodable) {
		t.Errorf("an answer in JSON: %v", err)
	}
}

func TestOutcomesAreTold(t *testing.T) {
	w := newWorld(t)
	heard, err := w.nats.SubscribeSync("kvatlas.v1.outcome.llama")
	w.must(err)
	match := HolderMatch{Worker: worker, Rank: 1, MatchedBlocks: 5, UsableBlocks: 4, Exact: true}
	outcomes := make([]Outcome, 300)
	for index := range outcomes {
		outcomes[index] = OutcomeOf(match, uint64(index), 0)
	}
	outcomes[299].PromptTokens = 80
	w.must(w.client.Tell(w.ctx, namespace, outcomes...))
	var found []Outcome
	for len(found) < len(outcomes) {
		message, err := heard.NextMsg(patience)
		w.must(err)
		var report struct {
			V        int       `msgpack:"v"`
			Outcomes []Outcome `msgpack:"outcomes"`
		}
		w.must(msgpack.Unmarshal(message.Data, &report))
		if report.V != 1 || len(report.Outcomes) > 256 || len(message.Data) > 64<<10 {
			t.Errorf("a report of %d outcomes in %d bytes", len(report.Outcomes), len(message.Data))
		}
		found = append(found, report.Outcomes...)
	}
	same(t, "outcomes", found, outcomes)
	if err := w.client.Tell(w.ctx, namespace, Outcome{Worker: "a.b"}); !errors.Is(err, ErrInvalid) {
		t.Errorf("a worker that is none: %v", err)
	}
}

func TestHintsAreTold(t *testing.T) {
	w := newWorld(t)
	heard, err := w.nats.SubscribeSync("kvatlas.v1.hint.llama")
	w.must(err)
	prompt := Query{SequenceHashes: []uint64{1, 2}}
	w.must(w.client.Hint(w.ctx, namespace, Hint{worker, 1, prompt}, Hint{worker, 0, prompt}))
	for _, rank := range []uint32{1, 0} {
		message, err := heard.NextMsg(patience)
		w.must(err)
		expected, err := encodeHint(Hint{worker, rank, prompt})
		w.must(err)
		same(t, "hint", meaning(t, message.Data), meaning(t, expected))
	}
	if err := w.client.Hint(w.ctx, namespace, Hint{Worker: "a.b", Prompt: prompt}); !errors.Is(err, ErrInvalid) {
		t.Errorf("a worker that is none: %v", err)
	}
	if err := w.client.Hint(w.ctx, namespace, Hint{Worker: worker}); !errors.Is(err, ErrInvalid) {
		t.Errorf("a prompt that is none: %v", err)
	}
}

func TestLostBatchIsGivenFromTheRing(t *testing.T) {
	w := newWorld(t)
	publisher := w.publisher(PublisherOptions{})
	prompt := tokens(4)
	chain := chainOf(prompt)
	w.must(publisher.Publish(w.ctx, Stored{SequenceHashes: chain[:2]}))
	w.applied(publisher)
	w.becomesExact(2)
	full := publisher.Counters().AnswersFull
	w.losing(func() {
		w.must(publisher.Publish(w.ctx, Stored{Position: 2, Parent: chain[1], SequenceHashes: chain[2:]}))
	})
	w.becomesExact(4)
	w.expect(Query{SequenceHashes: chain}, 4, 4)
	if counters := publisher.Counters(); counters.AnswersMissing == 0 || counters.AnswersFull != full {
		t.Errorf("%+v", counters)
	}
}

func TestLostBatchesBeyondTheRingAreGivenAsFullState(t *testing.T) {
	w := newWorld(t)
	publisher := w.publisher(PublisherOptions{RingBatchesMax: 1})
	chain := chainOf(tokens(4))
	w.must(publisher.Publish(w.ctx, Stored{SequenceHashes: chain}))
	w.applied(publisher)
	w.becomesExact(4)
	full := publisher.Counters().AnswersFull
	w.losing(func() {
		w.must(publisher.Publish(w.ctx, Removed{SequenceHashes: chain[3:]}))
		w.must(publisher.Publish(w.ctx, Removed{SequenceHashes: chain[2:]}))
		_, err := publisher.Flush(w.ctx)
		w.must(err)
	})
	w.becomesExact(2)
	w.expect(Query{SequenceHashes: chain}, 2, 2)
	if counters := publisher.Counters(); counters.AnswersFull == full {
		t.Errorf("%+v", counters)
	}
}

func TestRestartedDaemonIsGivenTheFullState(t *testing.T) {
	w := newWorld(t)
	publisher := w.publisher(PublisherOptions{RingBatchesMax: 1})
	chain := chainOf(tokens(4))
	w.must(publisher.Publish(w.ctx, Stored{SequenceHashes: chain}))
	w.must(publisher.Publish(w.ctx, Removed{SequenceHashes: chain[3:]}))
	w.applied(publisher)
	w.becomesExact(3)
	full := publisher.Counters().AnswersFull
	w.daemon.kill()
	w.daemon.start()
	w.becomesExact(3)
	w.expect(Query{SequenceHashes: chain}, 3, 3)
	if counters := publisher.Counters(); counters.AnswersFull == full {
		t.Errorf("%+v", counters)
	}
}

func TestBlocksWithoutRoomLeaveDoubt(t *testing.T) {
	w := newWorld(t)
	publisher := w.publisher(PublisherOptions{BlocksMax: 2, RingBatchesMax: 1})
	w.must(publisher.Publish(w.ctx, Stored{Tokens: tokens(3)}))
	w.applied(publisher)
	w.becomesExact(3)
	w.daemon.kill()
	w.daemon.start()
	eventually(t, "the worker is in doubt", func() bool {
		status, err := w.look()
		if err != nil {
			return false
		}
		holder, is := status.Holder(worker, 0)
		return is && holder.Blocks == 2 && fmt.Sprint(holder.Degraded) == "[upstream_gap]"
	})
}

func TestHigherEpochIsTopped(t *testing.T) {
	w := newWorld(t)
	// The clock of an earlier process was ahead.
	ahead := unixMicro(time.Now().Add(time.Minute))
	earlier := w.publisher(PublisherOptions{Epoch: ahead})
	w.must(earlier.Publish(w.ctx, Stored{Tokens: tokens(4)}))
	w.applied(earlier)
	w.must(earlier.Close(w.ctx))
	publisher := w.publisher(PublisherOptions{})
	w.must(publisher.Publish(w.ctx, Stored{Tokens: tokens(2)}))
	w.becomesExact(2)
	if cursor := publisher.Cursor(); cursor.Epoch != ahead+1 {
		t.Errorf("%+v is not above %d", cursor, ahead)
	}
}

func TestGoodbyeIsTheEnd(t *testing.T) {
	w := newWorld(t)
	publisher := w.publisher(PublisherOptions{})
	w.must(publisher.Publish(w.ctx, Stored{Tokens: tokens(2)}))
	w.applied(publisher)
	w.must(publisher.Goodbye(w.ctx))
	eventually(t, "the worker has left", func() bool {
		status, err := w.look()
		w.must(err)
		_, is := status.Holder(worker, 0)
		return !is
	})
	if err := publisher.Publish(w.ctx, Cleared{}); !errors.Is(err, ErrStopped) {
		t.Errorf("after the goodbye: %v", err)
	}
	if err := publisher.Goodbye(w.ctx); !errors.Is(err, ErrStopped) {
		t.Errorf("a second goodbye: %v", err)
	}
	last := publisher.Cursor()
	again := w.publisher(PublisherOptions{})
	w.must(again.Publish(w.ctx, Stored{Tokens: tokens(1)}))
	w.becomesExact(1)
	same(t, "batches behind the goodbye", publisher.Cursor(), last)
}

func TestCloseIsSilent(t *testing.T) {
	w := newWorld(t)
	publisher := w.publisher(PublisherOptions{})
	w.must(publisher.Publish(w.ctx, Stored{Tokens: tokens(2)}))
	w.must(publisher.Close(w.ctx))
	w.must(publisher.Close(w.ctx))
	w.must(w.nats.Flush())
	w.becomesExact(2)
}

func TestLargeCallsAndStatesAreCut(t *testing.T) {
	const most, blocks = 8192, 3000
	w := newWorld(t, fmt.Sprintf("max_payload = %d", most))
	publisher := w.publisher(PublisherOptions{})
	prompt := tokens(blocks)
	w.must(publisher.Publish(w.ctx, Stored{Tokens: prompt}))
	w.applied(publisher)
	w.becomesExact(blocks)
	w.lock.Lock()
	largest := w.largestSent
	w.lock.Unlock()
	if counters := publisher.Counters(); largest > most || largest < most/2 || counters.BatchesSent < 16*blocks/most {
		t.Errorf("batches of up to %d bytes, %+v", largest, counters)
	}
	w.daemon.kill()
	w.daemon.start()
	w.becomesExact(blocks)
	chain := chainOf(prompt)
	w.expect(Query{SequenceHashes: []uint64{chain[0], chain[blocks-2], chain[blocks-1]}, Positions: []uint32{0, blocks - 2, blocks - 1}}, blocks, blocks)
	w.must(publisher.Publish(w.ctx, Removed{SequenceHashes: chain[1:]}))
	w.applied(publisher)
	w.becomesExact(1)
	if counters := publisher.Counters(); counters.BatchesFailed > 0 {
		t.Errorf("%+v", counters)
	}
}

func TestCallThatFitsIsOneBatch(t *testing.T) {
	connection := connect(t, startBroker(t))
	var sent []int
	publisher, err := startPublisher(connection, namespace, worker,
		PublisherOptions{BatchEventsMax: 4, BatchDelay: time.Hour, HeartbeatInterval: time.Hour},
		func(_ string, payload []byte) error {
			var found struct {
				Events []msgpack.RawMessage `msgpack:"events"`
			}
			if err := msgpack.Unmarshal(payload, &found); err != nil {
				return err
			}
			sent = append(sent, len(found.Events))
			return nil
		})
	if err != nil {
		t.Fatal(err)
	}
	for _, count := range []int{3, 2, 2, 1} {
		events := make([]Event, count)
		for index := range events {
			events[index] = Stored{Tokens: tokens(1)}
		}
		if err := publisher.Publish(context.Background(), events...); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := publisher.Flush(context.Background()); err != nil {
		t.Fatal(err)
	}
	same(t, "events of batches", fmt.Sprint(sent), "[3 4 1]")
}

func TestFullQueueRefusesAndWaits(t *testing.T) {
	connection := connect(t, startBroker(t))
	going := make(chan struct{})
	heard, err := connection.SubscribeSync("kvatlas.v1.events.llama.gpu-0")
	if err != nil {
		t.Fatal(err)
	}
	publisher, err := startPublisher(connection, namespace, worker, PublisherOptions{QueueCallsMax: 3, BatchDelay: -1, HeartbeatInterval: time.Hour},
		func(subject string, payload []byte) error {
			<-going
			return connection.Publish(subject, payload)
		})
	if err != nil {
		t.Fatal(err)
	}
	taken := 0
	for ; taken < 100; taken++ {
		if err = publisher.TryPublish(Stored{Tokens: tokens(1)}); err != nil {
			break
		}
	}
	// The first may have left the queue.
	if !errors.Is(err, ErrQueueFull) || taken > 4 || publisher.Counters().QueueRefusals != 1 {
		t.Fatalf("%d calls, %v", taken, err)
	}
	eventually(t, "the queue is full and the first call has left it", func() bool {
		if publisher.TryPublish(Stored{Tokens: tokens(1)}) == nil {
			taken++
		}
		return taken == 4
	})
	ended, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()
	if err := publisher.Publish(ended, Cleared{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("without room: %v", err)
	}
	close(going)
	if cursor, err := publisher.Flush(context.Background()); err != nil || cursor.Seq != 4 {
		t.Errorf("%+v, %v", cursor, err)
	}
	for number := uint64(1); number <= 4; number++ {
		message, err := heard.NextMsg(patience)
		if err != nil {
			t.Fatal(err)
		}
		var found struct {
			Seq uint64 `msgpack:"seq"`
		}
		if err := msgpack.Unmarshal(message.Data, &found); err != nil || found.Seq != number {
			t.Errorf("batch %d has number %d, %v", number, found.Seq, err)
		}
	}
	if err := publisher.Close(context.Background()); err != nil {
		t.Error(err)
	}
}

func TestCloseDropsWhatIsNotTaken(t *testing.T) {
	connection := connect(t, startBroker(t))
	publisher, err := startPublisher(connection, namespace, worker, PublisherOptions{BatchDelay: -1, HeartbeatInterval: time.Hour},
		func(string, []byte) error { return nats.ErrReconnectBufExceeded })
	if err != nil {
		t.Fatal(err)
	}
	for range make([]struct{}, 3) {
		if err := publisher.TryPublish(Stored{Tokens: tokens(1)}); err != nil {
			t.Fatal(err)
		}
	}
	ended, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()
	if err := publisher.Close(ended); !errors.Is(err, ErrNotSent) {
		t.Errorf("%v", err)
	}
	if counters := publisher.Counters(); counters.BatchesSent > 0 || counters.BatchesFailed+counters.CallsDropped != 3 {
		t.Errorf("%+v", counters)
	}
}

func TestQueuedEventsShareABatch(t *testing.T) {
	connection := connect(t, startBroker(t))
	going := make(chan struct{})
	publisher, err := startPublisher(connection, namespace, worker, PublisherOptions{HeartbeatInterval: time.Hour},
		func(subject string, payload []byte) error {
			<-going
			return connection.Publish(subject, payload)
		})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for range make([]struct{}, 50) {
		if err := publisher.Publish(ctx, Stored{Tokens: tokens(1)}); err != nil {
			t.Fatal(err)
		}
	}
	close(going)
	if cursor, err := publisher.Flush(ctx); err != nil || cursor.Seq > 2 {
		t.Errorf("%+v, %v", cursor, err)
	}
	if err := publisher.Goodbye(ctx); err != nil {
		t.Error(err)
	}
}

func TestRefusedBatchesAndRequestsAreTold(t *testing.T) {
	address := startBroker(t, `authorization { users: [ { user: e, password: e, permissions: { publish: "kvatlas.v1.events.*.gpu-0" } } ] }`)
	connection := connect(t, strings.Replace(address, "//", "//e:e@", 1))
	for name, isPermitted := range map[string]bool{"gpu-1": false, worker: true} {
		publisher, err := StartPublisher(connection, namespace, name, PublisherOptions{HeartbeatInterval: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		for range make([]struct{}, 2) {
			if _, err := publisher.Flush(context.Background()); err != nil {
				t.Errorf("nothing to refuse: %v", err)
			}
			if err := publisher.TryPublish(Stored{Tokens: tokens(1)}); err != nil {
				t.Fatal(err)
			}
			if _, err := publisher.Flush(context.Background()); (err == nil) != isPermitted || err != nil && !errors.Is(err, ErrNotSent) {
				t.Errorf("%s: %v", name, err)
			}
		}
		if err := publisher.Goodbye(context.Background()); (err == nil) != isPermitted {
			t.Errorf("the goodbye of %s: %v", name, err)
		}
	}
	client, err := NewClient(connection, ClientOptions{Patience: 100 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.Status(context.Background(), namespace); !errors.Is(err, ErrNotPermitted) {
		t.Errorf("%v", err)
	}
}
