package kvatlas

import (
	"errors"
	"fmt"
)

// The errors of this package, for errors.Is. A request that runs out of time fails with context.DeadlineExceeded.
var (
	// ErrInvalid says that a name, an event, a query or an option is none that the contract allows.
	ErrInvalid = errors.New("kvatlas: not allowed")
	// ErrNoDaemon says that nobody listens where the request went: start a daemon, or a gateway if there are only shards; or check the
	// prefix.
	ErrNoDaemon = errors.New("kvatlas: no daemon listens")
	// ErrNotPermitted says that the NATS server refuses the message. It is known when the request has run out of time.
	ErrNotPermitted = errors.New("kvatlas: not permitted")
	// ErrUndecodable says that an answer is none of this contract.
	ErrUndecodable = errors.New("kvatlas: the answer cannot be decoded")
	// ErrTooLarge says that a message or a call is larger than the NATS server or the queue takes. Nothing was sent.
	ErrTooLarge = errors.New("kvatlas: too large")
	// ErrQueueFull says that calls come faster than NATS takes them, or that the connection is down.
	ErrQueueFull = errors.New("kvatlas: the queue is full")
	// ErrNotSent says that a batch could not be sent. Daemons notice the gap, and ask for what is missing.
	ErrNotSent = errors.New("kvatlas: a batch was not sent")
	// ErrStopped says that the publisher has said goodbye or was closed.
	ErrStopped = errors.New("kvatlas: the publisher has stopped")

	// ErrUnknownNamespace is the refusal 404: no worker of the namespace has been heard of, and no configuration names it.
	ErrUnknownNamespace = errors.New("kvatlas: unknown namespace")
	// ErrUnavailable is the refusal 503: the daemon or gateway cannot answer just now; ask again.
	ErrUnavailable = errors.New("kvatlas: unavailable")
)

// A RefusedError is a daemon's error: its number in the contract, and a text that says what to change.
type RefusedError struct {
	Code int
	Text string
}

func (r *RefusedError) Error() string {
	return fmt.Sprintf("kvatlas: refused: %s (error %d)", r.Text, r.Code)
}

// Is makes errors.Is(err, ErrUnknownNamespace) and errors.Is(err, ErrUnavailable) hold for their numbers.
func (r *RefusedError) Is(target error) bool {
	switch target {
	case ErrUnknownNamespace:
		return r.Code == 404
	case ErrUnavailable:
		return r.Code == 503
	default:
		return false
	}
}

// unsent is ErrNotSent with its cause.
type unsent struct {
	what  string
	cause error
}

func (u *unsent) Error() string { return fmt.Sprintf("%v: %s%v", ErrNotSent, u.what, u.cause) }

// Is makes errors.Is(err, ErrNotSent) hold.
func (u *unsent) Is(target error) bool { return target == ErrNotSent }

func (u *unsent) Unwrap() error { return u.cause }
