// Command load asks a server of kv_indexer.v1 as SGLang's router does, over one connection, as fast as it answers.
//
//	load ADDRESS
//
// One JSON object a line comes on standard input, and one goes out:
//
//	{"prompts":[[HASH,…],…],"count":N,"flight":N}    {"per_second","p50_us","p99_us","failed"}: asks MatchExternalKvPrefix
//	{"count":N,"flight":N}                           the same of grpc.health.v1, whose answer costs nothing: what gRPC itself takes
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/protowire"
)

type request struct {
	Prompts [][]int64 `json:"prompts"`
	Count   int       `json:"count"`
	Flight  int       `json:"flight"`
}

type rates struct {
	PerSecond float64 `json:"per_second"`
	P50       float64 `json:"p50_us"`
	P99       float64 `json:"p99_us"`
	Failed    int64   `json:"failed"`
}

// raw hands messages on as they are.
type raw struct{}

func (raw) Marshal(message any) ([]byte, error) { return *message.(*[]byte), nil }

func (raw) Unmarshal(data []byte, message any) error {
	*message.(*[]byte) = slices.Clone(data)
	return nil
}

func (raw) Name() string { return "proto" }

func must[T any](value T, err error) T {
	if err != nil {
		fmt.Fprintln(os.Stderr, "load:", err)
		os.Exit(1)
	}
	return value
}

// The messages of a request, and the method that takes them.
func messages(r request) (string, [][]byte) {
	if len(r.Prompts) == 0 {
		return "/grpc.health.v1.Health/Check", [][]byte{{}}
	}
	var all [][]byte
	for _, hashes := range r.Prompts {
		var packed []byte
		for _, hash := range hashes {
			packed = protowire.AppendFixed64(packed, uint64(hash))
		}
		all = append(all, protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), packed))
	}
	return "/kv_indexer.v1.KVIndexer/MatchExternalKvPrefix", all
}

// Asks for each of the messages in turn, and expects the same answers each time.
func measure(connection *grpc.ClientConn, r request) rates {
	method, all := messages(r)
	ask := func(place int) ([]byte, error) {
		var answer []byte
		err := connection.Invoke(context.Background(), method, &all[place], &answer, grpc.ForceCodec(raw{}))
		return answer, err
	}
	expected := make([][]byte, len(all))
	for place := range all {
		expected[place] = must(ask(place))
	}
	times := make([]time.Duration, r.Count)
	var next, failed atomic.Int64
	var group sync.WaitGroup
	began := time.Now()
	for range r.Flight {
		group.Go(func() {
			for i := next.Add(1) - 1; i < int64(r.Count); i = next.Add(1) - 1 {
				from, place := time.Now(), int(i)%len(all)
				if answer, err := ask(place); err != nil || !bytes.Equal(answer, expected[place]) {
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

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: load ADDRESS")
		os.Exit(2)
	}
	connection := must(grpc.NewClient(os.Args[1], grpc.WithTransportCredentials(insecure.NewCredentials())))
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<26)
	out := json.NewEncoder(os.Stdout)
	for lines.Scan() {
		var r request
		must(0, json.Unmarshal(lines.Bytes(), &r))
		must(0, out.Encode(measure(connection, r)))
	}
	must(0, lines.Err())
}
