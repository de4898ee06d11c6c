// A publisher and a router in Go: says what a worker holds, and asks who holds a prompt.
//
// Start a daemon with `kvatlas serve`, then this. With -stay it goes on as the worker until it is interrupted, and then says
// goodbye. The client is the module in src/go; see deploy/clients.md for how to build this.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"os/signal"
	"syscall"
	"time"

	"github.com/kvatlas/kvatlas/src/go"
	"github.com/nats-io/nats.go"
)

// show asks who holds the beginning of a prompt, and prints the answer.
func show(ctx context.Context, client *kvatlas.Client, namespace, title string, query kvatlas.Query) error {
	reply, err := client.Query(ctx, namespace, query)
	if err != nil {
		return err
	}
	fmt.Println(title)
	usable := map[string]int{}
	for _, holder := range reply.Holders {
		// Of a worker with several ranks, the best: answers begin with it.
		if _, known := usable[holder.Worker]; !known {
			usable[holder.Worker] = int(holder.UsableBlocks)
		}
		fmt.Printf("  %s holds %d of %d blocks, %d of them usable, exact: %t %v\n",
			holder.Worker, holder.MatchedBlocks, reply.QueryBlocks, holder.UsableBlocks, holder.Exact, holder.Degraded)
		if holder.Address != "" {
			fmt.Printf("    at %s %v\n", holder.Address, holder.Labels)
		}
	}
	// A router counts here what it has sent to each, until that is answered.
	underWay := map[string]int{}
	engine, toCompute := choose([]string{"gpu-0", "gpu-1"}, query.Tokens, int(reply.QueryBlocks), usable, underWay)
	fmt.Printf("  a request goes to %s, which has to compute %d blocks\n", engine, toCompute)
	return nil
}

// tell publishes one event, and waits until the daemon has applied it: NATS takes batches without an answer.
func tell(ctx context.Context, client *kvatlas.Client, publisher *kvatlas.Publisher, namespace, worker string, event kvatlas.Event) error {
	if err := publisher.Publish(ctx, event); err != nil {
		return err
	}
	cursor, err := publisher.Flush(ctx)
	if err != nil {
		return err
	}
	_, err = client.Applied(ctx, namespace, worker, 0, cursor)
	return err
}

// work is what a worker and a router do.
func work(ctx context.Context, client *kvatlas.Client, publisher *kvatlas.Publisher, namespace, worker string) error {
	tokens := make([]uint32, 4*kvatlas.DefaultBlockSize)
	for index := range tokens {
		tokens[index] = uint32(index + 1)
	}
	if err := tell(ctx, client, publisher, namespace, worker, kvatlas.Stored{Tokens: tokens}); err != nil {
		return err
	}
	if err := show(ctx, client, namespace, "after the store:", kvatlas.Query{Tokens: tokens}); err != nil {
		return err
	}
	chain := kvatlas.SequenceHashes(kvatlas.BlockHashes(tokens, kvatlas.DefaultBlockSize, kvatlas.CacheSeed("", "")))
	if err := tell(ctx, client, publisher, namespace, worker, kvatlas.Removed{SequenceHashes: chain[3:]}); err != nil {
		return err
	}
	return show(ctx, client, namespace, "after the removal:", kvatlas.Query{Tokens: tokens})
}

func run(url, namespace, worker, address string, stay bool) error {
	interrupted, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	// A roll call waits for 1.5 s, so the pause before a new connection is shorter. While a silent server takes nothing, the
	// connection is blocked for at most two seconds: without FlusherTimeout for a minute. Without IgnoreAuthErrorAbort, it is closed
	// for good where the server has a wrong password for a while.
	connection, err := nats.Connect(url, nats.MaxReconnects(-1),
		nats.ReconnectWait(500*time.Millisecond), nats.FlusherTimeout(2*time.Second), nats.IgnoreAuthErrorAbort())
	if err != nil {
		return err
	}
	defer connection.Close()
	client, err := kvatlas.NewClient(connection, kvatlas.ClientOptions{})
	if err != nil {
		return err
	}
	publisher, err := kvatlas.StartPublisher(connection, namespace, worker, kvatlas.PublisherOptions{
		Address: address, Log: func(line string) { log.Print(line) },
	})
	if err != nil {
		return err
	}
	if err := work(interrupted, client, publisher, namespace, worker); err != nil {
		return err
	}
	if stay {
		fmt.Println("staying until interrupted")
		<-interrupted.Done()
	}
	return publisher.Goodbye(context.Background())
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
