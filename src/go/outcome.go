package kvatlas

import (
	"context"
	"fmt"
)

// outcomesMax is the most outcomes in one report.
const outcomesMax = 256

// An Outcome is what an answer promised of a holder, and what the request found there.
type Outcome struct {
	// Worker and Rank are where the request went.
	Worker string `msgpack:"worker"`
	Rank   uint32 `msgpack:"rank"`
	// PromisedBlocks is UsableBlocks of the answer.
	PromisedBlocks uint64 `msgpack:"promised_blocks"`
	// FoundTokens is how many tokens of the prompt the engine found in its cache: usage.prompt_tokens_details.cached_tokens.
	FoundTokens uint64 `msgpack:"found_tokens"`
	// PromptTokens is how many tokens the prompt has, where that is known: an engine always computes the last one.
	PromptTokens uint64 `msgpack:"prompt_tokens,omitempty"`
	// Exact says whether the answer called the holder exact.
	Exact bool `msgpack:"exact"`
}

// OutcomeOf is the outcome of a request that went to a holder of an answer. promptTokens may be 0.
func OutcomeOf(holder HolderMatch, foundTokens, promptTokens uint64) Outcome {
	return Outcome{holder.Worker, holder.Rank, holder.UsableBlocks, foundTokens, promptTokens, holder.Exact}
}

// Tell tells what requests found of what answers promised, so that daemons can compare. Nobody replies.
func (c *Client) Tell(ctx context.Context, namespace string, outcomes ...Outcome) error {
	subject, err := c.subjects.scoped("outcome", namespace)
	if err != nil {
		return err
	}
	for _, outcome := range outcomes {
		if err := checkName("worker", outcome.Worker); err != nil {
			return err
		}
	}
	for len(outcomes) > 0 {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("kvatlas: %w", err)
		}
		count := atMost(len(outcomes), outcomesMax)
		payload, err := encode(fields{"v": protocolVersion, "outcomes": outcomes[:count]})
		if err != nil {
			return err
		}
		if err := c.publish(ctx, subject, payload); err != nil {
			return err
		}
		outcomes = outcomes[count:]
	}
	return nil
}

func atMost(count, most int) int {
	if count > most {
		return most
	}
	return count
}
