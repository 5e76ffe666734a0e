package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/rootfs/volume"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/pool"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// MaxForks is the maximum number of children of one fork.
const MaxForks = 64

// ForkOptions are options of Sandbox.Fork.
type ForkOptions struct {
	// Count is how many children to make, 1 to MaxForks; 1 if 0.
	Count int
	// Name is the child's name. With several children it is the prefix of their names: NAME-1, NAME-2. If it is
	// empty, names are random.
	Name string
	// Early returns when the children run, without waiting for the fork's snapshot. Until that is on disk, a child
	// that is killed is lost.
	Early bool
	// Policy is the children's network policy; nil is that of the VM.
	Policy *netpolicy.Policy
	// Children, if not empty, are the children to make, instead of Count and Name.
	Children []ForkChild

	// asked says that the VM's guest has requested the fork.
	asked bool
}

// ForkChild is a child to make.
type ForkChild struct {
	// Name is the child's name; random if empty.
	Name string
	// Metadata is the child's; nil is that of the VM.
	Metadata *spec.Metadata
}

// Fork makes children of a VM. They continue from its memory, processes and files of one moment, each with its own
// random numbers, clock and identity, which its agent has acknowledged when Fork returns. A running VM is paused
// for some milliseconds, once for all children, and runs on. They share its memory of that moment until they write
// to it. A sleeping VM sleeps on; its children are clones of its snapshot.
//
// When Fork fails, the VM runs or sleeps on, and no child is left. There is one exception: if the VM's process
// dies after the children run, they run on, and Durable is false.
func (b *Sandbox) Fork(ctx context.Context, o ForkOptions) (res control.ForkResult, err error) {
	s, name := b.host, b.name
	begin := time.Now()
	ctx, ended := s.begin(ctx, control.OpFork, name)
	defer func() { ended(control.Operation{Fork: res, Err: err}) }()
	if len(o.Children) > 0 {
		o.Count = len(o.Children)
	}
	if o.Count == 0 {
		o.Count = 1
	}
	if o.Count < 1 || o.Count > MaxForks {
		return res, fmt.Errorf("%w: %d forks: use 1 to %d", ErrSpec, o.Count, MaxForks)
	}
	r, err := s.State.Get(name)
	if err != nil {
		return res, err
	}
	f := &forker{store: s, parent: r, early: o.Early, asked: o.asked, policy: o.Policy != nil, begin: begin}
	f.res = control.ForkResult{Parent: name, Children: make([]control.Report, o.Count), Stages: map[string]float64{}}
	if err := f.choose(o); err != nil {
		return res, err
	}
	for _, m := range r.Spec.Volumes {
		if !m.ReadOnly {
			return res, fmt.Errorf("forking %s: %w: it writes to volume %s, which only one VM can: detach it, or attach it read-only", name, volume.ErrInUse, m.Name)
		}
	}
	if r.Phase != state.Running && r.Phase != state.Asleep {
		return res, fmt.Errorf("%w: %s is %s: only a VM that runs or sleeps can be forked", ErrNotRunning, name, r.Phase)
	}
	if err := s.State.AdmitDisk(ctx, s.State.Owner(name)); err != nil {
		return res, fmt.Errorf("forking %s: %w", name, err)
	}
	// The lock keeps what the children need until their records exist.
	unlock, err := s.State.Share(ctx)
	if err != nil {
		return res, fmt.Errorf("forking %s: %w", name, err)
	}
	if r.Phase == state.Asleep {
		err = f.sleeping(ctx)
	} else {
		err = f.running(ctx)
	}
	err = errors.Join(err, unlock())
	if err != nil {
		err = errors.Join(fmt.Errorf("forking %s: %w", name, err), f.removeAll(ctx))
		_, serr := s.State.SweepExcept(context.WithoutCancel(ctx), state.Exempt{Owners: []string{r.ID}, Snapshots: []string{f.made}})
		return res, errors.Join(err, serr)
	}
	e := s.State.Event(ctx, r, events.Forked)
	e.Details.Snapshot, e.Details.Milliseconds = f.res.Snapshot, f.res.Stages["ready"]
	for _, c := range f.res.Children {
		e.Details.Children = append(e.Details.Children, c.Name)
	}
	s.State.Announce(ctx, e)
	return f.res, nil
}

