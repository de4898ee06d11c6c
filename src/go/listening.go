package kvatlas

import (
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

// renewInterval is the pause between two looks at whether the server has removed a subscription.
const renewInterval = time.Second

// A listener is a subscription that is made again until the server takes it. nats.go makes one that the server has removed again on a new
// connection only.
type listener struct {
	connection *nats.Conn
	subject    string
	hear       nats.MsgHandler

	lock    sync.Mutex
	current *nats.Subscription
	isOver  bool
}

// listen subscribes.
func listen(connection *nats.Conn, subject string, hear nats.MsgHandler) (*listener, error) {
	l := &listener{connection: connection, subject: subject, hear: hear}
	return l, l.subscribe()
}

func (l *listener) subscribe() error {
	made, err := l.connection.Subscribe(l.subject, l.hear)
	if err != nil {
		return fmt.Errorf("kvatlas: %w", err)
	}
	l.current = made
	if err := made.SetPendingLimits(questionsMax, questionsBytesMax); err != nil {
		return fmt.Errorf("kvatlas: %w", err)
	}
	return nil
}

// keep makes the subscription again after each refusal behind the error told. Only the last error of a connection is known, and so any refusal
// counts: that of this subscription may be one before it.
func (l *listener) keep(told error, over <-chan struct{}, log func(string)) {
	ticker := time.NewTicker(renewInterval)
	defer ticker.Stop()
	for {
		select {
		case <-over:
			return
		case <-ticker.C:
		}
		last := l.connection.LastError()
		if last == told {
			continue
		}
		told = last
		if !isAnyRefusal(last) {
			continue
		}
		if err := l.renew(); err != nil {
			log(fmt.Sprintf("%s: %v", l.subject, err))
		}
	}
}

func (l *listener) renew() error {
	l.lock.Lock()
	defer l.lock.Unlock()
	if l.isOver {
		return nil
	}
	// The server may have it still: a question that comes twice would be answered twice.
	_ = l.current.Unsubscribe()
	return l.subscribe()
}

// end ends the subscription.
func (l *listener) end() error {
	l.lock.Lock()
	defer l.lock.Unlock()
	l.isOver = true
	return l.current.Unsubscribe()
}

// isAnyRefusal says whether an error of a connection is the server's refusal of a message or a subscription, whatever its subject.
func isAnyRefusal(err error) bool {
	return err != nil && strings.Contains(strings.ToLower(err.Error()), "permissions violation for ")
}
