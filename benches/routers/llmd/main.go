// Command llmd is llm-d-router's KV-cache indexer behind one HTTP door: its event pool and its subscribers on fixed endpoints, its in-memory
// index, token processor and scorer, all with their defaults. It is built in a checkout of llm-d-router.
//
//	llmd PORT BLOCK POD=EVENTS[,REPLAY]...     POD is what the engine's topic calls it; EVENTS and REPLAY are ZMQ addresses
//
// POST /score takes {"model", "tokens", "salt"}, and answers with the score of each pod.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"

	"github.com/llm-d/llm-d-router/pkg/kvcache"
	"github.com/llm-d/llm-d-router/pkg/kvcache/kvblock"
	"github.com/llm-d/llm-d-router/pkg/kvevents"
	"github.com/llm-d/llm-d-router/pkg/kvevents/engineadapter"
)

type question struct {
	Model  string   `json:"model"`
	Tokens []uint32 `json:"tokens"`
	Salt   string   `json:"salt"`
}

func must[T any](value T, err error) T {
	if err != nil {
		fmt.Fprintln(os.Stderr, "llmd:", err)
		os.Exit(1)
	}
	return value
}

// extras is what a request adds to its blocks: the salt in the first, as llm-d's own producer has it.
func (q question) extras(block int) []*kvblock.BlockExtraFeatures {
	count := len(q.Tokens) / block
	if count == 0 || q.Salt == "" {
		return nil
	}
	all := make([]*kvblock.BlockExtraFeatures, count)
	all[0] = &kvblock.BlockExtraFeatures{MMHashes: []kvblock.MMHash{{Hash: q.Salt}}}
	return all
}

func main() {
	ctx := context.Background()
	port, block := os.Args[1], must(strconv.Atoi(os.Args[2]))
	processor := must(kvblock.NewChunkedTokenDatabase(&kvblock.TokenProcessorConfig{BlockSizeTokens: block}))
	indexer := must(kvcache.NewKVCacheIndexer(ctx, must(kvcache.NewDefaultConfig()), processor))
	events := kvevents.DefaultConfig()
	pool := kvevents.NewPool(events, indexer.KVBlockIndex(), processor, must(engineadapter.NewAdapter(events.EngineType)))
	pool.Start(ctx)
	subscribers, pods := kvevents.NewSubscriberManager(pool), []string{}
	for _, argument := range os.Args[3:] {
		pod, sockets, _ := strings.Cut(argument, "=")
		addresses := append(strings.Split(sockets, ","), "")
		pods = append(pods, pod)
		must(0, subscribers.EnsureSubscriber(ctx, pod, pod, addresses[0], addresses[1], events.TopicFilter, true))
	}
	http.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
	http.HandleFunc("/score", func(response http.ResponseWriter, request *http.Request) {
		var asked question
		if err := json.NewDecoder(request.Body).Decode(&asked); err != nil {
			http.Error(response, err.Error(), http.StatusBadRequest)
			return
		}
		scores, err := indexer.ScoreTokens(request.Context(), asked.Tokens, asked.Model, pods, asked.extras(block))
		if err != nil {
			http.Error(response, err.Error(), http.StatusInternalServerError)
			return
		}
		_ = json.NewEncoder(response).Encode(scores)
	})
	must(0, http.ListenAndServe("127.0.0.1:"+port, nil))
}
