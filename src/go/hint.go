package kvatlas

import (
	"context"
	"fmt"
)

// A Hint is where a request has been sent: its blocks will be there soon.
type Hint struct {
	// Worker and Rank are where the request went.
	Worker string
	Rank   uint32
	// Prompt is the query about the request's prompt, by all of its blocks. Its options say nothing here.
	Prompt Query
}

func encodeHint(hint Hint) ([]byte, error) {
	if err := checkName("worker", hint.Worker); err != nil {
		return nil, err
	}
	prompt, err := hint.Prompt.prompt()
	if err != nil {
		return nil, err
	}
	entry := fields{"worker": hint.Worker, "rank": hint.Rank, "prompt": prompt}
	return encode(fields{"v": protocolVersion, "hints": []fields{entry}})
}

// Hint tells where requests are sent, before events tell of their blocks; for daemons with hints.ttl_ms. Nobody replies.
func (c *Client) Hint(ctx context.Context, namespace string, hints ...Hint) error {
	subject, err := c.subjects.scoped("hint", namespace)
	if err != nil {
		return err
	}
	for _, hint := range hints {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("kvatlas: %w", err)
		}
		// Each may be as long as a query, and so may a message.
		payload, err := encodeHint(hint)
		if err != nil {
			return err
		}
		if err := c.publish(ctx, subject, payload); err != nil {
			return err
		}
	}
	return nil
}
