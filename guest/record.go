package guest

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/drowse-vm/drowse/guest/agentpb"
	"github.com/drowse-vm/drowse/guest/audit"
)

// ErrNotRecorded: something was not done, since it cannot be recorded in the audit trail.
var ErrNotRecorded = audit.ErrTrail

// record notes in the trail, if there is one, that something is about to be done. If that
// fails it must not be.
func (c *Client) record(ctx context.Context, op string, a audit.Action) (*audit.Pending, error) {
	p, err := c.trail.Load().Begin(ctx, a)
	if err != nil {
		return nil, fmt.Errorf("guest: %s: %w", op, err)
	}
	return p, nil
}

// recorded is callOnce with a record of it.
func recorded[Req, Resp any](ctx context.Context, c *Client, a audit.Action, op string, f method[Req, Resp], req Req) (resp Resp, err error) {
	p, err := c.record(ctx, op, a)
	if err != nil {
		return resp, err
	}
	resp, err = callOnce(ctx, c, op, f, req)
	p.End(audit.Outcome{Error: text(err)})
	return resp, err
}

// done is recorded for a call whose answer says nothing.
func done[Req any](ctx context.Context, c *Client, a audit.Action, op string, f method[Req, *agentpb.Empty], req Req) error {
	_, err := recorded(ctx, c, a, op, f, req)
	return err
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// recordEnd notes the end of a session, whose status and error are known.
func (s *Session) recordEnd() {
	o := audit.Outcome{BytesIn: s.in.Load(), BytesOut: s.out.Load()}
	if st := s.status; st != nil {
		o.Exit, o.ExitSignal, o.TimedOut, o.Error = &st.Code, st.Signal, st.TimedOut, st.NotStarted
		// A guest may say anything; time does not run backwards.
		o.Changes = st.Changes
		o.CPUMs = float64(max(st.User, 0).Microseconds()+max(st.Sys, 0).Microseconds()) / 1000
	}
	if s.detach {
		o.Started = s.id
	}
	var exit *ExitError
	if s.err != nil && !errors.As(s.err, &exit) {
		o.Error = text(s.err)
	}
	s.record.End(o)
}

// action is what a command is in a trail.
func (cmd *Cmd) action() audit.Action {
	a := audit.Action{
		Kind: audit.KindExec, Argv: cmd.Argv, User: cmd.User, Dir: cmd.Dir,
		Login: cmd.Login, Pty: cmd.Pty != nil, Detach: cmd.Detach,
	}
	switch {
	case cmd.Subsystem == SubsystemSFTP:
		a.Kind = audit.KindSFTP
	case cmd.Subsystem == SubsystemLayer:
		a.Argv = []string{"drowse-agent", SubsystemLayer}
	case cmd.Login && len(cmd.Argv) == 0:
		a.Kind = audit.KindShell
	}
	if a.User == "" {
		a.User = "root"
	}
	if a.Dir == "" && !cmd.Login && cmd.Subsystem == "" {
		a.Dir = "/"
	}
	return a
}

// carried is the record of connections that belong together: those to one address, or from
// one listener. It ends when no more can come and all are gone.
type carried struct {
	record *audit.Pending

	mu   sync.Mutex // guards what follows
	open int        // connections that are there or being made
	done bool       // no more can come
	o    audit.Outcome
}

// begin says that a connection is being made.
func (k *carried) begin() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.open++
}

// made says whether it was, and watches it.
func (k *carried) made(conn *Conn, err error) {
	if err != nil {
		k.over(func(o *audit.Outcome) { o.Error = text(err) })
		return
	}
	k.mu.Lock()
	k.o.Connections++
	k.mu.Unlock()
	conn.Gone = func(sent, received int64) {
		k.over(func(o *audit.Outcome) { o.BytesIn, o.BytesOut = o.BytesIn+sent, o.BytesOut+received })
	}
}

func (k *carried) over(count func(*audit.Outcome)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	count(&k.o)
	k.open--
	k.end()
}

// last says that no more connections come.
func (k *carried) last() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.done = true
	k.end()
}

// end ends the record if all is over. The caller holds mu.
func (k *carried) end() {
	if !k.done || k.open > 0 {
		return
	}
	if k.o.Connections > 0 {
		k.o.Error = "" // of one that failed among others
	}
	k.record.End(k.o)
}

// idle says that there is no connection.
func (k *carried) idle() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.open == 0
}

// maxCarried is how many addresses without connections a client keeps the records of open.
const maxCarried = 256

// carriedTo returns the record of connections to an address, of which one more is made.
func (c *Client) carriedTo(ctx context.Context, network, address string) (*carried, error) {
	c.carriedMu.Lock()
	defer c.carriedMu.Unlock()
	key := network + " " + address
	if k := c.carried[key]; k != nil {
		k.begin()
		return k, nil
	}
	if c.closing.Err() != nil {
		return nil, errClosed
	}
	if len(c.carried) >= maxCarried {
		for key, k := range c.carried {
			if k.idle() {
				delete(c.carried, key)
				k.last()
			}
		}
	}
	p, err := c.record(ctx, "dial "+network+" "+address, audit.Action{Kind: audit.KindForward, Network: network, Address: address})
	if err != nil {
		return nil, err
	}
	k := &carried{record: p, open: 1}
	if c.carried == nil {
		c.carried = make(map[string]*carried)
	}
	c.carried[key] = k
	return k, nil
}

// endCarried ends the records of connections when the client is closed. Those that were given
// away are waited for.
func (c *Client) endCarried() {
	c.carriedMu.Lock()
	defer c.carriedMu.Unlock()
	for _, k := range c.carried {
		k.last()
	}
	c.carried = nil
}
