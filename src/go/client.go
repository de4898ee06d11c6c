package kvatlas

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
)

const (
	// statusInterval is the pause between two looks at a status.
	statusInterval = 10 * time.Millisecond
	// A request that nobody listens to is sent again for this part of the patience, anew on each link: daemons whose server has gone are with
	// another one soon.
	nobodyParts    = 20
	nobodyInterval = 20 * time.Millisecond
	// A request is sent again on so many new links at most, for which it looks this often.
	linksMax     = 5
	linkInterval = 50 * time.Millisecond
	// leeway is how long the connection may take, behind the end of a context, to say what it knows.
	leeway = 20 * time.Millisecond
)

// ClientOptions say how to ask. The zero value is right.
type ClientOptions struct {
	// Prefix is what every subject begins with: "kvatlas" where it is empty.
	Prefix string
	// Patience is how long a request waits whose context has no deadline: 5 s where it is 0.
	Patience time.Duration
}

// A Client asks the daemons of one prefix, or a gateway. Its methods may be called side by side.
type Client struct {
	connection *nats.Conn
	subjects   subjects
	patience   time.Duration
	inboxes    string
	// deaf is the number of the connection's link, from 1, on which the server has removed the subscription to the answers to all requests.
	deaf atomic.Uint64
}

// NewClient makes a client on a connection, which stays the caller's.
func NewClient(connection *nats.Conn, options ClientOptions) (*Client, error) {
	named, err := newSubjects(options.Prefix)
	if err != nil {
		return nil, err
	}
	if options.Patience <= 0 {
		options.Patience = 5 * time.Second
	}
	// The prefix of inboxes is the connection's.
	inbox := connection.NewInbox()
	inboxes := inbox[:strings.LastIndexByte(inbox, '.')+1]
	return &Client{connection: connection, subjects: named, patience: options.Patience, inboxes: inboxes}, nil
}

// Query says which holders hold how long a prefix.
//
// The error is a *RefusedError where a daemon refuses, ErrNoDaemon, ErrNotPermitted, ErrUndecodable or ErrTooLarge, or that of the context.
func (c *Client) Query(ctx context.Context, namespace string, query Query) (*Reply, error) {
	payload, err := encodeQuery(query)
	if err != nil {
		return nil, err
	}
	answer, err := c.request(ctx, "query", namespace, payload)
	if err != nil {
		return nil, err
	}
	return decodeReply(answer)
}

// QueryBatch asks several queries in one request. The results come in the same order; what the daemon refuses of them stands in its place.
func (c *Client) QueryBatch(ctx context.Context, namespace string, queries []Query) ([]Result, error) {
	payload, err := encodeQueries(queries)
	if err != nil {
		return nil, err
	}
	answer, err := c.request(ctx, "query", namespace, payload)
	if err != nil {
		return nil, err
	}
	return decodeResults(answer, len(queries))
}

// Status says how far a daemon has followed a namespace.
func (c *Client) Status(ctx context.Context, namespace string) (*Status, error) {
	answer, err := c.request(ctx, "status", namespace, nil)
	if err != nil {
		return nil, err
	}
	return decodeStatus(answer)
}

// Applied waits until a daemon has applied a publisher's batch and all before it.
func (c *Client) Applied(ctx context.Context, namespace, worker string, rank uint32, cursor Cursor) (HolderStatus, error) {
	ctx, cancel := withPatience(ctx, c.patience)
	defer cancel()
	for {
		status, err := c.Status(ctx, namespace)
		// A namespace comes into being with its first batch, and a daemon that has just started does not know all of them.
		if err != nil && !errors.Is(err, ErrUnknownNamespace) && !errors.Is(err, ErrUnavailable) {
			return HolderStatus{}, err
		}
		if err == nil {
			if holder, is := status.Holder(worker, rank); is && holder.Cursor.Reaches(cursor) {
				return holder, nil
			}
		}
		if err := pause(ctx, statusInterval); err != nil {
			return HolderStatus{}, fmt.Errorf("kvatlas: batch %d of %s/%d was not applied: %w", cursor.Seq, worker, rank, err)
		}
	}
}

