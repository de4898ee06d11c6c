// Package kvatlas asks kvatlas who holds the beginning of a prompt in its KV cache, and tells it what a worker holds.
//
// A router uses a Client:
//
//	client, err := kvatlas.NewClient(connection, kvatlas.ClientOptions{})
//	reply, err := client.Query(ctx, "llama", kvatlas.Query{Tokens: tokens})
//	for _, holder := range reply.Holders {
//		fmt.Println(holder.Worker, "can reuse", holder.UsableBlocks, "of", reply.QueryBlocks, "blocks; exact:", holder.Exact)
//	}
//
// A worker, or what stands beside it, uses a Publisher:
//
//	publisher, err := kvatlas.StartPublisher(connection, "llama", "gpu-0", kvatlas.PublisherOptions{})
//	err = publisher.Publish(ctx, kvatlas.Stored{Tokens: tokens})
//	err = publisher.Goodbye(ctx)
//
// The contract is in deploy/wire-contract.md of the repository, and deploy/clients.md compares the clients of all languages.
package kvatlas
