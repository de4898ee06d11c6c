package kvatlas

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"testing"

	"github.com/vmihailenco/msgpack/v5"
)

type digits string

func (d digits) number(t *testing.T) uint64 {
	t.Helper()
	number, err := strconv.ParseUint(string(d), 16, 64)
	if err != nil {
		t.Fatal(err)
	}
	return number
}

func numbers(t *testing.T, texts []digits) []uint64 {
	t.Helper()
	if texts == nil {
		return nil
	}
	found := []uint64{}
	for _, text := range texts {
		found = append(found, text.number(t))
	}
	return found
}

func unhex(t *testing.T, text string) []byte {
	t.Helper()
	payload, err := hex.DecodeString(text)
	if err != nil {
		t.Fatal(err)
	}
	return payload
}

// section reads one section of the contract's vectors, which must not be empty.
func section[V any](t *testing.T, name string) []V {
	t.Helper()
	text, err := os.ReadFile("../../deploy/test-vectors.json")
	if err != nil {
		t.Fatal(err)
	}
	var sections map[string]json.RawMessage
	if err := json.Unmarshal(text, &sections); err != nil {
		t.Fatal(err)
	}
	var found []V
	if err := json.Unmarshal(sections[name], &found); err != nil {
		t.Fatal(err)
	}
	if len(found) == 0 {
		t.Fatalf("there are no vectors in %s", name)
	}
	return found
}

// meaning is a payload in words: the same for all encodings of one map.
func meaning(t *testing.T, payload []byte, without ...string) string {
	t.Helper()
	var found map[string]interface{}
	if err := msgpack.Unmarshal(payload, &found); err != nil {
		t.Fatalf("%x: %v", payload, err)
	}
	for _, key := range without {
		delete(found, key)
	}
	return fmt.Sprint(found)
}

func same(t *testing.T, name string, found, expected interface{}) {
	t.Helper()
	if one, other := fmt.Sprintf("%+v", found), fmt.Sprintf("%+v", expected); one != other {
		t.Errorf("%s: found %s, expected %s", name, one, other)
	}
}

func TestHashesAreTheContracts(t *testing.T) {
	for _, vector := range section[struct {
		Name           string
		Tokens         []uint32
		BlockSize      int      `json:"block_size"`
		LoraName       string   `json:"lora_name"`
		CacheSalt      string   `json:"cache_salt"`
		Seed           digits   `json:"seed"`
		BlockHashes    []digits `json:"block_hashes"`
		SequenceHashes []digits `json:"sequence_hashes"`
	}](t, "hashes") {
		seed := CacheSeed(vector.LoraName, vector.CacheSalt)
		blocks := BlockHashes(vector.Tokens, vector.BlockSize, seed)
		chain := SequenceHashes(blocks)
		same(t, vector.Name, seed, vector.Seed.number(t))
		same(t, vector.Name, blocks, numbers(t, vector.BlockHashes))
		same(t, vector.Name, chain, numbers(t, vector.SequenceHashes))
		if len(chain) > 1 {
			same(t, vector.Name, ExtendSequence(chain[0], blocks[1:]), chain[1:])
		}
	}
}

func TestSubjectsAreTheContracts(t *testing.T) {
	for _, vector := range section[struct {
		Prefix, Namespace, Worker, Events, Query, Status, Resync string
		Rank                                                     uint32
	}](t, "subjects") {
		named, err := newSubjects(vector.Prefix)
		if err != nil {
			t.Fatal(err)
		}
		query, _ := named.scoped("query", vector.Namespace)
		status, _ := named.scoped("status", vector.Namespace)
		events, _ := named.ofWorker("events", vector.Namespace, vector.Worker)
		resync, _ := named.ofWorker("resync", vector.Namespace, vector.Worker)
		found := []string{query, status, events, fmt.Sprintf("%s.%d", resync, vector.Rank)}
		same(t, vector.Prefix, found, []string{vector.Query, vector.Status, vector.Events, vector.Resync})
	}
}

