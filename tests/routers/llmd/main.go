// Command llmd drives llm-d's own code for tests: its event pool, which fills a real Redis from an engine's payloads, its token processor,
// and its index over Redis, which asks that server and kvatlas alike. It is built in a checkout of llm-d-router, as cmd/llmd.
//
//	llmd REDIS KVATLAS ALGORITHM SEED MODEL BLOCK
//
// One JSON object a line comes on standard input, and one goes out:
//
//	{"op":"event","topic":T,"payload":BASE64}        a payload for the pool; {}
//	{"op":"wait","pod":P,"tokens":[…]}               {} when both have the prompt's last block of the pod
//	{"op":"ask","tokens":[…],"model":M,"extras":[…]} {"redis":ANSWER,"kvatlas":ANSWER}: depths by pod, scores by pod, entries of the first block
//	{"op":"guess","tokens":[…],"pod":P,"back":BOOL}  a speculative entry for both, or its end; {}
//	{"op":"bench","index":"redis"|"kvatlas","prompts":[[…],…],"count":N,"flight":N}  RATES
package main

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/llm-d/llm-d-router/pkg/kvcache"
	"github.com/llm-d/llm-d-router/pkg/kvcache/kvblock"
	"github.com/llm-d/llm-d-router/pkg/kvevents"
	"github.com/llm-d/llm-d-router/pkg/kvevents/engineadapter"
)

type request struct {
	Op      string     `json:"op"`
	Topic   string     `json:"topic"`
	Payload string     `json:"payload"`
	Tokens  []uint32   `json:"tokens"`
	Prompts [][]uint32 `json:"prompts"`
	Model   string     `json:"model"`
	Extras  [][]string `json:"extras"`
	Pod     string     `json:"pod"`
	Index   string     `json:"index"`
	Back    bool       `json:"back"`
	Count   int        `json:"count"`
	Flight  int        `json:"flight"`
}

type answer struct {
	Depths map[string]int     `json:"depths"`
	Scores map[string]float64 `json:"scores"`
	First  []string           `json:"first"`
}

type rates struct {
	PerSecond float64 `json:"per_second"`
	P50       float64 `json:"p50_us"`
	P99       float64 `json:"p99_us"`
	Failed    int64   `json:"failed"`
}

type driver struct {
	processor      kvblock.TokenProcessor
	scorer         kvcache.KVBlockScorer
	pool           *kvevents.Pool
	redis, kvatlas kvblock.Index
	model          string
}

func must[T any](value T, err error) T {
	if err != nil {
		fmt.Fprintln(os.Stderr, "llmd:", err)
		os.Exit(1)
	}
	return value
}

func connect(address string) kvblock.Index {
	return must(kvblock.NewRedisIndex(&kvblock.RedisIndexConfig{Address: address}))
}

func (d *driver) keys(tokens []uint32, model string, extras [][]string) []kvblock.BlockHash {
	if model == "" {
		model = d.model
	}
	var features []*kvblock.BlockExtraFeatures
	for _, texts := range extras {
		var own *kvblock.BlockExtraFeatures
		for _, text := range texts {
			if own == nil {
				own = &kvblock.BlockExtraFeatures{}
			}
			own.MMHashes = append(own.MMHashes, kvblock.MMHash{Hash: text})
		}
		features = append(features, own)
	}
	return must(d.processor.TokensToKVBlockKeys(kvblock.EmptyBlockHash, tokens, model, features))
}

// How many leading blocks each pod has, as llm-d counts them, and what its scorer makes of it.
func (d *driver) ask(index kvblock.Index, keys []kvblock.BlockHash) answer {
	found := must(index.Lookup(context.Background(), keys, nil))
	depths := map[string]int{}
	for place, key := range keys {
		for _, entry := range found[key] {
			if depths[entry.PodIdentifier] == place {
				depths[entry.PodIdentifier] = place + 1
			}
		}
	}
	for pod, depth := range depths {
		if depth == 0 {
			delete(depths, pod)
		}
	}
	var first []string
	if len(keys) > 0 {
		for _, entry := range found[keys[0]] {
			first = append(first, entry.String())
		}
	}
	slices.Sort(first)
	scores := must(d.scorer.Score(context.Background(), keys, found))
	return answer{Depths: depths, Scores: scores, First: first}
}

