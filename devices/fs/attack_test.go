package fs

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/devices/devicetest"
)

// What a guest brings about itself by too many files or a position beyond the end of one is its own failure: the machine's owner, who
// would write it into a log, hears nothing of it.
func TestAttack_limits_that_a_guest_reaches_are_no_failures_of_the_host(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "f"), []byte("text"), 0o644); err != nil {
		t.Fatal(err)
	}
	c := &client{t: t}
	c.Driver = devicetest.NewDriver(t, New(openDir(t, dir, true), "share", Options{OnError: func(err error) {
		t.Errorf("the owner was told: %v", err)
	}}), devicetest.NewMemory(t))
	c.Start(devicetest.AllFeatures)
	c.mustDo(opInit, 0, words(7, 37, 1<<20, ^uint32(0)), initOutSize)
	f := c.lookup(rootID, "f")
	fh := c.open(f, unix.O_RDWR)
	c.want(unix.ENXIO, opLseek, f, append(longs(fh, 1000), words(unix.SEEK_DATA, 0)...), 8)
	c.WithDevice(func(dev devices.Device) {
		d := dev.(*Device)
		d.mu.Lock()
		defer d.mu.Unlock()
		for len(d.handles) < MaxHandles {
			d.tree.open(d.nodes[f], -1, 0, false)
		}
	})
	c.want(unix.ENFILE, opOpen, f, words(0, 0), openOutSize)
	c.want(unix.ENFILE, opOpendir, rootID, words(0, 0), openOutSize)
}
