package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/pool"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/snapshot"
)

// RunFromDisk makes a VM that boots from a copy of the disk in a snapshot, of whatever
// kind. It has that disk's files and the image below them, and nothing of the memory. The
// disk of a snapshot with memory is as after a loss of power: what the guest had not
// written out is not there.
//
// Image and size of the disk are those of the snapshot; spec may leave them out, and is
// refused with ErrSpec if it says something else.
func (s *Store) RunFromDisk(ctx context.Context, l pool.Launcher, spec Spec, prefix string) (control.Report, error) {
	return s.RunFromDiskWithMetadata(ctx, l, spec, prefix, nil)
}

// RunFromDiskWithMetadata is RunFromDisk for a sandbox that has metadata, if that is not nil, from its first moment on.
func (s *Store) RunFromDiskWithMetadata(ctx context.Context, l pool.Launcher, spec Spec, prefix string, label *state.Metadata) (control.Report, error) {
	// Nobody removes the snapshot's layers before the record names them.
	unlock, err := s.Share(ctx)
	if err != nil {
		return control.Report{}, fmt.Errorf("booting from the disk of snapshot %s: %w", prefix, err)
	}
	unlock = sync.OnceValue(unlock)
	defer func() { _ = unlock() }()
	id, err := s.FindSnapshot(prefix)
	if err != nil {
		return control.Report{}, err
	}
	// Its memory may be damaged: the disk is not.
	m, err := snapshot.ReadManifest(s.SnapshotDir(id))
	if err != nil {
		return control.Report{}, err
	}
	r, err := s.recordFromDisk(ctx, l, spec, m)
	if err != nil {
		return control.Report{}, fmt.Errorf("booting from the disk of snapshot %s: %w", id, err)
	}
	if err := r.SetMetadata(label); err != nil {
		return control.Report{}, err
	}
	return s.launchNew(ctx, l, r, "", unlock)
}

func (s *Store) recordFromDisk(ctx context.Context, l pool.Launcher, want Spec, m *snapshot.Manifest) (*state.Record, error) {
	var size uint64
	for _, d := range m.Disks {
		if d.Name == instance.DeviceDisk {
			size = d.Size
		}
	}
	switch {
	case size == 0 || size%(1<<20) != 0:
		return nil, fmt.Errorf("%w: it has no disk of drowse's", ErrRecord)
	case want.DiskMiB != 0 && uint64(want.DiskMiB) != size>>20:
		return nil, fmt.Errorf("%w: a disk of %d MiB was asked for, and it has %d", ErrSpec, want.DiskMiB, size>>20)
	}
	want.DiskMiB = int(size >> 20)
	if want.Image == "" {
		want.Image = m.Image
	}
	want, err := s.Complete(want)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(s.FindVolumes(want.Volumes), s.findShares(want.Shares)); err != nil {
		return nil, err
	}
	boot, err := s.resolve(ctx, l, want)
	if err != nil {
		return nil, err
	}
	if boot.ImageID != m.Image {
		return nil, fmt.Errorf("%w: its files lie over image %.12s, and cannot lie over %s (%.12s)", ErrSpec, m.Image, want.Image, boot.ImageID)
	}
	st := state.SnapshotStack(m)
	if full, err := s.Absolute(st); err != nil {
		return nil, err
	} else if err := disk.Verify(full); err != nil {
		return nil, err
	}
	return &state.Record{
		Version: state.RecordVersion, ID: spec.NewID(), Spec: want, Created: time.Now().UTC(), Phase: state.Starting, Maker: os.Getpid(),
		Boot: boot, Disk: st, Parent: m.ID,
	}, nil
}
