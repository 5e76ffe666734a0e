package instance

import (
	"encoding/json"
	"fmt"
	"strconv"

	"github.com/drowse-vm/drowse/devices/fs"
	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/rootfs/volume"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/snapshot"
)

// deviceShare and a share's index name its device. The guest mounts the share by the same tag.
const deviceShare = "share-"

func shareTag(i int) string { return deviceShare + strconv.Itoa(i) }

// OpenShare opens the directory of a share. It returns ErrShare if the directory cannot be shared.
func OpenShare(files osfile.FS, sh spec.Share) (d *fs.Dir, err error) {
	f, err := files.OpenFile(sh.Source, fs.OpenFlags, 0)
	if err == nil {
		d, err = fs.NewDir(f.OS(), sh.Writable)
	}
	if err != nil {
		return nil, fmt.Errorf("%w for %s in the guest: %w: put the directory there; its content is not part of a snapshot", spec.ErrShare, sh.Path, err)
	}
	return d, nil
}

// volumeSerial returns the serial number that the guest reads from a volume, at most 20 bytes.
func volumeSerial(r *volume.Record) string { return "vol-" + r.ID[:16] }

// LabelVolumes is the label under which a snapshot records which volumes its memory knows. The content of volumes
// is not part of a snapshot.
const LabelVolumes = "drowse.volumes"

// heldVolume is a volume at the instant of a snapshot.
type heldVolume struct {
	Name       string `json:"name"`
	ID         string `json:"id"`
	Generation uint64 `json:"generation"`
	ReadOnly   bool   `json:"read_only"`
}

// LabelVolumes records in the labels of a snapshot which volumes its memory knows.
func (p Parts) LabelVolumes(labels map[string]string) error {
	var held []heldVolume
	for _, v := range p.Volumes {
		r := v.Record()
		held = append(held, heldVolume{r.Name, r.ID, r.Generation, v.ReadOnly()})
	}
	if len(held) == 0 {
		return nil
	}
	text, err := json.Marshal(held)
	if err != nil {
		return err
	}
	labels[LabelVolumes] = string(text)
	return nil
}

// HeldVolumes returns the volumes that the memory of a snapshot knows.
func HeldVolumes(m *snapshot.Manifest) (held []heldVolume, err error) {
	text := m.Labels[LabelVolumes]
	if text == "" {
		return nil, nil
	}
	if err := json.Unmarshal([]byte(text), &held); err != nil {
		return nil, fmt.Errorf("the volumes of snapshot %s: %w: %w", m.ID, spec.ErrRecord, err)
	}
	return held, nil
}

// SettleVolumes makes the volumes durable and records in them that they belong to the memory in this snapshot. The
// guest must be paused.
func (p Parts) SettleVolumes(snapshotID string) error {
	for _, v := range p.Volumes {
		if err := v.Settle(volume.Settled{Snapshot: snapshotID, VM: p.VM}); err != nil {
			return err
		}
	}
	return nil
}

// CheckVolumes refuses to combine memory with volumes that it does not belong to.
func (p Parts) CheckVolumes(m *snapshot.Manifest) error {
	held, err := HeldVolumes(m)
	if err != nil {
		return err
	}
	if len(held) != len(p.Volumes) {
		return fmt.Errorf("%w: its guest has %d volumes, and the VM %d", spec.ErrInvalid, len(held), len(p.Volumes))
	}
	for i, v := range p.Volumes {
		h := held[i]
		if h.ReadOnly != v.ReadOnly() || h.Name != v.Record().Name {
			return fmt.Errorf("%w: its guest has volume %s, and the VM %s in its place", spec.ErrInvalid, h.Name, v.Record().Name)
		}
		if err := v.Check(h.ID, h.Generation, volume.Settled{Snapshot: m.ID, VM: p.VM}); err != nil {
			return Stale(h, m.ID, err)
		}
	}
	return nil
}

// Stale adds to err what the caller can do instead.
func Stale(h heldVolume, snapshotID string, err error) error {
	remedy := fmt.Sprintf("boot instead, with Sandbox.Start, or Host.Create with Disk \"%.12s\" and volume %s", snapshotID, h.Name)
	if !h.ReadOnly {
		remedy += "; clones need volumes that are attached read-only"
	}
	return fmt.Errorf("%w: its content is not part of a snapshot, and the guest's memory goes only with the content that it left: %s", err, remedy)
}
