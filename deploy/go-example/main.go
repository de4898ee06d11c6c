// A publisher and a router in Go: says what a worker holds, and asks who holds a prompt.
//
// Start a daemon with `kvatlas serve`, then this. With -stay it goes on as the worker until it is interrupted, and then says
// goodbye. See deploy/wire-contract.md for the contract, and deploy/clients.md for how to build it.
package main

import (
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/vmihailenco/msgpack/v5"
)

const patience = 5 * time.Second

// A reply to a query.
type reply struct {
	QueryBlocks int           `msgpack:"query_blocks"`
	Holders     []holderMatch `msgpack:"holders"`
}

// A worker and rank that hold the beginning of the prompt.
type holderMatch struct {
	Worker        string   `msgpack:"worker"`
	Rank          uint32   `msgpack:"rank"`
	MatchedBlocks int      `msgpack:"matched_blocks"`
	UsableBlocks  *int     `msgpack:"usable_blocks"`
	Exact         bool     `msgpack:"exact"`
	Degraded      []string `msgpack:"degraded"`
	// Where requests for it go, and how it is labelled; empty where that is not known.
	Address string            `msgpack:"address"`
	Labels  map[string]string `msgpack:"labels"`
}

// usable is how many leading blocks a request reuses: a daemon says it where that is not all that match.
func (holder holderMatch) usable() int {
	if holder.UsableBlocks == nil {
		return holder.MatchedBlocks
	}
	return *holder.UsableBlocks
}

// How far a daemon has followed a namespace.
type status struct {
	Holders []struct {
		Worker string `msgpack:"worker"`
		Epoch  uint64 `msgpack:"epoch"`
		Seq    uint64 `msgpack:"seq"`
	} `msgpack:"holders"`
}

// refused is a daemon's error: its number, and a text that says what to change.
type refused struct{ code, text string }

func (r refused) Error() string {
	return fmt.Sprintf("the daemon refused: %s (error %s)", r.text, r.code)
}

// ask sends a request and reads its answer.
func ask(connection *nats.Conn, subject string, request, answer interface{}) error {
	var payload []byte
	if request != nil {
		encoded, err := msgpack.Marshal(request)
		if err != nil {
			return err
		}
		payload = encoded
	}
	message, err := connection.Request(subject, payload, patience)
	if err != nil {
		return err
	}
	if code := message.Header.Get("Nats-Service-Error-Code"); code != "" {
		return refused{code, message.Header.Get("Nats-Service-Error")}
	}
	return msgpack.Unmarshal(message.Data, answer)
}

// waitUntilApplied waits until the daemon has applied the publisher's last batch.
func waitUntilApplied(connection *nats.Conn, publisher *Publisher, namespace, worker string) error {
	epoch, seq := publisher.Last()
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		var found status
		err := ask(connection, "kvatlas.v1.status."+namespace, nil, &found)
		var refusal refused
		if errors.As(err, &refusal) && (refusal.code == "404" || refusal.code == "503") {
			continue // The namespace comes into being with its first batch, and a daemon that has just started does not know all.
		}
		if err != nil {
			return err
		}
		for _, holder := range found.Holders {
			if holder.Worker == worker && holder.Epoch == epoch && holder.Seq >= seq {
				return nil
			}
		}
	}
	return fmt.Errorf("batch %d was not applied within %v", seq, patience)
}

func show(connection *nats.Conn, namespace, title string, query map[string]interface{}) error {
	var found reply
	if err := ask(connection, "kvatlas.v1.query."+namespace, query, &found); err != nil {
		return err
	}
	fmt.Println(title)
	for _, holder := range found.Holders {
		fmt.Printf("  %s holds %d of %d blocks, %d of them usable, exact: %t %v\n",
			holder.Worker, holder.MatchedBlocks, found.QueryBlocks, holder.usable(), holder.Exact, holder.Degraded)
		if holder.Address != "" {
			fmt.Printf("    at %s %v\n", holder.Address, holder.Labels)
		}
	}
	return nil
}

func run(url, namespace, worker, address string, stay bool) error {
	connection, err := nats.Connect(url, nats.MaxReconnects(-1))
	if err != nil {
		return err
	}
	defer connection.Close()
	publisher, err := StartPublisher(connection, namespace, worker, address)
	if err != nil {
		return err
	}
	tokens := make([]uint32, 4*blockSize)
	for index := range tokens {
		tokens[index] = uint32(index + 1)
	}
	blocks := blockHashes(tokens, blockSize, cacheSeed("", ""))
	chain := sequenceHashes(blocks)

	if err := publisher.Stored(chain, blocks); err != nil {
		return err
	}
	if err := waitUntilApplied(connection, publisher, namespace, worker); err != nil {
		return err
	}
	if err := show(connection, namespace, "after the store:", map[string]interface{}{"tokens": tokens}); err != nil {
		return err
	}
	if err := publisher.Removed(chain[3:]); err != nil {
		return err
	}
	if err := waitUntilApplied(connection, publisher, namespace, worker); err != nil {
		return err
	}
	byChain := map[string]interface{}{"sequence_hashes": blob(chain)}
	if err := show(connection, namespace, "after the removal:", byChain); err != nil {
		return err
	}
	if stay {
		interrupted := make(chan os.Signal, 1)
		signal.Notify(interrupted, os.Interrupt, syscall.SIGTERM)
		fmt.Println("staying until interrupted")
		<-interrupted
	}
	return publisher.Goodbye()
}

func main() {
	url := flag.String("url", nats.DefaultURL, "NATS server")
	namespace := flag.String("namespace", "llama", "namespace of the cache")
	worker := flag.String("worker", "gpu-0", "name of the worker")
	address := flag.String("address", "", "where requests for the worker go, as HOST:PORT")
	stay := flag.Bool("stay", false, "go on as the worker until interrupted")
	flag.Parse()
	if err := run(*url, *namespace, *worker, *address, *stay); err != nil {
		log.Fatal(err)
	}
}