func TestNamesAreRefused(t *testing.T) {
	named, _ := newSubjects("")
	for _, name := range section[string](t, "names_refused") {
		if _, err := named.scoped("query", name); !errors.Is(err, ErrInvalid) {
			t.Errorf("namespace %q: %v", name, err)
		}
		if _, err := named.ofWorker("events", "llama", name); !errors.Is(err, ErrInvalid) {
			t.Errorf("worker %q: %v", name, err)
		}
	}
}

func TestShardsAreTheContracts(t *testing.T) {
	for _, vector := range section[struct {
		Worker        string
		Shard, Shards int
	}](t, "shards") {
		found, err := ShardOf(vector.Worker, vector.Shards)
		if err != nil || found != vector.Shard {
			t.Errorf("%+v: found %d, %v", vector, found, err)
		}
	}
}

type queryMeaning struct {
	Tokens         []uint32
	LoraName       string   `json:"lora_name"`
	CacheSalt      string   `json:"cache_salt"`
	BlockHashes    []digits `json:"block_hashes"`
	SequenceHashes []digits `json:"sequence_hashes"`
	LineageHashes  []string `json:"lineage_hashes"`
	Positions      []uint32
	TokenCount     uint64 `json:"token_count"`
	Workers        []string
	Limit          uint64
	MinBlocks      uint32 `json:"min_blocks"`
	Explain, Tiers bool
	Predicted      bool
}

func (m queryMeaning) query(t *testing.T) Query {
	var lineage []LineageHash
	for _, text := range m.LineageHashes {
		var hash LineageHash
		copy(hash[:], unhex(t, text))
		lineage = append(lineage, hash)
	}
	return Query{
		m.Tokens, m.LoraName, m.CacheSalt, numbers(t, m.BlockHashes), numbers(t, m.SequenceHashes), lineage, m.Positions, m.TokenCount,
		m.Workers, m.Limit, m.MinBlocks, m.Explain, m.Tiers, m.Predicted,
	}
}

func TestQueriesAreEncoded(t *testing.T) {
	for _, vector := range section[struct {
		Name, Payload string
		Meaning       queryMeaning
	}](t, "queries") {
		payload, err := encodeQuery(vector.Meaning.query(t))
		if err != nil {
			t.Fatalf("%s: %v", vector.Name, err)
		}
		same(t, vector.Name, meaning(t, payload), meaning(t, unhex(t, vector.Payload)))
	}
	for _, vector := range section[struct {
		Name, Payload string
		Meaning       struct{ Queries []queryMeaning }
	}](t, "query_batches") {
		var queries []Query
		for _, each := range vector.Meaning.Queries {
			queries = append(queries, each.query(t))
		}
		payload, err := encodeQueries(queries)
		if err != nil {
			t.Fatalf("%s: %v", vector.Name, err)
		}
		same(t, vector.Name, meaning(t, payload), meaning(t, unhex(t, vector.Payload)))
	}
}

func TestHintsAreEncoded(t *testing.T) {
	for _, vector := range section[struct {
		Name, Payload string
		Meaning       struct {
			Worker string
			Rank   uint32
			Prompt queryMeaning
		}
	}](t, "hints") {
		payload, err := encodeHint(Hint{vector.Meaning.Worker, vector.Meaning.Rank, vector.Meaning.Prompt.query(t)})
		if err != nil {
			t.Fatalf("%s: %v", vector.Name, err)
		}
		same(t, vector.Name, meaning(t, payload), meaning(t, unhex(t, vector.Payload)))
	}
}

