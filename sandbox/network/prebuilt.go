package network

import (
	"errors"
	"os"
	"sync"

	"github.com/drowse-vm/drowse/devices/net/tap"
	"github.com/drowse-vm/drowse/netpolicy/hostnet"
	"github.com/drowse-vm/drowse/netpolicy/link"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Prebuilt is the part of a VM's link to the host that can be made before the VM is known: a TAP device that is down,
// with programs that deny everything. It takes some 850 KiB of the kernel's memory. The methods may be called from any
// goroutine. A nil Prebuilt has nothing.
type Prebuilt struct {
	mu   sync.Mutex // guards what follows
	link *reserved  // nil once taken
	// failure is why there is no link: a VM that needs one makes it itself.
	failure error
}

// reserved is a link that no VM has yet. Its id is like that of a VM, so that the cleanup after killed processes finds
// it.
type reserved struct {
	id   string
	tap  *tap.Device
	link *link.Reserved
}

// NewPrebuilt makes a Prebuilt. A link that cannot be made is not an error: see New.
func NewPrebuilt() *Prebuilt {
	r, err := reserve()
	if errors.Is(err, os.ErrPermission) {
		err = nil // a helper makes the whole: see Helper
	}
	return &Prebuilt{link: r, failure: err}
}

func reserve() (_ *reserved, err error) {
	r := &reserved{id: spec.NewID()}
	if r.tap, err = tap.Create(hostnet.InterfaceName(r.id)); err != nil {
		return nil, err
	}
	if r.link, err = link.Reserve(link.Config{Endpoint: r.id, Interface: r.tap.Name()}); err != nil {
		return nil, errors.Join(err, r.tap.Close())
	}
	return r, nil
}

func (r *reserved) close() error { return errors.Join(r.link.Remove(), r.tap.Close()) }

// ID returns the id of the link that the next network takes; empty if there is none.
func (p *Prebuilt) ID() string {
	if p == nil {
		return ""
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.link == nil {
		return ""
	}
	return p.link.id
}

// take returns the link, or nil. err is why it could not be made.
func (p *Prebuilt) take() (r *reserved, err error) {
	if p == nil {
		return nil, nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	r, p.link = p.link, nil
	return r, p.failure
}

// Close removes the link, if it was not taken.
func (p *Prebuilt) Close() error {
	r, _ := p.take()
	if r == nil {
		return nil
	}
	return r.close()
}
