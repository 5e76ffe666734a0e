package s3

import (
	"context"
	"io"
	"sync"
	"time"
)

// A pace bounds the bytes a second of all bodies in one direction. A nil pace bounds nothing. Bodies go one after the
// other: the time that a request may take begins with its turn.
type pace struct {
	perSecond float64

	mu   sync.Mutex // guards next
	next time.Time  // when the next body may begin
}

func newPace(mibPerSecond int) *pace {
	if mibPerSecond == 0 {
		return nil
	}
	return &pace{perSecond: float64(mibPerSecond) * (1 << 20)}
}

func (p *pace) takes(n int) time.Duration {
	return time.Duration(float64(n) / p.perSecond * float64(time.Second))
}

// turn waits until a body of n bytes may begin.
func (p *pace) turn(ctx context.Context, n int) error {
	if p == nil {
		return nil
	}
	p.mu.Lock()
	begin := time.Now()
	if p.next.After(begin) {
		begin = p.next
	}
	p.next = begin.Add(p.takes(n))
	p.mu.Unlock()
	wait := time.NewTimer(time.Until(begin))
	defer wait.Stop()
	select {
	case <-wait.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// charge counts n bytes that go without a turn of their own: the turns to come wait for them.
func (p *pace) charge(n int) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if now := time.Now(); p.next.Before(now) {
		p.next = now
	}
	p.next = p.next.Add(p.takes(n))
}

// pacePiece is how much of a body is sent at once.
const pacePiece = 64 << 10

// reader returns a reader of a body that begins now. It seeks as body does, since the library may send it again.
func (p *pace) reader(ctx context.Context, body io.ReadSeeker) io.ReadSeeker {
	if p == nil {
		return body
	}
	return &pacedReader{ReadSeeker: body, ctx: ctx, p: p}
}

type pacedReader struct {
	io.ReadSeeker
	ctx   context.Context
	p     *pace
	begun time.Time
	sent  int // since begun
}

// Read implements io.Reader.
func (r *pacedReader) Read(b []byte) (int, error) {
	if r.begun.IsZero() {
		r.begun = time.Now()
	}
	wait := time.NewTimer(time.Until(r.begun.Add(r.p.takes(r.sent))))
	defer wait.Stop()
	select {
	case <-wait.C:
	case <-r.ctx.Done():
		return 0, context.Cause(r.ctx)
	}
	n, err := r.ReadSeeker.Read(b[:min(len(b), pacePiece)])
	r.sent += n
	return n, err
}
