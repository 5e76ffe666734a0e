package instance

import (
	"errors"
	"fmt"
	"net"
	"time"

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
	err := errors.Join(vmm.OpenAhead(), snapshot.OpenAhead(), pager.OpenAhead(), libraryAhead())
	if err != nil {
		return fmt.Errorf("preparing a process that can open no files: %w", err)
	}
	return nil
}

// libraryAhead has Go's library read what it reads by path at the first use: the time zone for the text of a time, and
// the kernel's limit of waiting connections for a listener.
func libraryAhead() error {
	time.Now().Zone()
	l, err := net.ListenUnix("unix", &net.UnixAddr{}) // the kernel chooses an abstract name (unix(7), autobind)
	if err != nil {
		return err
	}
	return l.Close()
}
