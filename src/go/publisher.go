package kvatlas

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
)

const (
	// sendPause is the pause while the connection takes nothing.
	sendPause = 50 * time.Millisecond
	// Questions that wait in the subscription, at most. Daemons ask again.
	questionsMax      = 64
	questionsBytesMax = 1 << 20
	// closePatience is how long a call waits whose context has no deadline.
	closePatience = 10 * time.Second
)

// A Publisher keeps daemons exact about what one holder has, and answers those that miss something. Its methods may be called side by side.
//
// It numbers batches without a gap within an epoch, and keeps a ring of the last batches and a table of all that the holder has. Heartbeats
// show daemons that nothing was lost. An event that the queue has taken is published in order, exactly once, unless the process dies: the
// next incarnation begins a new epoch, and replaces all that the last one said.
//
// A full state is made at once, so that it is of one instant: about a second for a million blocks, in which nothing is published.
type Publisher struct {
	options   PublisherOptions
	subject   string
	publish   func(subject string, payload []byte) error
	nats      *nats.Conn
	questions *listener
	queue     *queue
	answers   chan struct{}
	counters  publisherCounters
	// done is closed when nothing is published any more, and abort when what is queued is to be dropped.
	done, abort chan struct{}
	aborting    sync.Once
	// isCut says that a batch met a closed connection, which takes nothing ever after.
	isCut atomic.Bool

	// lock guards the outbox: a batch is numbered and noted in one step.
	lock   sync.Mutex
	outbox *outbox
	// told is the last error of the connection that a flush has looked at.
	told error
	// link is the number of the connection's link on which the first batch was handed over that no flush has confirmed, or 0.
	link uint64

	// Of the goroutine that publishes.
	open    batcher
	sealed  time.Time
	failure error
}

// PublisherCounters are what a publisher has done since it was started.
type PublisherCounters struct {
	// BatchesSent is without heartbeats. BatchesFailed is what NATS did not take: daemons notice the gap and ask for it.
	BatchesSent, HeartbeatsSent, BatchesFailed uint64
	// CallsDropped is what Close had no time for; QueueRefusals what TryPublish had no room for.
	CallsDropped, QueueRefusals uint64
	// Answers that gave the missing batches, that gave the full state, and that were refused.
	AnswersMissing, AnswersFull, AnswersRefused uint64
}

type publisherCounters struct {
	batchesSent, heartbeatsSent, batchesFailed  atomic.Uint64
	callsDropped, queueRefusals                 atomic.Uint64
	answersMissing, answersFull, answersRefused atomic.Uint64
}

// StartPublisher starts to publish for one holder on a connection, which stays the caller's.
func StartPublisher(connection *nats.Conn, namespace, worker string, options PublisherOptions) (*Publisher, error) {
	return startPublisher(connection, namespace, worker, options, connection.Publish)
}

// startPublisher publishes batches through a function, which a test can fault.
func startPublisher(
	connection *nats.Conn, namespace, worker string, options PublisherOptions, publish func(string, []byte) error,
) (*Publisher, error) {
	named, err := newSubjects(options.Prefix)
	if err != nil {
		return nil, err
	}
	subject, err := named.ofWorker("events", namespace, worker)
	if err != nil {
		return nil, err
	}
	asked, err := named.ofWorker("resync", namespace, worker)
	if err != nil {
		return nil, err
	}
	if options, err = options.completed(connection.MaxPayload()); err != nil {
		return nil, err
	}
	p := &Publisher{
		options: options, subject: subject, publish: publish, nats: connection,
		queue: newQueue(options.QueueCallsMax, options.QueueBytesMax), answers: make(chan struct{}, options.AnswersMax),
		done: make(chan struct{}), abort: make(chan struct{}), outbox: newOutbox(options, time.Now()), told: connection.LastError(),
	}
	p.open = batcher{eventsMax: options.BatchEventsMax, bytesMax: options.BatchBytesMax, seal: p.send}
	told := p.told
	if p.questions, err = listen(connection, fmt.Sprintf("%s.%d", asked, options.Rank), p.answer); err != nil {
		return nil, err
	}
	go p.questions.keep(told, p.done, options.Log)
	go p.run()
	return p, nil
}

// Publish publishes events in order, and waits while the queue is full. The events of a call are one batch, and so one step for those who
// ask, where they are of one tier and fit into one; what is larger is cut. Once a batch has met a closed connection, it fails with ErrNotSent and
// nats.ErrConnectionClosed.
func (p *Publisher) Publish(ctx context.Context, events ...Event) error {
	next, err := p.checked(events)
	if err != nil || len(next.changes) == 0 {
		return err
	}
	return p.queue.put(ctx, next, false)
}

