package instance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/snapshot/pager"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// After RAM has been copied to the image of a fork, while the guest runs, what the guest
// has changed meanwhile is copied again as long as it is more than aheadPages, up to
// aheadRounds times. What is left is copied, or write-protected, in the pause.
const (
	aheadPages  = 8 << 20 / guestmem.PageSize
	aheadRounds = 3
)

// forkCapture is the image of a fork on its way.
type forkCapture struct {
	in    *Instance
	image *pager.Image
	// early are the pages that had changed since the snapshot before when the image
	// was begun. The image has all of RAM since then, and the log begins anew; nil
	// without a log, when nothing is copied ahead.
	early *guestmem.PageSet
	// lacks are the pages that the image lacked in the pause.
	lacks *guestmem.PageSet
	ahead time.Duration
}

// beginFork makes an image of RAM while the guest runs.
func (in *Instance) beginFork(ctx context.Context) (f *forkCapture, err error) {
	begin := time.Now()
	f = &forkCapture{in: in}
	if f.image, err = pager.NewImage(in.mem); err != nil {
		return nil, err
	}
	if !in.tracked {
		if in.pager != nil {
			// Or else the guest would stand still until all of it is loaded.
			if err := in.pager.Load(ctx); err != nil {
				return nil, f.end(err)
			}
		}
		return f, nil
	}
	if f.early, err = in.machine.TakeDirtyRunning(); err != nil {
		return nil, f.end(err)
	}
	if err := f.image.CopyRunning(ctx, in.pager); err != nil {
		return nil, f.end(err)
	}
	for range aheadRounds {
		n, err := in.machine.CountDirty()
		if err != nil {
			return nil, f.end(err)
		}
		if n <= aheadPages {
			break
		}
		again, err := in.machine.TakeDirtyRunning()
		if err != nil {
			return nil, f.end(err)
		}
		f.early.Union(again)
		if err := f.image.CopyLoaded(ctx, again, in.pager); err != nil {
			return nil, f.end(err)
		}
	}
	f.ahead = time.Since(begin)
	return f, nil
}

// end gives the image up, but for children that have it. If the capture has failed with
// err, what had changed before it counts as changed again.
func (f *forkCapture) end(err error) error {
	if err != nil && f.early != nil {
		f.in.machine.MarkDirty(f.early)
	}
	return errors.Join(err, f.image.Close())
}

// changed takes the pages that have changed according to the log, and returns those that
// the image lacks, and those that differ from the snapshot before: nil if that is not known.
func (f *forkCapture) changed(logged *guestmem.PageSet) (lacks, differ *guestmem.PageSet) {
	if f.early == nil {
		all := guestmem.NewPageSet(f.in.mem.Size() / guestmem.PageSize)
		all.Add(0, all.Pages())
		return all, logged
	}
	f.lacks = logged
	f.early.Union(logged)
	return logged, f.early
}

// forkNote is what the image of a fork has besides RAM: what Spec of a snapshot has.
type forkNote struct {
	Version  int                `json:"version"`
	VCPUs    int                `json:"vcpus"`
	Host     map[string]string  `json:"host"`
	Payloads []snapshot.Payload `json:"payloads"`
	// Volumes is what the label of the snapshot says of them.
	Volumes string `json:"volumes,omitempty"`
}

// forkVersion is counted up by incompatible changes of the image of a fork, which may be
// made by one build and read by the next.
const forkVersion = 1

// parseForkNote reads what an image says of a machine, which must have so many vCPUs. What it says of host, volumes and
// states is for others to check.
func parseForkNote(data []byte, vcpus int) (note forkNote, err error) {
	if err := json.Unmarshal(data, &note); err != nil {
		return forkNote{}, fmt.Errorf("%w: %w", guestmem.ErrImage, err)
	}
	if note.Version != forkVersion || note.VCPUs != vcpus {
		return forkNote{}, fmt.Errorf("%w: it is of version %d with %d vCPUs, version %d with %d is wanted", spec.ErrInvalid, note.Version, note.VCPUs, forkVersion, vcpus)
	}
	return note, nil
}