func (c *Client) request(ctx context.Context, kind, namespace string, payload []byte) ([]byte, error) {
	subject, err := c.subjects.scoped(kind, namespace)
	if err != nil {
		return nil, err
	}
	ctx, cancel := withPatience(ctx, c.patience)
	defer cancel()
	answer, err := within(ctx, func() (*nats.Msg, error) {
		answer, err := c.askTwice(ctx, subject, payload)
		return answer, c.explained(err, subject, len(payload))
	})
	if err != nil {
		return nil, err
	}
	if code := answer.Header.Get(errorCodeHeader); code != "" {
		// A code that is no number is none of the contract's: 0.
		number, _ := strconv.Atoi(code)
		return nil, &RefusedError{number, answer.Header.Get(errorHeader)}
	}
	return answer.Data, nil
}

// publish publishes a message that nobody answers.
func (c *Client) publish(ctx context.Context, subject string, payload []byte) error {
	ctx, cancel := withPatience(ctx, c.patience)
	defer cancel()
	_, err := within(ctx, func() (any, error) {
		return nil, c.explained(c.connection.Publish(subject, payload), subject, len(payload))
	})
	return err
}

// askTwice asks, and asks again after half of the patience: what was asked may be lost on the way, as may be its answer.
func (c *Client) askTwice(ctx context.Context, subject string, payload []byte) (*nats.Msg, error) {
	patience := c.patience
	if deadline, has := ctx.Deadline(); has {
		patience = time.Until(deadline)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	answers := make(chan ended[*nats.Msg], 2)
	ask := func() {
		answer, err := c.ask(ctx, subject, payload, patience)
		answers <- ended[*nats.Msg]{answer, err}
	}
	go ask()
	half := time.NewTimer(patience / 2)
	defer half.Stop()
	select {
	case found := <-answers:
		return found.value, found.err
	case <-half.C:
	}
	go ask()
	found := <-answers
	return found.value, found.err
}

// ask asks, on each new link again, and again for a moment where nobody listens.
func (c *Client) ask(ctx context.Context, subject string, payload []byte, patience time.Duration) (*nats.Msg, error) {
	before := c.connection.LastError()
	var nobody nobodyPeriod
	for {
		answer, err := c.sendOnEachLink(ctx, subject, payload)
		if last := c.connection.LastError(); err != nil && last != before && isRefusal(last, "Publish", subject) {
			return nil, fmt.Errorf("%w: %v", ErrNotPermitted, last)
		}
		if !errors.Is(err, nats.ErrNoResponders) || !nobody.lasts(c.connection.Stats().Reconnects+1, time.Now(), patience) {
			return answer, err
		}
		if pause(ctx, nobodyInterval) != nil {
			return nil, err
		}
	}
}

// A nobodyPeriod is the time in which one request is sent again because nobody listens.
type nobodyPeriod struct {
	// link is the number of the link, from 1, on which it began.
	link  uint64
	begun time.Time
}

// lasts says whether the period goes on when the server has said on a link that nobody listens. The first such word on a link begins it.
func (n *nobodyPeriod) lasts(link uint64, now time.Time, patience time.Duration) bool {
	if link != n.link {
		n.link, n.begun = link, now
	}
	return now.Sub(n.begun) < patience/nobodyParts
}

// sendOnEachLink sends a request, and again on each new link, a few times at most: the request may be what ends each of them. A link that is lost
// takes requests and answers with it.
func (c *Client) sendOnEachLink(ctx context.Context, subject string, payload []byte) (*nats.Msg, error) {
	for links := 0; ; links++ {
		link := c.connection.Stats().Reconnects
		sending, cancel := context.WithCancel(ctx)
		if links < linksMax {
			go func() {
				for pause(sending, linkInterval) == nil {
					if c.connection.Stats().Reconnects != link {
						cancel()
					}
				}
			}()
		}
		answer, err := c.send(sending, subject, payload)
		isAnother := err != nil && sending.Err() != nil && ctx.Err() == nil
		cancel()
		if !isAnother {
			return answer, err
		}
	}
}

// send sends a request once. nats.go has one subscription to the answers to all requests, and makes it again on a new link only: where the server
// has removed it, each request has a subscription of its own until then.
func (c *Client) send(ctx context.Context, subject string, payload []byte) (*nats.Msg, error) {
	link := c.connection.Stats().Reconnects + 1
	if isRefusal(c.connection.LastError(), "Subscription", c.inboxes) {
		c.deaf.Store(link)
	}
	if c.deaf.Load() == link {
		return c.sendAlone(ctx, subject, payload)
	}
	answer, err := c.connection.RequestWithContext(ctx, subject, payload)
	// Only the last error of a connection is known: that refusal may have been one before it.
	if err != nil && ctx.Err() != nil && isAnyRefusal(c.connection.LastError()) {
		c.deaf.Store(link)
	}
	return answer, err
}

// sendAlone sends a request whose answer has a subscription of its own.
func (c *Client) sendAlone(ctx context.Context, subject string, payload []byte) (*nats.Msg, error) {
	inbox := c.connection.NewInbox()
	answers, err := c.connection.SubscribeSync(inbox)
	if err != nil {
		return nil, err
	}
	defer func() { _ = answers.Unsubscribe() }()
	if err := c.connection.PublishRequest(subject, inbox, payload); err != nil {
		return nil, err
	}
	answer, err := answers.NextMsgWithContext(ctx)
	if last := c.connection.LastError(); err != nil && isRefusal(last, "Subscription", inbox) {
		return nil, fmt.Errorf("%w: %v", ErrNotPermitted, last)
	}
	if err == nil && len(answer.Data) == 0 && answer.Header.Get("Status") == "503" {
		return nil, nats.ErrNoResponders
	}
	return answer, err
}

// explained is what an error of the connection means for a message.
func (c *Client) explained(err error, subject string, size int) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, ErrNotPermitted):
		return fmt.Errorf("%w; give the user the right to it", err)
	case errors.Is(err, nats.ErrNoResponders):
		return fmt.Errorf("%w on %s; start one, or a gateway if there are only shards; or check the prefix", ErrNoDaemon, subject)
	case errors.Is(err, nats.ErrMaxPayload):
		return fmt.Errorf("%w: the message to %s has %d bytes, and the NATS server takes at most %d; split it, or raise max_payload",
			ErrTooLarge, subject, size, c.connection.MaxPayload())
	default:
		return fmt.Errorf("kvatlas: %s: %w", subject, err)
	}
}

