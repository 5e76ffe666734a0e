//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// agentAccess reaches the agent of a VM that may sleep and wake meanwhile. Any goroutine may call its methods.
type agentAccess struct {
	name string
	get  func() (*state.Record, error)
	wake func(context.Context) (*guest.Client, error)

	mu     sync.Mutex // held while the VM is woken
	client *guest.Client
	pid    int // of the VM's process that client is connected to
}

func (a *app) newAgentAccess(s *sandbox.Host, name string) *agentAccess {
	return &agentAccess{
		name: name,
		get:  func() (*state.Record, error) { return s.State.Get(name) },
		wake: func(ctx context.Context) (*guest.Client, error) { return a.awake(ctx, s, name) },
	}
}

// open returns a client of the running VM. It wakes a sleeping VM first.
func (d *agentAccess) open(ctx context.Context) (*guest.Client, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	r, err := d.get()
	if err != nil {
		return nil, err
	}
	if d.client != nil && r.Phase == state.Running && r.PID == d.pid {
		return d.client, nil
	}
	c, err := d.wake(ctx)
	if err != nil {
		return nil, err
	}
	if r, err = d.get(); err != nil {
		c.Close()
		return nil, err
	}
	if d.client != nil {
		d.client.Close()
	}
	d.client, d.pid = c, r.PID
	return c, nil
}

// maxOpenTries bounds how often use retries when the VM falls asleep at just the wrong moment.
const maxOpenTries = 5

// use calls f with a client, and again if the VM fell asleep before f got through. f must be safe to begin twice.
func (d *agentAccess) use(ctx context.Context, f func(*guest.Client) error) error {
	for try := 1; ; try++ {
		c, err := d.open(ctx)
		if err != nil {
			return err
		}
		err = f(c)
		asleep := errors.Is(err, guest.ErrUnavailable) || errors.Is(err, guest.ErrConnectionLost)
		if err == nil || !asleep || ctx.Err() != nil {
			return err
		}
		r, gerr := d.get()
		if gerr != nil {
			return gerr
		}
		if r.Phase == state.Running && errors.Is(err, guest.ErrUnavailable) {
			if _, perr := c.Ping(ctx); perr == nil {
				return fmt.Errorf("the agent of %s does not serve this: %w: start the VM anew, with an agent of this version", d.name, err)
			}
		}
		if try == maxOpenTries {
			return err
		}
	}
}

// close closes the client.
func (d *agentAccess) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.client != nil {
		d.client.Close()
		d.client = nil
	}
}
