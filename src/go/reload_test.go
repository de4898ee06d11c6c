package kvatlas

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/vmihailenco/msgpack/v5"
)

// engine is the configuration of a broker with one user.
func engine(password, permissions string) string {
	return fmt.Sprintf("authorization { users: [ { user: e, password: %s, permissions: { %s } } ] }", password, permissions)
}

// connectEngine connects with the options of README.md.
func connectEngine(t *testing.T, b *broker) *nats.Conn {
	t.Helper()
	connection, err := nats.Connect(strings.Replace(b.address, "//", "//e:e@", 1), nats.MaxReconnects(-1),
		nats.ReconnectWait(50*time.Millisecond), nats.FlusherTimeout(2*time.Second), nats.IgnoreAuthErrorAbort())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(connection.Close)
	return connection
}

func startEngine(t *testing.T, connection *nats.Conn) *Publisher {
	t.Helper()
	publisher, err := StartPublisher(connection, namespace, worker, PublisherOptions{BatchDelay: -1, HeartbeatInterval: 50 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ended, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = publisher.Close(ended)
	})
	if _, err := publisher.Flush(context.Background()); err != nil {
		t.Fatal(err)
	}
	return publisher
}

func TestConnectionWithAWrongPasswordForAWhileComesBack(t *testing.T) {
	t.Parallel()
	b := newBroker(t, engine("e", ""))
	connection := connectEngine(t, b)
	publisher := startEngine(t, connection)
	refusals := make(chan error, 100)
	connection.SetErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
		select {
		case refusals <- err:
		default:
		}
	})
	b.reload(engine("wrong", ""))
	// The second in a row closes a connection without IgnoreAuthErrorAbort.
	for range make([]struct{}, 4) {
		select {
		case <-refusals:
		case <-time.After(patience):
			t.Fatal("the password is not refused")
		}
	}
	b.reload(engine("e", ""))
	eventually(t, "the connection is back", connection.IsConnected)
	if err := publisher.Publish(context.Background(), Stored{Tokens: tokens(1)}); err != nil {
		t.Fatal(err)
	}
	if _, err := publisher.Flush(context.Background()); err != nil {
		t.Fatal(err)
	}
}

func TestClosedConnectionIsTold(t *testing.T) {
	t.Parallel()
	connection := connect(t, startBroker(t))
	publisher := startEngine(t, connection)
	connection.Close()
	eventually(t, "a batch has failed", func() bool { return publisher.Counters().BatchesFailed > 0 })
	calls := map[string]func() error{
		"Publish":    func() error { return publisher.Publish(context.Background(), Stored{Tokens: tokens(1)}) },
		"TryPublish": func() error { return publisher.TryPublish(Stored{Tokens: tokens(1)}) },
		"Flush":      func() error { _, err := publisher.Flush(context.Background()); return err },
	}
	for name, call := range calls {
		if err := call(); !errors.Is(err, ErrNotSent) || !errors.Is(err, nats.ErrConnectionClosed) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := publisher.Goodbye(context.Background()); !errors.Is(err, ErrNotSent) {
		t.Errorf("Goodbye: %v", err)
	}
}

func TestQuestionsAreAnsweredAgainWhenTheRightToThemIsBack(t *testing.T) {
	t.Parallel()
	const all = `{ user: all, password: a }`
	with := func(permissions string) string {
		return strings.Replace(engine("e", permissions), " ] }", ", "+all+" ] }", 1)
	}
	b := newBroker(t, with(""))
	startEngine(t, connectEngine(t, b))
	daemon := connect(t, strings.Replace(b.address, "//", "//all:a@", 1))
	question, err := msgpack.Marshal(map[string]any{"v": 1, "rank": 0, "epoch": 0, "seq": 0, "full": true})
	if err != nil {
		t.Fatal(err)
	}
	answered := func() error {
		_, err := daemon.Request("kvatlas.v1.resync."+namespace+"."+worker+".0", question, patience)
		return err
	}
	if err := answered(); err != nil {
		t.Fatal(err)
	}
	for range make([]struct{}, 2) {
		b.reload(with(`subscribe: { deny: ["kvatlas.v1.resync.>"] }`))
		if err := answered(); !errors.Is(err, nats.ErrNoResponders) {
			t.Fatal(err)
		}
		b.reload(with(""))
		eventually(t, "questions are answered", func() bool { return answered() == nil })
	}
}

func TestRequestsAreAnsweredAgainWhenTheRightToInboxesIsBack(t *testing.T) {
	t.Parallel()
	b := newBroker(t, engine("e", ""))
	connection := connectEngine(t, b)
	client, err := NewClient(connection, ClientOptions{Patience: 500 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	answered := func() error { _, err := client.Status(context.Background(), namespace); return err }
	if err := answered(); !errors.Is(err, ErrNoDaemon) {
		t.Fatal(err)
	}
	for range make([]struct{}, 2) {
		b.reload(engine("e", `subscribe: { deny: ["_INBOX.>"] }`))
		eventually(t, "the server refuses", func() bool { return errors.Is(answered(), ErrNotPermitted) })
		b.reload(engine("e", ""))
		if err := answered(); !errors.Is(err, ErrNoDaemon) {
			t.Error(err)
		}
	}
	// Another refusal hides that of the inbox from a client that has not asked before.
	if client, err = NewClient(connection, ClientOptions{Patience: 500 * time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	before := connection.LastError()
	b.reload(engine("e", `subscribe: { deny: ["_INBOX.>"] }, publish: { deny: ["other"] }`))
	if err := connection.Publish("other", nil); err != nil {
		t.Fatal(err)
	}
	eventually(t, "that is refused", func() bool {
		return connection.LastError() != before && isRefusal(connection.LastError(), "Publish", "other")
	})
	b.reload(engine("e", ""))
	eventually(t, "requests are answered", func() bool { return errors.Is(answered(), ErrNoDaemon) })
}

func TestAnswersKeepToWhatTheServerTakesNow(t *testing.T) {
	t.Parallel()
	large, small := newBroker(t), newBroker(t, "max_payload: 4096")
	connection, err := nats.Connect(large.address+","+small.address, nats.DontRandomize(), nats.ReconnectWait(50*time.Millisecond), nats.MaxReconnects(-1))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(connection.Close)
	publisher := startEngine(t, connection)
	before := publisher.Cursor()
	blocks := make([]uint64, 2000)
	for index := range blocks {
		blocks[index] = uint64(index + 1)
	}
	if err := publisher.Publish(context.Background(), Stored{BlockHashes: blocks}); err != nil {
		t.Fatal(err)
	}
	last, err := publisher.Flush(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	large.kill()
	daemon := connect(t, small.address)
	question, err := msgpack.Marshal(map[string]any{"v": 1, "rank": 0, "epoch": last.Epoch, "seq": before.Seq})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "what is missing is given", func() bool {
		answer, err := daemon.Request("kvatlas.v1.resync."+namespace+"."+worker+".0", question, time.Second)
		var chunk struct {
			Kind string `msgpack:"kind"`
		}
		return err == nil && msgpack.Unmarshal(answer.Data, &chunk) == nil && chunk.Kind == "full"
	})
	// What is published is cut.
	if err := publisher.Publish(context.Background(), Stored{BlockHashes: blocks}); err != nil {
		t.Fatal(err)
	}
	if _, err := publisher.Flush(context.Background()); err != nil {
		t.Fatal(err)
	}
}
