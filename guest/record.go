package guest

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/drowse-vm/drowse/guest/agentpb"
	"github.com/drowse-vm/drowse/guest/audit"
)

// ErrNotRecorded: an action was not done because the audit trail could not record it.
var ErrNotRecorded = audit.ErrTrail

// record notes in the trail, if there is one, that an action is about to start. If record fails, the caller must not
// start the action.
func (c *Client) record(ctx context.Context, op string, a audit.Action) (*audit.Pending, error) {
	p, err := c.trail.Load().Begin(ctx, a)
	if err != nil {
		return nil, fmt.Errorf("guest: %s: %w", op, err)
	}
	return p, nil
}

// recorded is callOnce with an entry in the trail.
func recorded[Req, Resp any](ctx context.Context, c *Client, a audit.Action, op string, f method[Req, Resp], req Req) (resp Resp, err error) {
	p, err := c.record(ctx, op, a)
	if err != nil {
		return resp, err
	}
	resp, err = callOnce(ctx, c, op, f, req)
	p.End(audit.Outcome{Error: text(err)})
	return resp, err
}

// done is recorded for a call with an empty answer.
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

// recordEnd records the end of a session whose status and error are set.
func (s *Session) recordEnd() {
	o := audit.Outcome{BytesIn: s.in.Load(), BytesOut: s.out.Load()}
	if st := s.status; st != nil {
		o.Exit, o.ExitSignal, o.TimedOut, o.Error = &st.Code, st.Signal, st.TimedOut, st.NotStarted
		// A guest may report negative times.
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

// action returns the command as the trail records it.
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

// carried is the record of connections that belong together: those to one address, or from one listener. It ends
// when no more can come and all are closed.
type carried struct {
	record *audit.Pending

	mu   sync.Mutex // guards what follows
	open int        // connections that are open or being made
	done bool       // no more can come
	o    audit.Outcome
}

// begin counts a connection that is being made.
func (k *carried) begin() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.open++
}

// made notes that the connection was made, and watches for its end, or that it failed.
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

// last notes that no more connections come.
func (k *carried) last() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.done = true
	k.end()
}

// end ends the record if no connection is left and none can come. The caller holds mu.
func (k *carried) end() {
	if !k.done || k.open > 0 {
		return
	}
	if k.o.Connections > 0 {
		k.o.Error = "" // one connection failed, but others were made
	}
	k.record.End(k.o)
}

// idle reports whether no connection is open or being made.
func (k *carried) idle() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.open == 0
}

// maxCarried is how many records of addresses a client keeps before it ends the idle ones.
const maxCarried = 256

// carriedTo returns the record of connections to an address, and counts one more connection.
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

// endCarried ends the records of connections when the client is closed. A record with open connections ends with the
// last of them.
func (c *Client) endCarried() {
	c.carriedMu.Lock()
	defer c.carriedMu.Unlock()
	for _, k := range c.carried {
		k.last()
	}
	c.carried = nil
}
