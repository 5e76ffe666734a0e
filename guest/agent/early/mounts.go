package early

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Mount is a further file system: a volume, which is a disk with an ext4, or a share, which is a directory of the
// host.
type Mount struct {
	Name     string // serial number of a volume's block device, or tag of a share's virtio file system device
	Dir      string // absolute
	ReadOnly bool
}

const (
	maxMounts = 16 // of each kind
	maxSerial = 20 // bytes, VIRTIO_BLK_ID_BYTES
	maxTag    = 36 // bytes (virtio 1.2, 5.11.4)

	virtiofs    = "virtiofs"
	volumeFlags = unix.MS_NOATIME
	shareFlags  = unix.MS_NOSUID | unix.MS_NODEV
)

// blockDir lists the block devices. A virtio disk's serial number is in its file
// "serial" (Documentation/ABI/stable/sysfs-block).
const blockDir = "/sys/block"

// mountOthers mounts the volumes and then the shares that the command line names. One that cannot be mounted ends
// the boot: a program that finds an empty directory in its place would put its data where they are lost.
func (m *Machine) mountOthers() error {
	deadline := time.Now().Add(m.Config.Wait)
	for _, v := range m.Config.Volumes {
		dev, err := findSerial(blockDir, v.Name, deadline)
		if err != nil {
			return fmt.Errorf("find the volume for %s: %w", v.Dir, err)
		}
		if err := v.mount(dev, "ext4", volumeFlags, deadline); err != nil {
			return fmt.Errorf("mount the volume %s on %s: %w", dev, v.Dir, err)
		}
	}
	for _, s := range m.Config.Shares {
		if err := s.mount(s.Name, virtiofs, shareFlags, deadline); err != nil {
			return fmt.Errorf("mount the share %s on %s: %w", s.Name, s.Dir, err)
		}
	}
	return nil
}

func (o *Mount) mount(dev, fstype string, flags uintptr, deadline time.Time) error {
	if err := os.MkdirAll(o.Dir, 0o755); err != nil {
		return fmt.Errorf("make the directory: %w", err)
	}
	if o.ReadOnly {
		flags |= unix.MS_RDONLY
	}
	return mountDevice(dev, o.Dir, fstype, flags, deadline)
}

// findSerial returns the block device with that serial number. The letters of virtio disks depend on the order in
// which the kernel finds them.
func findSerial(dir, serial string, deadline time.Time) (dev string, err error) {
	err = await(deadline, func() (bool, error) {
		names, err := filepath.Glob(filepath.Join(dir, "*", "serial"))
		if err != nil {
			return false, err
		}
		for _, name := range names {
			if got, err := readSmall(name); err == nil && strings.TrimSpace(got) == serial {
				dev = "/dev/" + filepath.Base(filepath.Dir(name))
				return false, nil
			}
		}
		return true, fmt.Errorf("no disk has the serial number %s", serial)
	})
	return dev, err
}

// unmountOthers writes back what programs have changed, and makes the journals of the volumes clean, as far as
// possible.
func (m *Machine) unmountOthers() {
	unmount := func(mounts []Mount, flags uintptr) {
		for _, o := range slices.Backward(mounts) {
			if unix.Unmount(o.Dir, 0) != nil {
				_ = unix.Mount("", o.Dir, "", unix.MS_REMOUNT|unix.MS_RDONLY|flags, "")
			}
		}
	}
	unmount(m.Config.Shares, 0)
	unmount(m.Config.Volumes, volumeFlags)
}