func (d *driver) wait(keys []kvblock.BlockHash, pod string) {
	deadline := time.Now().Add(30 * time.Second)
	for _, index := range []kvblock.Index{d.redis, d.kvatlas} {
		for d.ask(index, keys).Depths[pod] < len(keys) {
			if time.Now().After(deadline) {
				fmt.Fprintln(os.Stderr, "llmd: not in time:", pod)
				os.Exit(1)
			}
			time.Sleep(time.Millisecond)
		}
	}
}

func (d *driver) guess(r request) {
	entries := []kvblock.PodEntry{{PodIdentifier: r.Pod, Speculative: true}}
	keys := d.keys(r.Tokens, "", nil)
	for _, index := range []kvblock.Index{d.redis, d.kvatlas} {
		if !r.Back {
			must(0, index.Add(context.Background(), nil, keys, entries))
			continue
		}
		for _, key := range keys {
			must(0, index.Evict(context.Background(), key, kvblock.RequestKey, entries))
		}
	}
}

func (d *driver) bench(r request) rates {
	index := map[string]kvblock.Index{"redis": d.redis, "kvatlas": d.kvatlas}[r.Index]
	all := make([][]kvblock.BlockHash, len(r.Prompts))
	for i, tokens := range r.Prompts {
		all[i] = d.keys(tokens, "", nil)
	}
	times := make([]time.Duration, r.Count)
	var next, failed atomic.Int64
	var group sync.WaitGroup
	began := time.Now()
	for range r.Flight {
		group.Go(func() {
			for i := next.Add(1) - 1; i < int64(r.Count); i = next.Add(1) - 1 {
				from := time.Now()
				if _, err := index.Lookup(context.Background(), all[int(i)%len(all)], nil); err != nil {
					failed.Add(1)
				}
				times[i] = time.Since(from)
			}
		})
	}
	group.Wait()
	took := time.Since(began)
	slices.Sort(times)
	us := func(part int) float64 { return float64(times[r.Count*part/100].Nanoseconds()) / 1000 }
	return rates{PerSecond: float64(r.Count) / took.Seconds(), P50: us(50), P99: us(99), Failed: failed.Load()}
}

func (d *driver) do(r request) any {
	switch r.Op {
	case "event":
		payload := must(base64.StdEncoding.DecodeString(r.Payload))
		d.pool.AddTask(&kvevents.RawMessage{Topic: r.Topic, Payload: payload})
	case "wait":
		d.wait(d.keys(r.Tokens, "", nil), r.Pod)
	case "ask":
		keys := d.keys(r.Tokens, r.Model, r.Extras)
		return map[string]answer{"redis": d.ask(d.redis, keys), "kvatlas": d.ask(d.kvatlas, keys)}
	case "guess":
		d.guess(r)
	case "bench":
		return d.bench(r)
	default:
		fmt.Fprintln(os.Stderr, "llmd: unknown:", r.Op)
		os.Exit(2)
	}
	return struct{}{}
}

func main() {
	if len(os.Args) != 7 {
		fmt.Fprintln(os.Stderr, "usage: llmd REDIS KVATLAS ALGORITHM SEED MODEL BLOCK")
		os.Exit(2)
	}
	processor := must(kvblock.NewChunkedTokenDatabase(&kvblock.TokenProcessorConfig{
		HashAlgorithm: os.Args[3], HashSeed: os.Args[4], BlockSizeTokens: must(strconv.Atoi(os.Args[6])),
	}))
	redis := connect(os.Args[1])
	// One queue, so that payloads are applied in their order.
	config := kvevents.DefaultConfig()
	config.Concurrency = 1
	d := driver{
		processor: processor,
		scorer:    must(kvcache.NewKVBlockScorer(kvcache.DefaultKVBlockScorerConfig())),
		pool:      kvevents.NewPool(config, redis, processor, engineadapter.NewVLLMAdapter()),
		redis:     redis,
		kvatlas:   connect(os.Args[2]),
		model:     os.Args[5],
	}
	d.pool.Start(context.Background())
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<28)
	out := json.NewEncoder(os.Stdout)
	for lines.Scan() {
		var r request
		must(0, json.Unmarshal(lines.Bytes(), &r))
		must(0, out.Encode(d.do(r)))
	}
	must(0, lines.Err())
}