// finish completes the image with what frozen has, and seals it.
func (f *forkCapture) finish(ctx context.Context, frozen *pager.Frozen, spec *snapshot.Spec, c *Capture) (snapshot.MemorySource, error) {
	begin := time.Now()
	var err error
	if f.early == nil {
		err = f.image.CopyAll(ctx, frozen)
	} else {
		err = f.image.CopySet(ctx, f.lacks, frozen)
	}
	if err != nil {
		return nil, err
	}
	// The guest is not held up any longer than that.
	if err := frozen.Close(); err != nil {
		return nil, err
	}
	note, err := json.Marshal(forkNote{forkVersion, spec.VCPUs, spec.Host, spec.Payloads, spec.Labels[LabelVolumes]})
	if err != nil {
		return nil, fmt.Errorf("describing a fork: %w", err)
	}
	if err := errors.Join(f.image.SetNote(note), f.image.Seal()); err != nil {
		return nil, err
	}
	if f.early != nil {
		c.Changed = f.early.Len()
	}
	c.Ahead, c.Fill, c.Shareable = f.ahead, time.Since(begin), f.image.Pages()
	return f.image, nil
}

// expectDirty is how many pages a capture is likely to freeze.
func (in *Instance) expectDirty() (uint64, error) {
	if !in.tracked {
		return 0, nil
	}
	return in.machine.CountDirty()
}

// memory makes the guest's RAM.
func (p Parts) memory() (*guestmem.Memory, error) {
	if p.RAM != nil {
		return guestmem.NewPrivate(p.Spec.Memory(), p.RAM)
	}
	return guestmem.New(p.Spec.Memory())
}

// RestoreFork starts a VM from the image of a fork, p.RAM, which CaptureOptions.Fork has
// been given. It shares the image's pages until it writes to them. It returns when the
// agent inside has taken fresh random numbers and the time of day. snapshotDir is where
// the snapshot of the fork is or will be: once it is there, what the VM's own snapshots
// build upon. It need not ever be there.
func RestoreFork(ctx context.Context, p Parts, snapshotDir string, o RestoreOptions) (*Instance, error) {
	if p.RAM == nil {
		return nil, fmt.Errorf("starting a fork: %w: there is no image of its RAM", spec.ErrInvalid)
	}
	in, err := begin(p)
	if err != nil {
		return nil, err
	}
	if err := in.restoreFork(ctx, snapshotDir, o); err != nil {
		return nil, errors.Join(err, in.Close())
	}
	return in, nil
}

func (in *Instance) restoreFork(ctx context.Context, snapshotDir string, o RestoreOptions) error {
	data, err := pager.ImageNote(in.parts.RAM, in.mem.Size())
	if err != nil {
		return err
	}
	note, err := parseForkNote(data, in.parts.Spec.VCPUs)
	if err != nil {
		return fmt.Errorf("starting a fork: %w", err)
	}
	if err := CheckHost(note.Host); err != nil {
		return fmt.Errorf("starting a fork: %w", err)
	}
	m := &snapshot.Manifest{ID: filepath.Base(snapshotDir)}
	if note.Volumes != "" {
		m.Labels = map[string]string{LabelVolumes: note.Volumes}
	}
	if err := in.parts.CheckVolumes(m); err != nil {
		return fmt.Errorf("starting a fork: %w", err)
	}
	in.captured, in.forkBase = true, snapshotDir
	states, err := in.takeFreePages(note.Payloads)
	if err != nil {
		return fmt.Errorf("starting a fork: %w", err)
	}
	if err := in.putTogether(netDown, func() ([]snapshot.Payload, error) { return states, nil }); err != nil {
		return err
	}
	return in.goOn(ctx, o)
}

// adoptForkBase makes the snapshot of the fork that this VM has come from the base of its
// next one, if it is there by now.
func (in *Instance) adoptForkBase() {
	if in.base != nil || in.forkBase == "" {
		return
	}
	if _, err := os.Stat(filepath.Join(in.forkBase, snapshot.ManifestName)); err != nil {
		return // not yet, or never: all of RAM is written
	}
	base, err := snapshot.Open(in.forkBase)
	if err != nil {
		in.log.Warn("the snapshot of the fork cannot be built upon: writing all of RAM", "error", err)
		return
	}
	in.base = base
}