// TryPublish is as Publish, but fails with ErrQueueFull instead of waiting. The engine has to take note of what it could not say.
func (p *Publisher) TryPublish(events ...Event) error {
	next, err := p.checked(events)
	if err != nil || len(next.changes) == 0 {
		return err
	}
	_, err = p.queue.tryPut(next, false)
	if errors.Is(err, ErrQueueFull) {
		p.counters.queueRefusals.Add(1)
	}
	return err
}

// Flush waits until everything has reached the server, and gives the last batch then. It fails with ErrNotSent if a batch could not be sent
// since the last flush, or if the server's last refusal on the connection since then is of a batch or of the subscription to questions. It fails
// so, too, if the connection was lost and made anew since then: what was published before that may not have arrived. Daemons ask for it while
// the publisher goes on.
func (p *Publisher) Flush(ctx context.Context) (Cursor, error) {
	ctx, cancel := withPatience(ctx, closePatience)
	defer cancel()
	next := call{flush: newFlush()}
	if err := p.queue.put(ctx, next, false); err != nil {
		return Cursor{}, err
	}
	return p.confirmed(ctx, next.flush)
}

// Goodbye publishes what is queued and a goodbye, so that daemons forget the holder at once, and ends. It fails as Flush does; a connection that
// was lost before the goodbye makes no difference.
func (p *Publisher) Goodbye(ctx context.Context) error {
	ctx, cancel := withPatience(ctx, closePatience)
	defer cancel()
	last := call{changes: []change{{kind: kindGoodbye}}, size: eventBytes, flush: newFlush()}
	err := p.queue.put(ctx, last, true)
	if err == nil {
		_, err = p.confirmed(ctx, last.flush)
	}
	if closed := p.Close(ctx); err == nil {
		err = closed
	}
	return err
}

// Close publishes what is queued, and ends in silence, as if the engine had died: daemons keep the blocks until the holder counts as gone.
// What NATS has not taken when the context ends, or after 10 s, is dropped.
func (p *Publisher) Close(ctx context.Context) error {
	ctx, cancel := withPatience(ctx, closePatience)
	defer cancel()
	p.queue.close()
	var late error
	select {
	case <-p.done:
	case <-ctx.Done():
		late = fmt.Errorf("%w: closed before the queue was empty: %v", ErrNotSent, ctx.Err())
		p.aborting.Do(func() { close(p.abort) })
	}
	_, err := within(ctx, func() (any, error) {
		<-p.done
		return nil, p.questions.end()
	})
	if late == nil && err != nil && !errors.Is(err, nats.ErrBadSubscription) && !errors.Is(err, nats.ErrConnectionClosed) {
		return fmt.Errorf("kvatlas: %w", err)
	}
	return late
}

// Cursor is the last batch that was numbered.
func (p *Publisher) Cursor() Cursor {
	p.lock.Lock()
	defer p.lock.Unlock()
	return p.outbox.cursor
}

// Counters are what was done so far.
func (p *Publisher) Counters() PublisherCounters {
	c := &p.counters
	return PublisherCounters{
		c.batchesSent.Load(), c.heartbeatsSent.Load(), c.batchesFailed.Load(), c.callsDropped.Load(), c.queueRefusals.Load(),
		c.answersMissing.Load(), c.answersFull.Load(), c.answersRefused.Load(),
	}
}

// checked makes a call of events. Those without a block say nothing, and are left out.
func (p *Publisher) checked(events []Event) (call, error) {
	if p.isCut.Load() {
		return call{}, &unsent{"connect anew, and start another publisher: ", nats.ErrConnectionClosed}
	}
	var next call
	for _, event := range events {
		if event == nil {
			return call{}, fmt.Errorf("%w: an event is nil", ErrInvalid)
		}
		made, err := event.change(p.options.BlockSize)
		if err != nil {
			return call{}, err
		}
		if made.kind == kindStored && p.options.Recompute && made.blocks == nil {
			return call{}, fmt.Errorf("%w: with Recompute, Stored needs Tokens or BlockHashes", ErrInvalid)
		}
		if made.hasTier() && len(made.hashes) == 0 {
			continue
		}
		next.changes, next.size = append(next.changes, made), next.size+made.size()
	}
	return next, nil
}