type replyMeaning struct {
	Predicted       []Predicted
	QueryBlocks     uint64 `json:"query_blocks"`
	BlockSize       uint64 `json:"block_size"`
	HoldersTotal    uint64 `json:"holders_total"`
	ForeignHolders  uint64 `json:"foreign_holders"`
	DoubtfulHolders uint64 `json:"doubtful_holders"`
	UnseenBlocksMax uint64 `json:"unseen_blocks_max"`
	Gathered        *Gathered
	Holders         []struct {
		Worker             string
		Rank               uint32
		MatchedBlocks      uint64  `json:"matched_blocks"`
		MatchedBlocksMax   uint64  `json:"matched_blocks_max"`
		UsableBlocks       uint64  `json:"usable_blocks"`
		DeviceBlocks       *uint64 `json:"device_blocks"`
		HostBlocks         uint64  `json:"host_blocks"`
		DeviceUsableBlocks uint64  `json:"device_usable_blocks"`
		HostUsableBlocks   uint64  `json:"host_usable_blocks"`
		Exact              bool
		Degraded           []string
		LimitedBy          string `json:"limited_by"`
		Address            string
		Labels             map[string]string
		DroppedOut         *struct {
			Position     uint32
			LineageHash  string `json:"lineage_hash"`
			OtherHolders uint64 `json:"other_holders"`
		} `json:"dropped_out"`
	}
}

func (m *replyMeaning) check(t *testing.T, name string, found *Reply) {
	t.Helper()
	same(t, name, []uint64{found.QueryBlocks, found.BlockSize, found.HoldersTotal, found.ForeignHolders, found.DoubtfulHolders, found.UnseenBlocksMax},
		[]uint64{m.QueryBlocks, m.BlockSize, m.HoldersTotal, m.ForeignHolders, m.DoubtfulHolders, m.UnseenBlocksMax})
	if (m.Gathered == nil) != (found.Gathered == nil) || m.Gathered != nil && fmt.Sprint(*m.Gathered) != fmt.Sprint(*found.Gathered) {
		t.Errorf("%s: gathered %v, expected %v", name, found.Gathered, m.Gathered)
	}
	same(t, name, append([]Predicted{}, found.Predicted...), append([]Predicted{}, m.Predicted...))
	if len(found.Holders) != len(m.Holders) {
		t.Fatalf("%s: found %+v", name, found)
	}
	isExact := m.ForeignHolders == 0 && m.DoubtfulHolders == 0 && (m.Gathered == nil || len(m.Gathered.Missing) == 0)
	for index, expected := range m.Holders {
		holder := found.Holders[index]
		isExact = isExact && expected.Exact
		same(t, name, []interface{}{holder.Worker, holder.Rank, holder.MatchedBlocks, holder.MatchedBlocksMax, holder.UsableBlocks, holder.Exact,
			holder.Degraded, holder.LimitedBy, holder.Address, len(holder.Labels)},
			[]interface{}{expected.Worker, expected.Rank, expected.MatchedBlocks, expected.MatchedBlocksMax, expected.UsableBlocks, expected.Exact,
				expected.Degraded, expected.LimitedBy, expected.Address, len(expected.Labels)})
		for key, value := range expected.Labels {
			same(t, name, holder.Labels[key], value)
		}
		if expected.DeviceBlocks == nil {
			same(t, name, holder.Tiers == nil, true)
		} else {
			same(t, name, *holder.Tiers, TierMatch{*expected.DeviceBlocks, expected.HostBlocks, expected.DeviceUsableBlocks, expected.HostUsableBlocks})
		}
		if dropped := expected.DroppedOut; dropped == nil {
			same(t, name, holder.DroppedOut == nil, true)
		} else {
			same(t, name, fmt.Sprintf("%d %x %d", holder.DroppedOut.Position, holder.DroppedOut.LineageHash, holder.DroppedOut.OtherHolders),
				fmt.Sprintf("%d %s %d", dropped.Position, dropped.LineageHash, dropped.OtherHolders))
		}
	}
	same(t, name, found.Exact(), isExact)
}

func TestRepliesAreDecoded(t *testing.T) {
	for _, vector := range section[struct {
		Name, Payload string
		Meaning       replyMeaning
	}](t, "query_replies") {
		found, err := decodeReply(unhex(t, vector.Payload))
		if err != nil {
			t.Fatalf("%s: %v", vector.Name, err)
		}
		vector.Meaning.check(t, vector.Name, found)
	}
}