// forker is a fork in progress, outside the VMs' processes.
type forker struct {
	store  *Host
	parent *state.Record
	specs  []Spec
	policy bool                      // the children have another policy than their parent
	labels map[string]*spec.Metadata // by name
	early  bool
	asked  bool // by the guest
	begin  time.Time
	made   string // the snapshot that the VM's process makes for the fork
	res    control.ForkResult
}

// choose makes the specs of the children. It refuses what is impossible before anything is done.
func (f *forker) choose(o ForkOptions) error {
	own, err := f.store.State.Metadata(f.parent.Spec.Name)
	if err != nil {
		return err
	}
	own = own.ForChild()
	f.labels = make(map[string]*spec.Metadata, o.Count)
	for i := range o.Count {
		spec := f.parent.Spec
		spec.Hostname = ""
		if f.asked {
			spec.Self = spec.Self.Childless()
		}
		label := &own
		if own.Empty() {
			label = nil // then there is no file to flush to disk
		}
		if len(o.Children) > 0 {
			o.Name = ""
			if c := o.Children[i]; c.Metadata != nil {
				label = c.Metadata
			}
		}
		switch {
		case len(o.Children) > 0 && o.Children[i].Name != "":
			spec.Name = o.Children[i].Name
		case o.Name == "":
			spec.Name = ""
		case o.Count == 1:
			spec.Name = o.Name
		default:
			spec.Name = fmt.Sprintf("%s-%d", o.Name, i+1)
		}
		if err := spec.UsePolicy(o.Policy); err != nil {
			return err
		}
		spec, err := f.store.State.Complete(spec)
		if err != nil {
			return err
		}
		if _, err := os.Stat(f.store.State.RecordPath(spec.Name)); err == nil {
			return fmt.Errorf("%w: %s: choose another, or remove it with Sandbox(%q).Delete", ErrExists, spec.Name, spec.Name)
		}
		if _, twice := f.labels[spec.Name]; twice {
			return fmt.Errorf("%w: two children are called %s", ErrSpec, spec.Name)
		}
		if err := (&state.Record{Spec: spec}).SetMetadata(label); err != nil {
			return err
		}
		f.labels[spec.Name] = label
		f.specs = append(f.specs, spec)
	}
	return nil
}

// inherit gives the children the policy and the tags of their parent, once its memory is that of the fork. Changes
// before that moment are in the record by then, so they hold for the children as well.
func (f *forker) inherit() error {
	r, err := f.store.State.Get(f.parent.Spec.Name)
	if err != nil {
		return err
	}
	for i := range f.specs {
		f.specs[i].Tags = r.Spec.Tags
		if !f.policy {
			f.specs[i].Policy = r.Spec.Policy
		}
	}
	return nil
}

// sleeping makes clones of the snapshot that the VM sleeps in.
func (f *forker) sleeping(ctx context.Context) error {
	if err := f.inherit(); err != nil {
		return err
	}
	f.res.Snapshot, f.res.Durable = f.parent.Snapshot, true
	return f.startAll(ctx, func(ctx context.Context, spec Spec) (control.Report, error) {
		r, err := f.store.cloneRecord(ctx, f.parent.Snapshot, spec.Name)
		if err != nil {
			return control.Report{}, err
		}
		r.Fork = f.parent.Origin()
		r.Fork.Asked = f.asked
		// These may have changed since the VM fell asleep.
		r.Spec.Policy, r.Spec.Tags = spec.Policy, spec.Tags
		if err := r.SetMetadata(f.labels[spec.Name]); err != nil {
			return control.Report{}, err
		}
		var rep control.Report
		_, err = f.store.launchNew(ctx, r, f.parent.Snapshot, nil, &rep)
		return rep, err
	})
}