// confirmed waits until a flush has been reached, and the server has all before it.
func (p *Publisher) confirmed(ctx context.Context, reached *flush) (Cursor, error) {
	found, is := reached.wait(ctx)
	if !is {
		return Cursor{}, fmt.Errorf("kvatlas: what is queued has not left: %w", ctx.Err())
	}
	if found.failure != nil {
		return found.cursor, found.failure
	}
	refusal, err := within(ctx, func() (error, error) {
		if err := p.nats.FlushWithContext(ctx); errors.Is(err, nats.ErrConnectionClosed) && !p.nats.IsClosed() {
			// nats.go says so of a flush during which the link is lost.
			return nil, errors.New("the connection was lost before the server had taken everything")
		} else if err != nil {
			return nil, err
		}
		if refusal := p.refused(); refusal != nil {
			return refusal, nil
		}
		if found.link != 0 && found.link != p.nats.Stats().Reconnects+1 {
			return fmt.Errorf("%w: the connection was lost after events were handed to it; they may not have arrived", ErrNotSent), nil
		}
		return nil, nil
	})
	if err != nil {
		p.keepLink(found.link)
		return found.cursor, &unsent{"", err}
	}
	return found.cursor, refusal
}

// noteLink notes the link that a batch goes over. Without one, nats.go keeps the batch for the next link.
func (p *Publisher) noteLink() {
	// The connection may hold its own lock for long.
	isConnected, link := p.nats.IsConnected(), p.nats.Stats().Reconnects+1
	p.lock.Lock()
	defer p.lock.Unlock()
	if p.link == 0 && isConnected {
		p.link = link
	}
}

// keepLink keeps for the next flush what this one does not tell.
func (p *Publisher) keepLink(link uint64) {
	p.lock.Lock()
	defer p.lock.Unlock()
	if link != 0 {
		p.link = link
	}
}

// takeLink forgets the link of what was handed over, and gives it.
func (p *Publisher) takeLink() uint64 {
	p.lock.Lock()
	defer p.lock.Unlock()
	link := p.link
	p.link = 0
	return link
}

// refused is why the server refuses this publisher, once. The server says so before it confirms a flush.
func (p *Publisher) refused() error {
	// The connection may hold its own lock for long.
	last := p.nats.LastError()
	p.lock.Lock()
	defer p.lock.Unlock()
	isNew := last != p.told
	p.told = last
	if isNew && (isRefusal(last, "Publish", p.subject) || isRefusal(last, "Subscription", p.questions.subject)) {
		return fmt.Errorf("%w: %v; give the user the right to it", ErrNotSent, last)
	}
	return nil
}

// run is the only one who sends batches.
func (p *Publisher) run() {
	defer close(p.done)
	p.sealed = time.Now()
	for !p.isAborted() {
		next, has, isOver := p.queue.take()
		switch {
		case has:
			p.obey(next)
		case isOver:
			p.open.flush()
			return
		default:
			p.wait()
		}
	}
	p.drop()
}

// wait waits for a call, and sends what falls due meanwhile.
func (p *Publisher) wait() {
	due := p.sealed.Add(p.options.HeartbeatInterval)
	if len(p.open.changes) > 0 {
		// After a pause, that is at once.
		due = p.sealed.Add(p.options.BatchDelay)
	}
	timer := time.NewTimer(time.Until(due))
	defer timer.Stop()
	select {
	case <-p.queue.filled:
	case <-p.abort:
	case <-timer.C:
		switch {
		case len(p.open.changes) > 0:
			p.open.flush()
		case p.isCut.Load():
			p.sealed = time.Now()
		default:
			p.send(Device, nil)
		}
	}
}

func (p *Publisher) obey(next call) {
	// After a reconnect, the server may take smaller messages.
	p.open.bytesMax = atMost(p.options.BatchBytesMax, payloadRoom(p.nats.MaxPayload()))
	isFull := p.open.size+next.size > p.open.bytesMax || len(p.open.changes)+len(next.changes) > p.open.eventsMax
	for index := range next.changes {
		isFull = isFull || p.open.isOther(&next.changes[index])
	}
	if len(p.open.changes) > 0 && isFull {
		// A call that fits into one batch is not divided among two.
		p.open.flush()
	}
	if len(next.changes) == 1 && next.changes[0].kind == kindGoodbye {
		// Daemons that have the goodbye need nothing of before.
		p.takeLink()
	}
	for _, made := range next.changes {
		p.open.add(made)
	}
	if p.options.BatchDelay < 0 || next.flush != nil {
		p.open.flush()
	}
	if next.isBeat {
		p.send(Device, nil)
	}
	if next.flush != nil {
		p.report(next.flush)
	}
}

// report tells a flush what it waits for, once.
func (p *Publisher) report(waiting *flush) {
	found := flushed{p.Cursor(), p.failure, p.takeLink()}
	if waiting.tell(found) {
		p.failure = nil
		return
	}
	p.keepLink(found.link)
}

// drop answers those who wait, and counts what is not published.
func (p *Publisher) drop() {
	for {
		next, has, _ := p.queue.take()
		if !has {
			return
		}
		p.counters.callsDropped.Add(1)
		if next.flush != nil {
			next.flush.tell(flushed{p.Cursor(), ErrStopped, 0})
		}
	}
}

