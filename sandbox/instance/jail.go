package instance

import (
	"errors"
	"fmt"

	"github.com/drowse-vm/drowse/devices/fs"
	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/snapshot/pagecache"
	"github.com/drowse-vm/drowse/snapshot/pager"
	"github.com/drowse-vm/drowse/vmm"
)

// PrepareJail opens and reads whatever instances would open by path later: devices and files of /proc. Afterwards
// this process may lose its view of the file system. All that instances then do needs only Parts.Files and
// Parts.Socket, except for a network.
func PrepareJail() error {
	disk.OpenAhead()
	pagecache.OpenAhead()
	if err := errors.Join(vmm.OpenAhead(), snapshot.OpenAhead(), pager.OpenAhead(), fs.OpenAhead()); err != nil {
		return fmt.Errorf("preparing a process that can open no files: %w", err)
	}
	return nil
}