// running asks the VM's process for an image, and makes children of it.
func (f *forker) running(ctx context.Context) error {
	// The children's processes start while the VM's memory is copied.
	launcher, done := pool.Ahead(ctx, f.store.State, f.store.launcher, f.specs[0].Shape(), len(f.specs))
	defer done()
	host := f.store.With(launcher)
	id := spec.NewID()
	c, err := control.DialFork(ctx, f.store.State, f.parent.Spec.Name, id, f.note())
	if err != nil {
		return err
	}
	defer c.Close()
	f.made = id
	f.res.Snapshot, f.res.Pages, f.res.Stages = id, c.First.Pages, c.First.Stages
	origin := f.parent.Origin()
	origin.Asked = f.asked
	if err := f.inherit(); err != nil {
		c.Abort()
		return err
	}
	err = f.startAll(ctx, func(ctx context.Context, want Spec) (control.Report, error) {
		r := &state.Record{
			Version: state.RecordVersion, ID: spec.NewID(), Spec: want, Created: time.Now().UTC(), Phase: state.Starting, Maker: os.Getpid(),
			Boot: f.parent.Boot, Parent: id, Fork: origin,
		}
		r.Inherit(f.parent)
		r.Disk.Layers = c.First.Layers
		if err := r.SetMetadata(f.labels[want.Name]); err != nil {
			return control.Report{}, err
		}
		return host.launchNewWith(ctx, r, control.Order{Name: want.Name, NewIdentity: true, Fork: true}, nil, c.Image)
	})
	if err == nil && f.early {
		return nil
	}
	if err != nil {
		c.Abort()
	}
	res, werr := c.Wait(ctx)
	switch {
	case err != nil:
		return err
	case werr == nil:
		f.res.Durable, f.res.Stages["save"] = true, res.Stages["save"]
		f.res.Stages["durable"] = control.Milliseconds(time.Since(f.begin))
		return nil
	case errors.Is(werr, control.ErrForkEnded):
		// The children do not need their parent.
		f.res.Durable = f.store.State.IsThere(id)
		if !f.res.Durable {
			f.res.Problem = werr.Error()
		}
		return nil
	}
	c.Abort()
	return werr
}

// note returns the note of the fork's snapshot.
func (f *forker) note() string {
	note := "fork: " + f.specs[0].Name
	if n := len(f.specs); n > 1 {
		note += fmt.Sprintf(" and %d more", n-1)
	}
	return note
}

// startAll starts the children, several at once. If one fails, removeAll must remove those that have started.
func (f *forker) startAll(ctx context.Context, start func(context.Context, Spec) (control.Report, error)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	var next atomic.Int64
	errs := make([]error, len(f.specs))
	for range min(len(f.specs), 4*runtime.NumCPU()) {
		wg.Go(func() {
			for i := int(next.Add(1) - 1); i < len(f.specs); i = int(next.Add(1) - 1) {
				if f.res.Children[i], errs[i] = start(ctx, f.specs[i]); errs[i] != nil {
					cancel()
					return
				}
			}
		})
	}
	wg.Wait()
	if cause := firstCause(errs); cause != nil {
		return cause
	}
	f.res.Stages["ready"] = control.Milliseconds(time.Since(f.begin))
	return nil
}

// firstCause returns the error that made the other starts be canceled.
func firstCause(errs []error) error {
	var other error
	for _, err := range errs {
		if err != nil && !errors.Is(err, context.Canceled) {
			return err
		}
		if err != nil {
			other = err
		}
	}
	return other
}

// removeAll removes the children that have started.
func (f *forker) removeAll(ctx context.Context) error {
	ctx = context.WithoutCancel(ctx)
	var errs []error
	for i, rep := range f.res.Children {
		if rep.Name != "" && rep.Error == nil {
			errs = append(errs, f.store.Sandbox(f.specs[i].Name).Delete(ctx, DeleteOptions{Force: true}))
		}
	}
	return errors.Join(errs...)
}