func TestRepliesToSeveralAreDecoded(t *testing.T) {
	for _, vector := range section[struct {
		Name, Payload string
		Meaning       struct {
			Results []struct {
				Reply *replyMeaning
				Error *RefusedError
			}
		}
	}](t, "query_batch_replies") {
		expected := vector.Meaning.Results
		found, err := decodeResults(unhex(t, vector.Payload), len(expected))
		if err != nil {
			t.Fatalf("%s: %v", vector.Name, err)
		}
		for index, result := range found {
			if expected[index].Reply != nil {
				expected[index].Reply.check(t, vector.Name, result.Reply)
			} else {
				same(t, vector.Name, result.Err, expected[index].Error)
			}
		}
		if _, err := decodeResults(unhex(t, vector.Payload), len(expected)+1); !errors.Is(err, ErrUndecodable) {
			t.Errorf("%s: a result that is missing is not noticed: %v", vector.Name, err)
		}
	}
}

func TestStatusesAreDecoded(t *testing.T) {
	for _, vector := range section[struct {
		Name, Payload string
		Meaning       struct {
			BlockSize      uint64 `json:"block_size"`
			DistinctBlocks uint64 `json:"distinct_blocks"`
			BatchesWaiting uint64 `json:"batches_waiting"`
			UnsizedHolders uint64 `json:"unsized_holders"`
			RefusedHolders uint64 `json:"refused_holders"`
			UnheardHolders uint64 `json:"unheard_holders"`
			Holders        []struct {
				Worker             string
				Rank               uint32
				Epoch, Seq, Blocks uint64
				ParkedEvents       uint64 `json:"parked_events"`
				ForeignChain       bool   `json:"foreign_chain"`
				EpochAheadS        int    `json:"epoch_ahead_s"`
				SinceUs            int64  `json:"since_us"`
				Exact              bool
				Degraded           []string
			}
		}
	}](t, "status_replies") {
		found, err := decodeStatus(unhex(t, vector.Payload))
		if err != nil {
			t.Fatalf("%s: %v", vector.Name, err)
		}
		m := vector.Meaning
		same(t, vector.Name, []uint64{found.BlockSize, found.DistinctBlocks, found.BatchesWaiting, found.UnsizedHolders, found.RefusedHolders, found.UnheardHolders},
			[]uint64{m.BlockSize, m.DistinctBlocks, m.BatchesWaiting, m.UnsizedHolders, m.RefusedHolders, m.UnheardHolders})
		for index, expected := range m.Holders {
			holder := found.Holders[index]
			same(t, vector.Name, []interface{}{holder.Worker, holder.Rank, holder.Cursor, holder.Blocks, holder.ParkedEvents, holder.ForeignChain,
				holder.EpochAhead.Seconds(), holder.Since.UnixMicro(), holder.Exact, holder.Degraded},
				[]interface{}{expected.Worker, expected.Rank, Cursor{expected.Epoch, expected.Seq}, expected.Blocks, expected.ParkedEvents,
					expected.ForeignChain, expected.EpochAheadS, expected.SinceUs, expected.Exact, expected.Degraded})
		}
	}
}

// An eventMeaning has what this client can say of an event; of the others it knows that they are others.
type eventMeaning struct {
	Type           string
	Parent         *digits
	Position       *uint32
	SequenceHashes []digits        `json:"sequence_hashes"`
	BlockHashes    []digits        `json:"block_hashes"`
	LineageHashes  json.RawMessage `json:"lineage_hashes"`
	EngineHashes   json.RawMessage `json:"engine_hashes"`
	Tokens         json.RawMessage
	Resumable      json.RawMessage
	Reasons        []string
}

func (m eventMeaning) change(t *testing.T) (change, bool) {
	isOther := m.LineageHashes != nil || m.EngineHashes != nil || m.Tokens != nil || m.Resumable != nil || (m.Parent == nil) != (m.Position == nil)
	if isOther || m.Type == "doubted" && fmt.Sprint(m.Reasons) != "[upstream_gap]" {
		return change{}, false
	}
	made := change{kind: m.Type, hashes: numbers(t, m.SequenceHashes), blocks: numbers(t, m.BlockHashes)}
	if m.Parent != nil {
		made.parent, made.position = m.Parent.number(t), *m.Position
	}
	return made, true
}

