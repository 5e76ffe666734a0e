package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/snapshot"
)

// createFromDisk is Create with the disk of a snapshot. The snapshot's memory need not be readable.
func (s *Host) createFromDisk(ctx context.Context, want Spec, o CreateOptions) (*Sandbox, error) {
	// The lock keeps the snapshot's layers until the record names them.
	unlock, err := s.State.Share(ctx)
	if err != nil {
		return nil, fmt.Errorf("booting from the disk of snapshot %s: %w", o.Disk, err)
	}
	unlock = sync.OnceValue(unlock)
	defer func() { _ = unlock() }()
	id, err := s.State.FindSnapshot(o.Disk)
	if err != nil {
		return nil, err
	}
	// Its memory may be damaged, but not its disk.
	m, err := snapshot.ReadManifest(s.State.SnapshotDir(id))
	if err != nil {
		return nil, err
	}
	r, err := s.recordFromDisk(ctx, want, m)
	if err != nil {
		return nil, fmt.Errorf("booting from the disk of snapshot %s: %w", id, err)
	}
	if err := setFirstMetadata(r, o.Metadata); err != nil {
		return nil, err
	}
	return s.launchNew(ctx, r, "", unlock, o.Report)
}

func (s *Host) recordFromDisk(ctx context.Context, want Spec, m *snapshot.Manifest) (*state.Record, error) {
	var size uint64
	for _, d := range m.Disks {
		if d.Name == instance.DeviceDisk {
			size = d.Size
		}
	}
	switch {
	case size == 0 || size%(1<<20) != 0:
		return nil, fmt.Errorf("%w: it has no disk of drowse's", spec.ErrRecord)
	case want.DiskMiB != 0 && uint64(want.DiskMiB) != size>>20:
		return nil, fmt.Errorf("%w: a disk of %d MiB was asked for, and it has %d", ErrSpec, want.DiskMiB, size>>20)
	}
	want.DiskMiB = int(size >> 20)
	if want.Image == "" {
		want.Image = m.Image
	}
	want, err := s.State.Complete(want)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(s.State.FindVolumes(want.Volumes), s.findShares(want.Shares)); err != nil {
		return nil, err
	}
	boot, err := s.resolve(ctx, want)
	if err != nil {
		return nil, err
	}
	if boot.ImageID != m.Image {
		return nil, fmt.Errorf("%w: its files lie over image %.12s, and cannot lie over %s (%.12s)", ErrSpec, m.Image, want.Image, boot.ImageID)
	}
	st := state.SnapshotStack(m)
	if full, err := s.State.Absolute(st); err != nil {
		return nil, err
	} else if err := disk.Verify(full); err != nil {
		return nil, err
	}
	return &state.Record{
		Version: state.RecordVersion, ID: spec.NewID(), Spec: want, Created: time.Now().UTC(), Phase: state.Starting, Maker: os.Getpid(),
		Boot: boot, Disk: st, Parent: m.ID,
	}, nil
}
