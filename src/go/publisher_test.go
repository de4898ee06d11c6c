package kvatlas

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"
)

// alone is a publisher without a daemon that sends through a function, and says nothing by itself.
func alone(t *testing.T, options PublisherOptions, publish func(string, []byte) error) *Publisher {
	t.Helper()
	options.HeartbeatInterval = time.Hour
	started, err := startPublisher(connect(t, startBroker(t)), namespace, worker, options, publish)
	if err != nil {
		t.Fatal(err)
	}
	return started
}

func TestFailureIsToldToTheNextFlushWhereACallerHasGivenUp(t *testing.T) {
	held, goes := make(chan struct{}), make(chan struct{})
	publisher := alone(t, PublisherOptions{BatchDelay: -1}, func(string, []byte) error {
		close(held)
		<-goes
		return errors.New("lost")
	})
	if err := publisher.Publish(context.Background(), Stored{Tokens: tokens(1)}); err != nil {
		t.Fatal(err)
	}
	<-held
	ctx, giveUp := context.WithCancel(context.Background())
	giveUp()
	if _, err := publisher.Flush(ctx); !errors.Is(err, context.Canceled) || errors.Is(err, ErrNotSent) {
		t.Errorf("the caller that gives up: %v", err)
	}
	close(goes)
	if _, err := publisher.Flush(context.Background()); !errors.Is(err, ErrNotSent) {
		t.Errorf("the next one: %v", err)
	}
	if _, err := publisher.Flush(context.Background()); err != nil {
		t.Errorf("the one behind it: %v", err)
	}
}

func TestEventsWithoutATierTakeThatOfOthers(t *testing.T) {
	var sent []string
	publisher := alone(t, PublisherOptions{BatchDelay: time.Hour}, func(_ string, payload []byte) error {
		var found struct {
			Tier   Tier     `msgpack:"tier"`
			Events []fields `msgpack:"events"`
		}
		err := decode(payload, &found)
		sent = append(sent, fmt.Sprintf("%d:%d", found.Tier, len(found.Events)))
		return err
	})
	for _, events := range [][]Event{
		{Cleared{}, Stored{Tier: Host, Tokens: tokens(1)}, Cleared{}},
		{Stored{Tier: Disk, Tokens: tokens(1)}},
		// It is not divided among the open batch and another one.
		{Cleared{}, Stored{Tier: Host, Tokens: tokens(1)}},
		{Cleared{}},
		{Stored{Tokens: tokens(1)}},
	} {
		if err := publisher.Publish(context.Background(), events...); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := publisher.Flush(context.Background()); err != nil {
		t.Fatal(err)
	}
	same(t, "tiers and events", sent, "[1:3 2:1 1:3 0:1]")
}

func TestLogMayAskThePublisher(t *testing.T) {
	var publisher *Publisher
	logged := make(chan Cursor, 1)
	publisher = alone(t, PublisherOptions{Log: func(string) { logged <- publisher.Cursor() }}, func(string, []byte) error { return nil })
	known := unixMicro(time.Now().Add(time.Hour))
	question, err := encode(fields{"v": protocolVersion, "rank": 0, "epoch": known, "seq": 5, "full": false})
	if err != nil {
		t.Fatal(err)
	}
	answered := make(chan error, 1)
	go func() {
		_, err := publisher.answerTo(question)
		answered <- err
	}()
	select {
	case err := <-answered:
		same(t, "the answer and the epoch", fmt.Sprint(err, (<-logged).Epoch), fmt.Sprint("<nil> ", known+1))
	case <-time.After(patience):
		t.Fatal("the publisher waits for itself")
	}
}

func TestRisenEpochIsToldAtOnce(t *testing.T) {
	sent := make(chan fields, 1)
	publisher := alone(t, PublisherOptions{}, func(_ string, payload []byte) error {
		var found fields
		err := decode(payload, &found)
		sent <- found
		return err
	})
	known := unixMicro(time.Now().Add(time.Hour))
	question, err := encode(fields{"v": protocolVersion, "rank": 0, "epoch": known, "seq": 5, "full": false})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := publisher.answerTo(question); err != nil {
		t.Fatal(err)
	}
	select {
	case found := <-sent:
		same(t, "the heartbeat", fmt.Sprint(found["epoch"], found["seq"]), fmt.Sprint(known+1, 2))
	case <-time.After(patience):
		t.Fatal("other daemons are told nothing")
	}
}

func TestFailuresAreLoggedMoreAndMoreRarely(t *testing.T) {
	lines := 0
	publisher := alone(t, PublisherOptions{BatchDelay: -1, Log: func(string) { lines++ }}, func(string, []byte) error {
		return errors.New("lost")
	})
	for range make([]struct{}, 9) {
		if err := publisher.Publish(context.Background(), Stored{Tokens: tokens(1)}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := publisher.Flush(context.Background()); !errors.Is(err, ErrNotSent) {
		t.Error(err)
	}
	same(t, "failures and lines", fmt.Sprint(publisher.Counters().BatchesFailed, lines), "9 4")
}
