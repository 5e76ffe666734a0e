package instance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/snapshot/pager"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// While the guest runs, RAM is copied to the image of a fork. Pages that the guest changes meanwhile are copied
// again while there are more than aheadPages of them, up to aheadRounds times. The rest is copied, or
// write-protected, in the pause.
const (
	aheadPages  = 8 << 20 / guestmem.PageSize
	aheadRounds = 3
)

// forkCapture is a fork's image in the making.
type forkCapture struct {
	in    *Instance
	image *pager.Image
	// early are the pages that had changed since the previous snapshot when the image was begun. The image has all
	// of RAM from that moment, and the log starts anew. early is nil without a log: nothing is copied ahead then.
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
			// Otherwise the guest would stand still until all of it is loaded.
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

// end closes the image; children that have it keep it. If the capture has failed with err, end marks the pages
// that had changed before it as dirty again.
func (f *forkCapture) end(err error) error {
	if err != nil && f.early != nil {
		f.in.machine.MarkDirty(f.early)
	}
	return errors.Join(err, f.image.Close())
}

// changed takes the pages that the log reports as changed. It returns the pages that the image lacks and the pages
// that differ from the previous snapshot; differ is nil if unknown.
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

// forkNote is what the image of a fork has besides RAM: the counterpart of a snapshot's Spec.
type forkNote struct {
	Version  int                `json:"version"`
	VCPUs    int                `json:"vcpus"`
	Host     map[string]string  `json:"host"`
	Payloads []snapshot.Payload `json:"payloads"`
	// Volumes is the snapshot's volumes label.
	Volumes string `json:"volumes,omitempty"`
}

// forkVersion goes up with each incompatible change of a fork's image. One build may write an image and the next
// one read it.
const forkVersion = 1

// parseForkNote reads the note in the image of a machine, which must have this many vCPUs. The caller checks host,
// volumes and states.
func parseForkNote(data []byte, vcpus int) (note forkNote, err error) {
	if err := json.Unmarshal(data, &note); err != nil {
		return forkNote{}, fmt.Errorf("%w: %w", guestmem.ErrImage, err)
	}
	if note.Version != forkVersion || note.VCPUs != vcpus {
		return forkNote{}, fmt.Errorf("%w: it is of version %d with %d vCPUs, version %d with %d is wanted", spec.ErrInvalid, note.Version, note.VCPUs, forkVersion, vcpus)
	}
	return note, nil
}

// finish completes the image from frozen, and seals it.
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
	// The guest need not be held up any longer.
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

// expectDirty returns how many pages a capture is likely to freeze.
func (in *Instance) expectDirty() (uint64, error) {
	if !in.tracked {
		return 0, nil
	}
	return in.machine.CountDirty()
}

// memory returns the guest's RAM.
func (p Parts) memory() (*guestmem.Memory, error) {
	if p.RAM != nil {
		return guestmem.NewPrivate(p.Spec.Memory(), p.RAM)
	}
	return guestmem.New(p.Spec.Memory())
}

// RestoreFork starts a VM from p.RAM, the image of a fork that CaptureOptions.Fork was given. The VM shares the
// image's pages until it writes to them. RestoreFork returns when the agent inside has taken fresh random numbers
// and the time of day. snapshotDir is where the fork's snapshot is or will be. Once it exists, the VM's own
// snapshots build on it; it need not ever exist.
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
	if err := in.checkHost(note.Host); err != nil {
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

// adoptForkBase makes the snapshot of the fork that this VM came from the base of its next one, if it exists by now.
func (in *Instance) adoptForkBase() {
	if in.base != nil || in.forkBase == "" {
		return
	}
	if _, err := in.parts.files().Stat(filepath.Join(in.forkBase, snapshot.ManifestName)); err != nil {
		return // not yet, or never: all of RAM is written
	}
	base, err := snapshot.OpenIn(in.parts.files(), in.forkBase)
	if err != nil {
		in.log.Warn("the snapshot of the fork cannot be built upon: writing all of RAM", "error", err)
		return
	}
	in.base = base
}