func TestBatchesAreEncoded(t *testing.T) {
	count := 0
	for _, vector := range section[struct {
		Name, Payload string
		OnlyDecode    bool `json:"only_decode"`
		Meaning       struct {
			Epoch, Seq uint64
			Rank       uint32
			Tier       Tier
			TimeUs     uint64 `json:"time_us"`
			Profile    *struct {
				Address string
				Labels  map[string]string
			}
			Events []eventMeaning
		}
	}](t, "batches") {
		m, made := vector.Meaning, batch{rank: vector.Meaning.Rank, blockSize: 16, tier: vector.Meaning.Tier}
		if m.Profile != nil {
			made.profile = &profile{m.Profile.Address, m.Profile.Labels}
		}
		for _, event := range m.Events {
			if next, is := event.change(t); is {
				made.changes = append(made.changes, next)
			}
		}
		if vector.OnlyDecode || len(made.changes) < len(m.Events) {
			continue
		}
		payload, err := made.encode(Cursor{m.Epoch, m.Seq}, m.TimeUs)
		if err != nil {
			t.Fatalf("%s: %v", vector.Name, err)
		}
		// This client always says the block size, and leaves out what is the default.
		without := []string{"v", "block_size", "rank"}
		if made.tier == Device {
			without = append(without, "tier")
		}
		same(t, vector.Name, meaning(t, payload, without...), meaning(t, unhex(t, vector.Payload), without...))
		count++
	}
	if count < 9 {
		t.Errorf("only %d of the batches were checked", count)
	}
}

func TestQuestionsAreDecoded(t *testing.T) {
	for _, vector := range section[struct {
		Name, Payload string
		Meaning       struct {
			Rank       uint32
			Epoch, Seq uint64
			Full       bool
		}
	}](t, "resync_requests") {
		found, err := testOutbox(PublisherOptions{Rank: vector.Meaning.Rank}).decodeRequest(unhex(t, vector.Payload))
		if err != nil {
			t.Fatalf("%s: %v", vector.Name, err)
		}
		same(t, vector.Name, []interface{}{*found.Epoch, *found.Seq, found.Full},
			[]interface{}{vector.Meaning.Epoch, vector.Meaning.Seq, vector.Meaning.Full})
	}
}

func TestAnswersAreEncoded(t *testing.T) {
	vectors := section[struct {
		Name, Payload string
		Meaning       struct {
			Kind       string
			Chunk      int
			Last       bool
			Epoch, Seq uint64
			TimeUs     uint64 `json:"time_us"`
			Recomputed int    `json:"recomputed_block_size"`
		}
	}](t, "resync_chunks")
	var batches [][]byte
	var expected []string
	for _, vector := range vectors {
		var chunk struct {
			Batches [][]byte `msgpack:"batches"`
		}
		if err := msgpack.Unmarshal(unhex(t, vector.Payload), &chunk); err != nil {
			t.Fatal(err)
		}
		m := vector.Meaning
		batches, expected = append(batches, chunk.Batches...), append(expected, meaning(t, unhex(t, vector.Payload)))
		if !m.Last {
			continue
		}
		box := testOutbox(PublisherOptions{Recompute: m.Recomputed > 0})
		box.cursor, box.timeUs = Cursor{m.Epoch, m.Seq}, m.TimeUs
		if m.Chunk > 0 {
			// Nothing but the first batch fits.
			box.options.ChunkBytesMax = 1
		}
		chunks, err := box.chunks(m.Kind, batches)
		if err != nil {
			t.Fatal(err)
		}
		var found []string
		for _, chunk := range chunks {
			found = append(found, meaning(t, chunk))
		}
		same(t, vector.Name, found, expected)
		batches, expected = nil, nil
	}
}
