package bench

import (
	"context"
	"errors"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// VsockRTT measures the time from a ping of the agent in a running guest to its answer, over an open connection of
// the virtio socket: through the Unix socket of the VM's process, one ping after another.
func VsockRTT(ctx context.Context, e Env, o Options) (rows []Row, err error) {
	name := vmName()
	if err := e.boot(ctx, name, o.mib()); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, e.remove(ctx, name)) }()
	// The client keeps the connection of one call for the next.
	c, err := guest.Dial(ctx, guest.UnixDialer(e.Store.State.VsockPath(name)))
	if err != nil {
		return nil, err
	}
	defer c.Close()
	s := newSeries(inMs)
	for i := range o.Warmup + o.N {
		if i%100 == 0 {
			e.say("vsock_rtt: run %d of %d", i, o.Warmup+o.N)
		}
		begin := time.Now()
		if _, err := c.Ping(ctx); err != nil {
			return nil, err
		}
		took := time.Since(begin)
		if i >= o.Warmup {
			s.add(int64(took))
		}
	}
	return []Row{s.row("vsock_rtt", map[string]any{"memory_mib": o.mib(), "vcpus": spec.DefaultVCPUs})}, nil
}
