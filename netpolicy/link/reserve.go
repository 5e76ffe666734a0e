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

// Reserved is the part of a Link that does not depend on the endpoint's identity and policy: on an interface that
// is down, programs that deny every packet, and their maps. Attach turns it into a Link in a fraction of the time.
// Its methods must not run concurrently, and the last must be Attach or Remove. What a dead process left of a
// Reserved is removed like what it left of a Link.
type Reserved struct {
	link  *Link
	flows int
}

// Reserve does the part of Attach that needs no policy. It ignores the tags of cfg: Reserved.Attach takes them.
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

// Attach puts a policy into force, and tells other endpoints of this one and its tags: see the function Attach.
// The caller owns the Link. If Attach fails, the reservation is gone, and the interface is down.
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

// load takes a slot of the host's programs, makes the endpoint's maps and pins what it needs of the host.
func (l *Link) load(flows int) error {
	p, at, err := l.place()
	if err != nil {
		return err
	}
	if l.eng, err = newEngine(p, at, flows); err != nil {
		return err
	}
	// Pin the map of calls itself: the kernel empties it when it has no user. A clone is pinned, since Pin would
	// move the existing pin.
	calls, err := p.calls.Clone()
	if err == nil {
		defer calls.Close()
		err = calls.Pin(filepath.Join(l.cfg.dir(), pinCalls))
	}
	if err != nil {
		return fmt.Errorf("pinning the programs for endpoint %s: %w", l.cfg.Endpoint, err)
	}
	// This process must not be able to change the use of others' limits.
	usages, err := openUsages(programsDir(l.cfg.root(), at.version))
	if err != nil {
		return err
	}
	err = p.usages.Close()
	p.usages = usages
	return errors.Join(err, l.eng.announce())
}

// place opens or loads the shared programs and takes a slot.
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
		// Remove unused leftovers of other versions of drowse. A failure does not affect this endpoint; Sweep
		// tries again and reports it.
		_ = unloadIdle(l.cfg.root(), digest())
	}
	return p, at, err
}

// register puts the endpoint into the list that other endpoints' programs read.
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
