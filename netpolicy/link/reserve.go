package link

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"github.com/vishvananda/netlink"

	"github.com/drowse-vm/drowse/netpolicy"
)

// Reserved is what of a Link does not depend on whose it will be: on an interface that is down, programs which deny
// every packet, and their maps. Attach makes it a Link in a fraction of the time. Its methods are not to be called at
// the same time, and the last is Attach or Remove. What a dead process has left of one is removed like what it has left
// of a Link.
type Reserved struct {
	link  *Link
	flows int
}

// Reserve begins what Attach does, for a policy that may come later. The tags of cfg are Reserved.Attach's.
func Reserve(cfg Config) (*Reserved, error) { return reserve(cfg, netpolicy.DefaultFlows) }

func reserve(cfg Config, flows int) (_ *Reserved, err error) {
	if err := cfg.checkName(); err != nil {
		return nil, err
	}
	if err := prepareRoot(cfg.root()); err != nil {
		return nil, err
	}
	nl, err := findInterface(cfg.Interface)
	if err != nil {
		return nil, err
	}
	if nl.Attrs().Flags&net.FlagUp != 0 {
		return nil, fmt.Errorf("attaching a policy to %q: %w: set it down first, so that nothing passes before the policy is there", cfg.Interface, ErrUp)
	}
	l := &Link{cfg: cfg, index: nl.Attrs().Index}
	if err := os.MkdirAll(cfg.dir(), bpffsMode); err != nil {
		return nil, fmt.Errorf("making the directory of an endpoint's pins: %w", err)
	}
	if l.lock, err = lockDir(cfg.dir()); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.Remove())
		}
	}()
	if err := clearEndpoint(cfg); err != nil {
		return nil, err
	}
	if err := netlink.LinkSetHardwareAddr(nl, netpolicy.TheWire.GatewayMAC[:]); err != nil {
		return nil, fmt.Errorf("giving %q the gateway's MAC: %w", cfg.Interface, err)
	}
	if err := l.load(flows); err != nil {
		return nil, err
	}
	if err := addFilters(nl, l.eng.sides()); err != nil {
		return nil, err
	}
	return &Reserved{link: l, flows: flows}, nil
}

// Attach puts a policy into force, and tells other endpoints of this one and its tags: see the function of that name.
// The Link is the caller's. If it fails, what was reserved is gone, and the interface is down.
func (r *Reserved) Attach(tags []string, spec *netpolicy.Spec) (_ *Link, err error) {
	l := r.link
	defer func() {
		if err != nil {
			err = errors.Join(err, l.Remove())
		}
	}()
	if err := netpolicy.CheckTags(tags); err != nil {
		return nil, err
	}
	l.cfg.Tags = tags
	if spec.Flows() != r.flows {
		if err := l.eng.track(spec.Flows()); err != nil {
			return nil, err
		}
	}
	if err := l.register(spec.Identity()); err != nil {
		return nil, err
	}
	return l, l.eng.start(spec, false)
}

// Remove takes everything away, as Link.Remove does.
func (r *Reserved) Remove() error { return r.link.Remove() }

// load takes a slot of the host's programs, makes its maps and pins what it needs of the host.
func (l *Link) load(flows int) error {
	p, at, err := l.place()
	if err != nil {
		return err
	}
	if l.eng, err = newEngine(p, at, flows); err != nil {
		return err
	}
	// The map of calls is pinned for its own sake: the kernel empties it when nobody has it.
	// Pin would move the pin of one that is pinned.
	calls, err := p.calls.Clone()
	if err == nil {
		defer calls.Close()
		err = calls.Pin(filepath.Join(l.cfg.dir(), pinCalls))
	}
	if err != nil {
		return fmt.Errorf("pinning the programs for endpoint %s: %w", l.cfg.Endpoint, err)
	}
	// The use of others' limits is nothing that this process should be able to change.
	usages, err := openUsages(programsDir(l.cfg.root(), at.version))
	if err != nil {
		return err
	}
	err = p.usages.Close()
	p.usages = usages
	return errors.Join(err, l.eng.announce())
}

// place takes a slot.
func (l *Link) place() (*programs, place, error) {
	s, err := lockShared(l.cfg.root(), digest())
	if err != nil {
		return nil, place{}, err
	}
	p, first, err := s.openOrLoad()
	var at place
	if err == nil {
		if at, err = s.take(l.cfg.Endpoint); err != nil {
			err = errors.Join(err, p.close())
		}
	}
	s.unlock()
	if err == nil && first {
		// What other versions of drowse have left, and nobody uses. If that fails, this endpoint
		// is none the worse; Sweep tries again, and tells.
		_ = unloadIdle(l.cfg.root(), digest())
	}
	return p, at, err
}

// register puts the endpoint into the list that others look in.
func (l *Link) register(id netpolicy.Identity) error {
	s, err := lockShared(l.cfg.root(), l.eng.place.version)
	if err != nil {
		return err
	}
	defer s.unlock()
	owner, err := os.Readlink(s.slotLink(l.eng.place.slot))
	if errors.Is(err, os.ErrNotExist) || err == nil && owner != l.cfg.Endpoint {
		err = fmt.Errorf("%w: its place is another's", ErrGone)
	}
	if err != nil {
		return fmt.Errorf("attaching a policy for endpoint %s: %w", l.cfg.Endpoint, err)
	}
	return s.register(l.eng.shared, l.cfg.Endpoint, id, l.eng.place.claim, l.index, l.cfg.Tags)
}
