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

// blockDir lists the block devices. A virtio disk's serial number is in its file
// "serial" (Documentation/ABI/stable/sysfs-block).
const blockDir = "/sys/block"

// mountVolumes mounts the volumes that the command line names. A volume that
// cannot be mounted ends the boot: a program that finds an empty directory in its
// place would put its data where they are lost.
func (m *Machine) mountVolumes() error {
	deadline := time.Now().Add(m.Config.Wait)
	for _, v := range m.Config.Volumes {
		dev, err := findSerial(blockDir, v.Serial, deadline)
		if err != nil {
			return fmt.Errorf("find the volume for %s: %w", v.Dir, err)
		}
		if err := os.MkdirAll(v.Dir, 0o755); err != nil {
			return fmt.Errorf("make the directory for a volume: %w", err)
		}
		flags := uintptr(unix.MS_NOATIME)
		if v.ReadOnly {
			flags |= unix.MS_RDONLY
		}
		if err := mountDisk(dev, v.Dir, "ext4", flags, deadline); err != nil {
			return fmt.Errorf("mount the volume %s on %s: %w", dev, v.Dir, err)
		}
	}
	return nil
}

// findSerial returns the device of a block device with that serial number. The
// letters of virtio disks go by the order in which they are found.
func findSerial(dir, serial string, deadline time.Time) (string, error) {
	for wait := firstPoll; ; wait = min(2*wait, lastPoll) {
		names, err := filepath.Glob(filepath.Join(dir, "*", "serial"))
		if err != nil {
			return "", err
		}
		for _, name := range names {
			if got, err := readSmall(name); err == nil && strings.TrimSpace(got) == serial {
				return "/dev/" + filepath.Base(filepath.Dir(name)), nil
			}
		}
		if !time.Now().Before(deadline) {
			return "", fmt.Errorf("no disk has the serial number %s", serial)
		}
		time.Sleep(wait)
	}
}

// unmountVolumes makes the journals of the volumes clean, as far as that is
// possible.
func (m *Machine) unmountVolumes() {
	for _, v := range slices.Backward(m.Config.Volumes) {
		if unix.Unmount(v.Dir, 0) != nil {
			_ = unix.Mount("", v.Dir, "", unix.MS_REMOUNT|unix.MS_RDONLY|unix.MS_NOATIME, "")
		}
	}
}