// send numbers a batch and hands it to NATS.
func (p *Publisher) send(tier Tier, changes []change) {
	now := time.Now()
	p.lock.Lock()
	payload, cursor, err := p.outbox.number(tier, changes, now)
	p.lock.Unlock()
	if err == nil && len(changes) > 0 {
		// A heartbeat that is lost is of no account.
		p.noteLink()
	}
	if err == nil {
		err = p.handOver(payload)
		p.isCut.Store(errors.Is(err, nats.ErrConnectionClosed))
	}
	p.sealed = now
	switch {
	case err != nil:
		failed := p.counters.batchesFailed.Add(1)
		p.failure = &unsent{fmt.Sprintf("batch %d: ", cursor.Seq), err}
		if failed&(failed-1) == 0 {
			// Each may fail from now on: the log must not fill up.
			p.options.Log(fmt.Sprintf("%s: %v (%d so far)", p.subject, p.failure, failed))
		}
	case len(changes) == 0:
		p.counters.heartbeatsSent.Add(1)
	default:
		p.counters.batchesSent.Add(1)
	}
}

// handOver waits while the connection is down and its buffer full, so that the queue fills and pushes back.
func (p *Publisher) handOver(payload []byte) error {
	for {
		err := p.publish(p.subject, payload)
		if !errors.Is(err, nats.ErrReconnectBufExceeded) {
			return err
		}
		select {
		case <-p.abort:
			return err
		case <-time.After(sendPause):
		}
	}
}

func (p *Publisher) isAborted() bool {
	select {
	case <-p.abort:
		return true
	default:
		return false
	}
}

// answer answers a daemon's question. The chunks are made at once, so that they are one state; they are sent beside what is published next.
func (p *Publisher) answer(question *nats.Msg) {
	if question.Reply == "" {
		return
	}
	select {
	case p.answers <- struct{}{}:
	default:
		p.refuse(question, &RefusedError{503, "this publisher answers others; ask again"})
		return
	}
	made, err := p.answerTo(question.Data)
	if err != nil {
		<-p.answers
		p.refuse(question, err)
		return
	}
	if made.isFull {
		p.counters.answersFull.Add(1)
	} else {
		p.counters.answersMissing.Add(1)
	}
	go func() {
		defer func() { <-p.answers }()
		for _, chunk := range made.chunks {
			// Where an answer is cut short, the daemon asks again.
			if err := question.Respond(chunk); err != nil {
				p.options.Log(fmt.Sprintf("%s: an answer was cut short: %v", p.subject, err))
				return
			}
		}
	}()
}

func (p *Publisher) answerTo(payload []byte) (answer, error) {
	// The connection may hold its own lock for long.
	room := payloadRoom(p.nats.MaxPayload())
	made, said, err := p.answerFrom(payload, room)
	if said != "" {
		// The caller's function may ask the publisher for something.
		p.options.Log(p.subject + ": " + said)
	}
	return made, err
}

// answerFrom makes an answer in which parts of it have so many bytes, and says what the log is to tell of the question's epoch, if anything.
func (p *Publisher) answerFrom(payload []byte, room int) (made answer, said string, err error) {
	p.lock.Lock()
	defer p.lock.Unlock()
	request, err := p.outbox.decodeRequest(payload)
	if err != nil {
		return made, said, err
	}
	known, now := *request.Epoch, time.Now()
	if p.outbox.riseAbove(known, now) {
		said = fmt.Sprintf("a daemon knew epoch %d, so epoch %d begins", known, p.outbox.cursor.Epoch)
		// The other daemons learn of it at once. Where the queue has no room, batches come anyway.
		_, _ = p.queue.tryPut(call{isBeat: true}, false)
	} else if known > p.outbox.cursor.Epoch && isFarAhead(known, now) && now.Sub(p.outbox.warned) >= warningInterval {
		p.outbox.warned = now
		said = fmt.Sprintf("epoch %d is more than a day ahead of this clock, and not believed", known)
	}
	p.outbox.room = room
	made, err = p.outbox.answer(request)
	return made, said, err
}

func (p *Publisher) refuse(question *nats.Msg, err error) {
	p.counters.answersRefused.Add(1)
	refused := &RefusedError{503, err.Error()}
	errors.As(err, &refused)
	refusal := nats.NewMsg(question.Reply)
	refusal.Header.Set(errorCodeHeader, strconv.Itoa(refused.Code))
	refusal.Header.Set(errorHeader, refused.Text)
	if err := question.RespondMsg(refusal); err != nil {
		p.options.Log(fmt.Sprintf("%s: a question was not answered: %v", p.subject, err))
	}
}