// isRefusal says whether an error of a connection is the server's refusal of a message (Publish) or a subscription (Subscription) to a subject,
// which is all of it or, with a dot at its end, its beginning. Versions of the server and of its client differ in upper and lower case.
func isRefusal(err error, of, subject string) bool {
	refused := fmt.Sprintf("permissions violation for %s to \"%s", of, subject)
	if !strings.HasSuffix(subject, ".") {
		refused += "\""
	}
	return err != nil && strings.Contains(strings.ToLower(err.Error()), strings.ToLower(refused))
}

// within does something on a connection, and ends with the context, whatever the connection does: it holds its lock while a silent server
// takes nothing. What is late goes on in the background.
func within[T any](ctx context.Context, do func() (T, error)) (T, error) {
	done := make(chan ended[T], 1)
	go func() {
		value, err := do()
		done <- ended[T]{value, err}
	}()
	select {
	case found := <-done:
		return found.value, found.err
	case <-ctx.Done():
	}
	timer := time.NewTimer(leeway)
	defer timer.Stop()
	select {
	case found := <-done:
		return found.value, found.err
	case <-timer.C:
		var none T
		return none, fmt.Errorf("kvatlas: NATS takes nothing: %w", ctx.Err())
	}
}

// ended is what within has to wait for. Go 1.19 takes no type inside of a function with type parameters.
type ended[T any] struct {
	value T
	err   error
}

// withPatience gives a context without a deadline one.
func withPatience(ctx context.Context, patience time.Duration) (context.Context, context.CancelFunc) {
	if _, has := ctx.Deadline(); has {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, patience)
}

// pause waits, unless the context ends before.
func pause(ctx context.Context, length time.Duration) error {
	timer := time.NewTimer(length)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}
