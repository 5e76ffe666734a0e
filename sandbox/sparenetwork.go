package sandbox

import (
	"errors"

	"github.com/drowse-vm/drowse/devices/net/tap"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// spareNetwork is what of a VM's link to the host can be made before anything is known of the VM: a TAP device that is down, with
// programs that deny everything. It is called by an id like that of a VM, so that what tidies up after killed processes finds it.
type spareNetwork struct {
	id   string
	tap  *tap.Device
	link *netpolicy.Reserved
}

func newSpareNetwork() (_ *spareNetwork, err error) {
	s := &spareNetwork{id: spec.NewID()}
	if s.tap, err = tap.Create(tap.Config{Name: tapName(s.id), Down: true}); err != nil {
		return nil, err
	}
	if s.link, err = netpolicy.Reserve(netpolicy.LinkConfig{Agent: s.id, Interface: s.tap.Name()}); err != nil {
		return nil, errors.Join(err, s.tap.Close())
	}
	return s, nil
}

func (s *spareNetwork) close() error { return errors.Join(s.link.Remove(), s.tap.Close()) }
