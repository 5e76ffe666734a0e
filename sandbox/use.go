package sandbox

import (
	"context"
	"errors"
	"fmt"
	"net"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox/control"
)

// wakeTries bounds how often one use wakes a VM that is put to sleep again in between.
const wakeTries = 5

// Connect connects to the agent of the guest, like Agent, but first wakes a VM that sleeps: see BringUp. Close the
// client when done.
func (b *Sandbox) Connect(ctx context.Context) (*guest.Client, error) {
	return inUse(b, func() (*guest.Client, error) { return b.Agent(ctx) }, func() (*guest.Client, error) {
		_, err := b.BringUp(ctx)
		return nil, err
	})
}

// inUse returns the result of use, which needs a running VM. If the VM sleeps, wake wakes it first, and may return
// the result itself. If the VM was put to sleep in between, inUse tries again.
func inUse[T any](b *Sandbox, use, wake func() (*T, error)) (*T, error) {
	for try := range wakeTries {
		// A VM that sleeps is told by its socket: use would read its record first, and wake reads it again.
		if try > 0 || b.host.State.Listens(b.name) {
			v, err := use()
			if !errors.Is(err, ErrNotRunning) && !b.host.elsewhere(err) {
				return v, err
			}
		}
		if v, err := wake(); v != nil || err != nil {
			return v, err
		}
	}
	return nil, fmt.Errorf("%w: %s was put to sleep %d times as it was woken", ErrNotRunning, b.name, wakeTries)
}

// Exec runs a command, with the user, directory and variables of the image where the command has none (see
// Command). It wakes a VM that sleeps. If the command fails, the error is a *guest.ExitError.
func (b *Sandbox) Exec(ctx context.Context, cmd guest.Cmd) (st *guest.ExitStatus, err error) {
	ctx, ended := b.host.begin(ctx, control.OpExec, b.name)
	defer func() {
		op := control.Operation{Exit: st, Err: err}
		if _, failed := errors.AsType[*guest.ExitError](err); failed {
			op.Err = nil // the command's own failure
		}
		ended(op)
	}()
	c, err := b.Connect(ctx)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	if cmd, err = b.Command(cmd); err != nil {
		return nil, err
	}
	return c.Exec(ctx, cmd)
}

// Files returns the files of the guest. Operations on them wake a VM that sleeps.
func (b *Sandbox) Files() guest.Files { return guest.FilesBy(b.Connect) }

// Dial connects to an address as the guest sees it, such as "tcp" and "127.0.0.1:8080", and wakes a VM that
// sleeps. The caller only has to close the connection.
func (b *Sandbox) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	c, err := inUse(b, func() (*guest.Client, error) {
		if err := b.running(); err != nil {
			return nil, err
		}
		return guest.New(b.host.State.VsockPath(b.name)), nil
	}, func() (*guest.Client, error) {
		_, err := b.BringUp(ctx)
		return nil, err
	})
	if err != nil {
		return nil, err
	}
	conn, err := c.Dial(ctx, network, address)
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return dialed{conn, c}, nil
}

// dialed is a connection with its own client.
type dialed struct {
	net.Conn
	client *guest.Client
}

// Close implements net.Conn.
func (d dialed) Close() error { return errors.Join(d.Conn.Close(), d.client.Close()) }

// Get returns an existing sandbox by name, or ErrNotFound.
func (h *Host) Get(name string) (*Sandbox, error) {
	if _, err := h.State.Get(name); err != nil {
		return nil, err
	}
	return h.Sandbox(name), nil
}

// List returns all sandboxes, by name. Those with unreadable records are only in the error.
func (h *Host) List() ([]*Sandbox, error) {
	records, err := h.State.List()
	list := make([]*Sandbox, len(records))
	for i, r := range records {
		list[i] = h.Sandbox(r.Spec.Name)
	}
	return list, err
}
