package process

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/drowse-vm/drowse/sandbox/arrival"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// wholeTime is how long what needs all of a VM's memory and disk waits for what is on its way.
const wholeTime = 10 * time.Minute

// arriving is the snapshot that the VM comes from, while that is on its way.
type arriving struct {
	over chan struct{} // closed when it has ended
	err  error         // why it does not come
}

// comes returns what is on its way of a snapshot; nil if that is there.
func (p *process) comes(id string) *instance.Arriving {
	if !p.store.IsArriving(id) {
		return nil
	}
	c := arrival.Client{Dir: p.store.Dir(), Snapshot: id}
	return &instance.Arriving{Dir: p.store.ArrivingDir(id), Ensure: c.Ensure, Whole: c.Whole}
}

// freezer is what stops a VM that is to go on: *jail.VM.
type freezer interface {
	Freeze(why string) error
	Thaw(why string)
}

// noLease is why a VM is frozen whose lease has ended while its memory was on its way.
const noLease = "frozen: its host has lost its claim on it, and it cannot sleep before all of its memory and disk is here: it goes on when its host reaches the store in time, and no other host has claimed it"

// freeze freezes a VM whose lease has ended and which cannot have slept, since its memory is on its way: the claim may
// come back, and nothing is lost then. It reports whether nothing of the guest runs. Then thaw must follow, or the VM's
// end.
func (p *process) freeze() (thaw func(), ok bool) {
	f := p.freezer.Load()
	if f == nil || !p.arrives() {
		return nil, false
	}
	thaw = func() { (*f).Thaw(noLease) }
	if err := (*f).Freeze(noLease); err != nil {
		p.log.Error("freezing it", "error", err)
		return nil, false // it is ended, frozen or not
	}
	return thaw, true
}

// awaitArrival waits in the background until all of the VM's memory and disk is there. A VM that has lost some ends.
func (p *process) awaitArrival() {
	a := p.in.Parts().Arriving
	if a == nil {
		return
	}
	p.arriving = &arriving{over: make(chan struct{})}
	if f, ok := p.in.(freezer); ok {
		p.freezer.Store(&f)
	}
	p.background.Go(func() {
		defer close(p.arriving.over)
		ctx, cancel := p.in.WhileRunning(p.lasting)
		defer cancel()
		if p.arriving.err = a.Whole(ctx); p.arriving.err == nil {
			if v, ok := p.in.(interface{ Arrived() error }); ok {
				if err := v.Arrived(); err != nil {
					p.log.Info("the VM goes on to ask for its memory and disk", "cause", err)
				}
			}
			return
		}
		if errors.Is(p.arriving.err, arrival.ErrLost) {
			p.in.Machine().Fail(p.arriving.err)
		}
	})
}

// arrives reports whether the VM's memory and disk were not all there yet.
func (p *process) arrives() bool {
	if p.arriving == nil {
		return false
	}
	select {
	case <-p.arriving.over:
		return p.arriving.err != nil
	default:
		return true
	}
}

// whole waits until all of the VM's memory and disk is there. It is called before p.op is locked.
func (p *process) whole(ctx context.Context) error {
	if p.arriving == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, wholeTime)
	defer cancel()
	var err error
	select {
	case <-p.arriving.over:
		err = p.arriving.err
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	if err != nil {
		return fmt.Errorf("%w: %s runs on: %w", spec.ErrArriving, p.in.Parts().Spec.Name, err)
	}
	return nil
}
