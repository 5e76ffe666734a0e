package state

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"

	"github.com/drowse-vm/drowse/netpolicy/hostnet"
	"github.com/drowse-vm/drowse/netpolicy/link"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// removeLeftNetwork removes what the killed process of a VM has left of its network: pins. They hold nothing open,
// since the device went with the process.
func removeLeftNetwork(r *Record) error {
	if r.Spec.Network != spec.NetworkTAP {
		return nil
	}
	id := cmp.Or(r.NetworkID, r.ID)
	err := link.Remove(link.Config{Endpoint: id, Interface: hostnet.InterfaceName(id)})
	if os.Geteuid() != 0 && (errors.Is(err, fs.ErrPermission) || errors.Is(err, link.ErrRoot)) {
		return nil // they are root's, and this VM's process was not
	}
	if err != nil && !errors.Is(err, link.ErrBusy) {
		return fmt.Errorf("tidying up the network of VM %s: %w", r.Spec.Name, err)
	}
	return nil
}

// SweepNetworks removes leftovers of killed VM processes of any store: files of addresses, and pins with names
// like ids, without a device and without a process that holds them. Only root makes them, so for other users it
// does nothing.
func SweepNetworks() error {
	if os.Geteuid() != 0 {
		return nil
	}
	names, err := link.Endpoints("")
	if err != nil {
		return err
	}
	errs := []error{hostnet.Sweep("")}
	for _, id := range names {
		if !IDPattern.MatchString(id) {
			continue
		}
		if _, err := net.InterfaceByName(hostnet.InterfaceName(id)); err == nil {
			continue
		}
		err := link.Remove(link.Config{Endpoint: id, Interface: hostnet.InterfaceName(id)})
		if err != nil && !errors.Is(err, link.ErrBusy) {
			errs = append(errs, err)
		}
	}
	// Now that the leftovers are gone, remove programs of other versions that no VM uses. Programs of this version
	// stay for the next VM: this runs after each sleep, and that may have been the only VM's.
	return errors.Join(append(errs, link.SweepOld(""))...)
}
