package kvatlas

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
)

// A call waits to be published: changes, or a flush, or both; or a heartbeat that is sent at once.
type call struct {
	changes []change
	size    int
	isBeat  bool
	// flush is told when everything before has left.
	flush *flush
}

// A flush waits for all calls before it. Its caller may give up, and is told nothing then: what has failed is told to the next one.
type flush struct {
	// reached has room for one word.
	reached chan flushed
	// isOver says that the caller has been told, or has given up.
	isOver atomic.Bool
}

func newFlush() *flush { return &flush{reached: make(chan flushed, 1)} }

// tell says whether the caller hears of it.
func (f *flush) tell(word flushed) bool {
	if !f.isOver.CompareAndSwap(false, true) {
		return false
	}
	f.reached <- word
	return true
}

// wait waits for the word. It says whether there is one.
func (f *flush) wait(ctx context.Context) (flushed, bool) {
	select {
	case word := <-f.reached:
		return word, true
	case <-ctx.Done():
		if f.isOver.CompareAndSwap(false, true) {
			return flushed{}, false
		}
		// It is under way.
		return <-f.reached, true
	}
}

// flushed is the last batch at a flush, why one before it was not sent, and the link on which the first since the last flush was handed over.
type flushed struct {
	cursor  Cursor
	failure error
	link    uint64
}

// A queue of calls, bounded in number and bytes.
type queue struct {
	callsMax, bytesMax int
	// filled has a word where the reader may find something new.
	filled chan struct{}

	lock     sync.Mutex
	calls    []call
	bytes    int
	isClosed bool
	// room is closed when something is taken out.
	room chan struct{}
}

func newQueue(callsMax, bytesMax int) *queue {
	return &queue{callsMax: callsMax, bytesMax: bytesMax, filled: make(chan struct{}, 1), room: make(chan struct{})}
}

// tryPut puts a call at the end. Where there is no room, it fails with ErrQueueFull and a channel that is closed when there may be some. Behind
// the last call nothing is taken any more.
func (q *queue) tryPut(next call, isLast bool) (<-chan struct{}, error) {
	q.lock.Lock()
	defer q.lock.Unlock()
	switch {
	case q.isClosed:
		return nil, ErrStopped
	case next.size > q.bytesMax:
		return nil, fmt.Errorf("%w: the events take about %d bytes, and the queue has room for %d; split them", ErrTooLarge, next.size, q.bytesMax)
	case len(q.calls) >= q.callsMax || q.bytes+next.size > q.bytesMax:
		return q.room, fmt.Errorf("%w: %d calls with %d bytes wait; publish less, or raise QueueCallsMax", ErrQueueFull, len(q.calls), q.bytes)
	}
	q.calls, q.bytes, q.isClosed = append(q.calls, next), q.bytes+next.size, isLast
	q.wake()
	return nil, nil
}

// put waits for room.
func (q *queue) put(ctx context.Context, next call, isLast bool) error {
	for {
		room, err := q.tryPut(next, isLast)
		if room == nil {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%v: %w", err, ctx.Err())
		case <-room:
		}
	}
}

// take gives the next call, if there is one, and says whether there will be none any more.
func (q *queue) take() (next call, has, isOver bool) {
	q.lock.Lock()
	defer q.lock.Unlock()
	if len(q.calls) == 0 {
		return call{}, false, q.isClosed
	}
	next, q.calls[0] = q.calls[0], call{}
	q.calls, q.bytes = q.calls[1:], q.bytes-next.size
	close(q.room)
	q.room = make(chan struct{})
	return next, true, false
}

// close takes nothing any more.
func (q *queue) close() {
	q.lock.Lock()
	defer q.lock.Unlock()
	q.isClosed = true
	close(q.room)
	q.room = make(chan struct{})
	q.wake()
}

func (q *queue) wake() {
	select {
	case q.filled <- struct{}{}:
	default:
	}
}
