package kvatlas

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
)

// A silentLine dials connections whose writes wait from silence on until the end of the test, as those to a stopped server do.
type silentLine struct {
	isSilent, isHeld atomic.Bool
	over             chan struct{}
	ending           sync.Once
}

func (l *silentLine) Dial(network, address string) (net.Conn, error) {
	connection, err := net.Dial(network, address)
	return &silentConn{connection, l}, err
}

func (l *silentLine) end() { l.ending.Do(func() { close(l.over) }) }

type silentConn struct {
	net.Conn
	line *silentLine
}

func (c *silentConn) Write(payload []byte) (int, error) {
	if c.line.isSilent.Load() {
		c.line.isHeld.Store(true)
		<-c.line.over
	}
	return c.Conn.Write(payload)
}

func TestNothingOutlastsItsContextWhileTheServerIsSilent(t *testing.T) {
	line := &silentLine{over: make(chan struct{})}
	connection, err := nats.Connect(startBroker(t), nats.MaxReconnects(-1), nats.SetCustomDialer(line))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(connection.Close)
	t.Cleanup(line.end)
	client, err := NewClient(connection, ClientOptions{Patience: 50 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	publisher, err := StartPublisher(connection, namespace, worker, PublisherOptions{BatchDelay: -1, HeartbeatInterval: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := publisher.Flush(context.Background()); err != nil {
		t.Fatal(err)
	}
	line.isSilent.Store(true)
	if err := publisher.TryPublish(Stored{Tokens: tokens(1)}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the connection waits for the server", line.isHeld.Load)

	query := Query{SequenceHashes: []uint64{1}}
	calls := map[string]func(context.Context) error{
		"Query":  func(ctx context.Context) error { _, err := client.Query(ctx, namespace, query); return err },
		"Status": func(context.Context) error { _, err := client.Status(context.Background(), namespace); return err },
		"Tell": func(context.Context) error {
			return client.Tell(context.Background(), namespace, Outcome{Worker: worker})
		},
		"Hint": func(ctx context.Context) error {
			return client.Hint(ctx, namespace, Hint{Worker: worker, Prompt: query})
		},
		"Flush":   func(ctx context.Context) error { _, err := publisher.Flush(ctx); return err },
		"Goodbye": publisher.Goodbye,
	}
	for _, name := range []string{"Query", "Status", "Tell", "Hint", "Flush", "Goodbye"} {
		ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
		ended := make(chan error, 1)
		go func(call func(context.Context) error) { ended <- call(ctx) }(calls[name])
		select {
		case err := <-ended:
			if !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, ErrNotSent) {
				t.Errorf("%s: %v", name, err)
			}
		case <-time.After(patience):
			t.Errorf("%s goes on", name)
		}
		cancel()
	}
}

// A lossyLine dials connections of which one loses what is written next, and breaks.
type lossyLine struct{ loses atomic.Bool }

func (l *lossyLine) Dial(network, address string) (net.Conn, error) {
	connection, err := net.Dial(network, address)
	return &lossyConn{connection, l}, err
}

type lossyConn struct {
	net.Conn
	line *lossyLine
}

func (c *lossyConn) Write(payload []byte) (int, error) {
	if c.line.loses.CompareAndSwap(true, false) {
		_ = c.Close()
		return len(payload), nil
	}
	return c.Conn.Write(payload)
}

func TestLossWithALinkIsToldByTheNextFlush(t *testing.T) {
	line := &lossyLine{}
	connection, err := nats.Connect(startBroker(t), nats.MaxReconnects(-1), nats.ReconnectWait(10*time.Millisecond), nats.SetCustomDialer(line))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(connection.Close)
	publisher, err := StartPublisher(connection, namespace, worker, PublisherOptions{BatchDelay: -1, HeartbeatInterval: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	ctx := context.Background()
	lose := func(links uint64) {
		t.Helper()
		if _, err := publisher.Flush(ctx); err != nil {
			t.Fatal(err)
		}
		line.loses.Store(true)
		if err := publisher.Publish(ctx, Stored{Tokens: tokens(1)}); err != nil {
			t.Fatal(err)
		}
		eventually(t, "there is another link", func() bool { return connection.Stats().Reconnects == links && connection.IsConnected() })
	}
	lose(1)
	if _, err := publisher.Flush(ctx); !errors.Is(err, ErrNotSent) {
		t.Errorf("the batch is lost: %v", err)
	}
	line.loses.Store(true)
	if _, err := publisher.Flush(ctx); !errors.Is(err, ErrNotSent) || errors.Is(err, nats.ErrConnectionClosed) {
		t.Errorf("the link was lost, and the connection goes on: %v", err)
	}
	eventually(t, "there is another link", connection.IsConnected)
	lose(3)
	if err := publisher.Goodbye(ctx); err != nil {
		t.Errorf("daemons have the goodbye: %v", err)
	}
}

func TestRequestIsSentAgainOnAnotherLinkAndAfterHalfOfThePatience(t *testing.T) {
	address := startBroker(t)
	line := &lossyLine{}
	connection, err := nats.Connect(address, nats.MaxReconnects(-1), nats.ReconnectWait(10*time.Millisecond), nats.SetCustomDialer(line))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(connection.Close)
	daemon := connect(t, address)
	asked := make(chan *nats.Msg, 8)
	if _, err := daemon.ChanSubscribe("kvatlas.v1.query."+namespace, asked); err != nil {
		t.Fatal(err)
	}
	if err := daemon.Flush(); err != nil {
		t.Fatal(err)
	}
	query := func(patience time.Duration) chan error {
		ended := make(chan error, 1)
		go func() {
			client, err := NewClient(connection, ClientOptions{Patience: patience})
			if err == nil {
				_, err = client.Query(context.Background(), namespace, Query{SequenceHashes: []uint64{1}})
			}
			ended <- err
		}()
		return ended
	}
	line.loses.Store(true)
	ended := query(time.Hour)
	refusal := nats.NewMsg("")
	refusal.Header.Set(errorCodeHeader, "404")
	select {
	case question := <-asked:
		if err := question.RespondMsg(refusal); err != nil {
			t.Fatal(err)
		}
	case <-time.After(patience):
		t.Fatal("the request was lost with its link")
	}
	if err := <-ended; !errors.Is(err, ErrUnknownNamespace) {
		t.Errorf("the answer: %v", err)
	}
	if err := <-query(200 * time.Millisecond); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("nobody answers: %v", err)
	}
	same(t, "the requests that nobody answers", len(asked), 2)
}
