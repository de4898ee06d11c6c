package kvatlas

import (
	"context"
	"errors"
	"fmt"
	"math/rand"
	"testing"
	"time"

	"github.com/vmihailenco/msgpack/v5"
)

var noon = time.Unix(1_800_000_000, 0)

func testOutbox(options PublisherOptions) *outbox {
	completed, err := options.completed(0)
	if err != nil {
		panic(err)
	}
	return newOutbox(completed, noon)
}

func changed(t *testing.T, event Event) change {
	t.Helper()
	made, err := event.change(DefaultBlockSize)
	if err != nil {
		t.Fatal(err)
	}
	return made
}

func TestEventsAreChecked(t *testing.T) {
	for name, event := range map[string]Event{
		"a parent at position 0":      Stored{Parent: 1, SequenceHashes: []uint64{2}},
		"a position without a parent": Stored{Position: 4, SequenceHashes: []uint64{2}},
		"a tier that there is not":    Stored{Tier: 8, SequenceHashes: []uint64{2}},
		"the same of a removal":       Removed{Tier: 8, SequenceHashes: []uint64{2}},
		"a part of a block":           Stored{Tokens: make([]uint32, 17)},
		"tokens and block hashes":     Stored{Tokens: make([]uint32, 16), BlockHashes: []uint64{1}},
		"a salt without tokens":       Stored{CacheSalt: "salt", SequenceHashes: []uint64{2}},
		"hashes that are no chain":    Stored{BlockHashes: []uint64{1, 2}, SequenceHashes: []uint64{1, 2}},
		"positions that are no more":  Stored{Position: PositionMax, Parent: 1, SequenceHashes: []uint64{2, 3}},
	} {
		if _, err := event.change(DefaultBlockSize); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	made := changed(t, Stored{Position: 3, Parent: 7, BlockHashes: []uint64{1, 2}})
	same(t, "the chain of blocks", made.hashes, ExtendSequence(7, []uint64{1, 2}))
}

func TestQueriesAreChecked(t *testing.T) {
	for name, query := range map[string]Query{
		"no prompt":             {},
		"two prompts":           {Tokens: []uint32{1}, BlockHashes: []uint64{1}},
		"a salt beside hashes":  {BlockHashes: []uint64{1}, CacheSalt: "salt"},
		"too small a count":     {Tokens: []uint32{1, 2}, TokenCount: 1},
		"a worker that is none": {BlockHashes: []uint64{1}, Workers: []string{"a.b"}},
	} {
		if _, err := encodeQuery(query); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	payload, err := encodeQuery(Query{Tokens: []uint32{1, 2}, TokenCount: 3})
	if err != nil {
		t.Fatal(err)
	}
	same(t, "a count beside tokens", meaning(t, payload), "map[token_count:3 tokens:[1 0 0 0 2 0 0 0] v:1]")
	// Nobody to ask about is not everybody.
	payload, err = encodeQuery(Query{BlockHashes: []uint64{}, Workers: []string{}})
	if err != nil {
		t.Fatal(err)
	}
	same(t, "nobody", meaning(t, payload), "map[block_hashes:[] v:1 workers:[]]")
}

func TestAnswersThatAreNoneAreNoticed(t *testing.T) {
	for name, value := range map[string]interface{}{
		"an empty map":           fields{},
		"no holders":             fields{"query_blocks": 1, "holders_total": 0},
		"another version":        fields{"v": 2, "query_blocks": 1, "holders": []string{}, "holders_total": 0},
		"a holder without exact": fields{"query_blocks": 1, "holders": []fields{{"worker": "a", "rank": 0, "matched_blocks": 1}}, "holders_total": 1},
		"no map":                 []int{1},
	} {
		payload, err := encode(value)
		if err != nil {
			t.Fatal(err)
		}
		if found, err := decodeReply(payload); !errors.Is(err, ErrUndecodable) {
			t.Errorf("%s: %+v, %v", name, found, err)
		}
	}
	payload, _ := encode(fields{"query_blocks": 1, "holders": []string{}, "holders_total": 0})
	if _, err := decodeReply(payload); err != nil {
		t.Error(err)
	}
	if _, err := decodeReply(append(payload, 0)); !errors.Is(err, ErrUndecodable) {
		t.Errorf("bytes behind the map: %v", err)
	}
}

func TestAnswersAreExactAsAWhole(t *testing.T) {
	certain := Reply{Holders: []HolderMatch{{Exact: true}, {Exact: true}}, Gathered: &Gathered{Shards: 2}}
	if !certain.Exact() {
		t.Error("an answer without a doubt is not exact")
	}
	for name, doubt := range map[string]func(*Reply){
		"a holder in doubt":              func(r *Reply) { r.Holders = []HolderMatch{{Exact: true}, {}} },
		"a holder that cannot be found":  func(r *Reply) { r.ForeignHolders = 1 },
		"a holder that may be elsewhere": func(r *Reply) { r.DoubtfulHolders = 1 },
		"a shard that is missing":        func(r *Reply) { r.Gathered = &Gathered{Shards: 2, Missing: []uint64{0}} },
	} {
		reply := certain
		doubt(&reply)
		if reply.Exact() {
			t.Errorf("%s: the answer is exact", name)
		}
	}
}

func TestModelsHaveNamespaces(t *testing.T) {
	for _, each := range [][3]string{
		{"meta-llama/Llama-3.1-8B-Instruct", "", "meta-llama__Llama-3_d1-8B-Instruct"},
		{"Qwen/Qwen3:latest", "acme", "Qwen__Qwen3_clatest_tacme"},
		{"a_b c", "default", "a_ub_x20c"},
	} {
		if found, err := ModelNamespace(each[0], each[1]); err != nil || found != each[2] {
			t.Errorf("%v: %s, %v", each, found, err)
		}
	}
	for _, model := range []string{"", string(make([]byte, 20))} {
		if _, err := ModelNamespace(model, ""); !errors.Is(err, ErrInvalid) {
			t.Errorf("%q: %v", model, err)
		}
	}
}

func TestRingIsBounded(t *testing.T) {
	ring := ring{batchesMax: 3, bytesMax: 10}
	for number := 1; number <= 5; number++ {
		ring.push([]byte{byte(number), 0})
	}
	for _, each := range []struct {
		seq   uint64
		count int
		is    bool
	}{{1, 0, false}, {2, 3, true}, {5, 0, true}, {6, 0, false}} {
		if found, is := ring.after(each.seq); is != each.is || len(found) != each.count {
			t.Errorf("after %d: %v, %t", each.seq, found, is)
		}
	}
	ring.push(make([]byte, 9))
	if found, is := ring.after(5); !is || len(found) != 1 {
		t.Errorf("bytes are not bounded: %v", found)
	}
	if _, is := ring.after(4); is {
		t.Error("bytes are not bounded")
	}
}

// The changes of a full state make a table that is equal, whatever came before; and no child comes before its parent.
func TestStateMakesAnEqualTable(t *testing.T) {
	children := 0
	for seed := int64(0); seed < 200; seed++ {
		random := rand.New(rand.NewSource(seed))
		original := newTable(1 << 20)
		var all []uint64
		for step := 0; step < 40; step++ {
			tier := Tier(random.Intn(3))
			if random.Intn(3) == 0 && len(all) > 0 {
				next := changed(t, Removed{Tier: tier, SequenceHashes: []uint64{all[random.Intn(len(all))], all[random.Intn(len(all))]}})
				original.apply(&next)
				continue
			}
			stored := Stored{Tier: tier}
			for length := 1 + random.Intn(4); length > 0; length-- {
				stored.BlockHashes = append(stored.BlockHashes, 1+random.Uint64()%4)
			}
			if len(all) > 0 && random.Intn(2) == 0 {
				stored.Parent = all[random.Intn(len(all))]
				stored.Position = original.blocks[stored.Parent].position + 1
			}
			next := changed(t, stored)
			original.apply(&next)
			all = append(all, next.hashes...)
		}
		copied := newTable(1 << 20)
		original.state(func(next change) {
			parent, is := original.blocks[next.parent]
			if next.position > 0 && is && parent.position+1 == next.position {
				if _, has := copied.blocks[next.parent]; !has {
					t.Errorf("seed %d: a child comes before its parent", seed)
				}
				children++
			}
			copied.apply(&next)
		})
		same(t, fmt.Sprint("seed ", seed), copied.blocks, original.blocks)
	}
	if children == 0 {
		t.Error("no block has a parent")
	}
}

func TestEpochsRise(t *testing.T) {
	box := testOutbox(PublisherOptions{})
	own, ahead := box.cursor.Epoch, box.cursor.Epoch+3_600_000_000
	for _, each := range []struct {
		name  string
		known uint64
		after time.Duration
		is    bool
	}{
		{"a lower epoch", own - 1, 0, false},
		{"its own", own, 0, false},
		{"one that cannot be topped", 1<<64 - 1, 0, false},
		{"one that daemons drop", 4_000_000_000_000_000_000, 0, false},
		{"a younger process", own + 1_000_000, 2 * time.Second, false},
		{"one ahead of the clock", ahead, 2 * time.Second, true},
		{"another one too soon", ahead + 1_000_000_000, 30 * time.Second, false},
		{"another one later", ahead + 1_000_000_000, 2 * time.Minute, true},
	} {
		before := box.cursor
		if is := box.riseAbove(each.known, noon.Add(each.after)); is != each.is {
			t.Errorf("%s: %t", each.name, is)
		}
		if each.is {
			same(t, each.name, box.cursor, Cursor{each.known + 1, 1})
		} else {
			same(t, each.name, box.cursor, before)
		}
	}
	// One that is not new any more takes no heed of clocks that differ by a few seconds.
	old := testOutbox(PublisherOptions{})
	now := noon.Add(2 * time.Minute)
	if old.riseAbove(unixMicro(now.Add(4*time.Second)), now) || !old.riseAbove(unixMicro(now.Add(6*time.Second)), now) {
		t.Error("the skew of clocks is not 5 s")
	}
}

func TestQuestionsAreRefused(t *testing.T) {
	box := testOutbox(PublisherOptions{Rank: 3})
	for code, value := range map[int]interface{}{
		400: fields{"rank": 2, "epoch": 0, "seq": 0},
		505: fields{"v": 2, "rank": 3, "epoch": 0, "seq": 0},
	} {
		payload, _ := encode(value)
		_, err := box.decodeRequest(payload)
		if refused := new(RefusedError); !errors.As(err, &refused) || refused.Code != code {
			t.Errorf("%v: %v", value, err)
		}
	}
	for _, payload := range [][]byte{nil, {0xc1}, {0x80}, {0x91, 0}} {
		if _, err := box.decodeRequest(payload); err == nil {
			t.Errorf("%x is taken for a question", payload)
		}
	}
}

// Whatever is cut fits, and says the same as the whole.
func TestLargeChangesAreCut(t *testing.T) {
	const most = 2000
	blocks := make([]uint64, 1000)
	for index := range blocks {
		blocks[index] = uint64(index + 1)
	}
	whole := changed(t, Stored{BlockHashes: blocks})
	gone := change{kind: kindRemoved, tier: Host, hashes: whole.hashes[:700]}
	expected, found := newTable(1<<20), newTable(1<<20)
	parts, sealed := batcher{eventsMax: 5, bytesMax: most}, 0
	parts.seal = func(tier Tier, changes []change) {
		made := batch{blockSize: 16, tier: tier, changes: changes}
		payload, err := made.encode(Cursor{1 << 63, 1 << 63}, 1<<63)
		if err != nil || len(payload) > most || len(changes) > 5 {
			t.Errorf("a batch of %d changes has %d bytes: %v", len(changes), len(payload), err)
		}
		for index := range changes {
			if changes[index].hasTier() && changes[index].tier != tier {
				t.Error("a batch has changes of two tiers")
			}
			found.apply(&changes[index])
		}
		sealed++
	}
	hosted := whole
	hosted.tier = Host
	// Two that would fit into one batch, but for their tiers.
	onDisk, onHost := change{kind: kindRemoved, tier: Disk, hashes: whole.hashes[:1]}, change{kind: kindRemoved, tier: Host, hashes: whole.hashes[:1]}
	for _, next := range []change{onDisk, onHost, whole, hosted, gone} {
		expected.apply(&next)
		parts.add(next)
	}
	parts.flush()
	same(t, "what is cut", found.blocks, expected.blocks)
	if sealed < 15 || len(found.blocks) != 1000 {
		t.Errorf("%d batches, %d blocks", sealed, len(found.blocks))
	}
}

func TestFullStateSaysThatItIsShort(t *testing.T) {
	box := testOutbox(PublisherOptions{BlocksMax: 2})
	number := func(event Event) {
		if _, _, err := box.number(Device, []change{changed(t, event)}, noon); err != nil {
			t.Fatal(err)
		}
	}
	doubts := func() (count int) {
		batches, err := box.fullState()
		if err != nil {
			t.Fatal(err)
		}
		for _, payload := range batches {
			var found struct {
				Events []struct {
					Type string `msgpack:"type"`
				} `msgpack:"events"`
			}
			if err := msgpack.Unmarshal(payload, &found); err != nil {
				t.Fatal(err)
			}
			for _, event := range found.Events {
				if event.Type == kindDoubted {
					count++
				}
			}
		}
		return count
	}
	number(Stored{BlockHashes: []uint64{1, 2}})
	same(t, "what fits", doubts(), 0)
	number(Stored{BlockHashes: []uint64{3}})
	same(t, "what does not", doubts(), 1)
	number(Cleared{})
	same(t, "after a clear", doubts(), 0)
}

func TestTimesGrow(t *testing.T) {
	box := testOutbox(PublisherOptions{})
	last := uint64(0)
	for step := 0; step < 3; step++ {
		// The clock runs backwards.
		if _, _, err := box.number(Device, nil, noon.Add(-time.Duration(step)*time.Second)); err != nil {
			t.Fatal(err)
		}
		if box.timeUs <= last {
			t.Errorf("%d after %d", box.timeUs, last)
		}
		last = box.timeUs
	}
}

func TestQueueIsBounded(t *testing.T) {
	queue := newQueue(2, 100)
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := queue.tryPut(call{size: 101}, false); !errors.Is(err, ErrTooLarge) {
		t.Errorf("a call that never fits: %v", err)
	}
	for _, size := range []int{60, 40} {
		if err := queue.put(ended, call{size: size}, false); err != nil {
			t.Fatal(err)
		}
	}
	if room, err := queue.tryPut(call{}, false); !errors.Is(err, ErrQueueFull) || room == nil {
		t.Errorf("a third call: %v", err)
	}
	if err := queue.put(ended, call{}, false); !errors.Is(err, context.Canceled) {
		t.Errorf("a third call: %v", err)
	}
	put := make(chan error)
	go func() { put <- queue.put(context.Background(), call{size: 60}, true) }()
	if next, has, _ := queue.take(); !has || next.size != 60 {
		t.Errorf("found %+v", next)
	}
	if err := <-put; err != nil {
		t.Error(err)
	}
	if _, err := queue.tryPut(call{}, false); !errors.Is(err, ErrStopped) {
		t.Errorf("behind the last call: %v", err)
	}
	for _, size := range []int{40, 60} {
		if next, has, isOver := queue.take(); !has || isOver || next.size != size {
			t.Errorf("found %+v", next)
		}
	}
	if _, has, isOver := queue.take(); has || !isOver {
		t.Error("the queue is not over")
	}
}
