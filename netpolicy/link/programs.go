package link

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/bpf"
)

// ErrSlots means that a host has as many endpoints as it can have.
var ErrSlots = errors.New("there are too many endpoints")

// The root of pins has the directories of endpoints and, for each version of the programs, one that endpoints
// share. Its name is not valid for an endpoint.
//
//	_programs-DIGEST/ready      a link, made last: all others below exist. It says DIGEST/MARK, the mark of answers
//	_programs-DIGEST/MAP        the maps in which programs find those of an endpoint
//	_programs-DIGEST/slot-N     a link: the name of the endpoint that has slot N
//	ENDPOINT/slot                  a link: DIGEST/N/CLAIM
//	ENDPOINT/known-ADDRESS         a link: others know the endpoint by this address, 16 bytes in hexadecimal
//
// A process that makes or looks for a slot locks the shared directory. The programs live as long as they have a
// reference. Every endpoint's own program has one by the map of calls, which is also pinned in the endpoint's
// directory. So removing the shared directory does not affect existing endpoints.
const (
	programsPrefix = "_programs-"
	pinReady       = "ready"
	pinSlot        = "slot"
	slotPrefix     = "slot-"
	pinCalls       = "calls"
	pinPolicies    = "policies"
	pinUsages      = "usages"
	pinEndpoints   = "agents" // as in older versions, whose list is cleared by this name: see register
	pinFlows       = "flows"
	knownPrefix    = "known-"
)

// layout is the version of the loader's own conventions, apart from the objects: rows of the table, sizes, names
// of pins.
const layout = "4"

func digest() string { return bpf.Digest() + layout }

// programs has the open maps of the shared programs. All but calls, usages and endpoints are maps of maps, by slot.
type programs struct {
	calls, policies, usages, endpoints *ebpf.Map
	flows, pins, counters, stream      *ebpf.Map
	mark                               uint32 // of answers; only the process that loaded the programs knows it
}

func (p *programs) byName() map[string]**ebpf.Map {
	return map[string]**ebpf.Map{
		pinCalls: &p.calls, pinPolicies: &p.policies, pinUsages: &p.usages, pinEndpoints: &p.endpoints,
		pinFlows: &p.flows, "pins": &p.pins, "counters": &p.counters, "events": &p.stream,
	}
}

func (p *programs) close() error { return p.closeBut() }

// closeShared closes the maps that an endpoint with a slot no longer needs. In the wrong hands they could replace
// others' flows and events.
func (p *programs) closeShared() error { return p.closeBut(pinPolicies, pinUsages) }

// closeBut closes all maps except some.
func (p *programs) closeBut(names ...string) error {
	var errs []error
	for name, m := range p.byName() {
		if !slices.Contains(names, name) {
			errs = append(errs, (*m).Close()) // a nil map's Close does nothing
			*m = nil
		}
	}
	return errors.Join(errs...)
}

// kernelTypes caches the kernel's BTF, which is large.
var kernelTypes = btf.NewCache()

// loadPrograms makes the kernel verify and compile the programs, which takes up to half a second. Under test their
// clock stands still until the returned variable sets it.
func loadPrograms(testing bool) (_ *programs, clock *ebpf.Variable, err error) {
	spec, err := bpf.LoadEndpoint()
	if err != nil {
		return nil, nil, fmt.Errorf("reading the eBPF objects: %w", err)
	}
	if testing {
		if err := spec.Variables["testing"].Set(uint32(1)); err != nil {
			return nil, nil, fmt.Errorf("preparing the eBPF objects: %w", err)
		}
	}
	// Only the host marks packets. A random mark avoids a match by chance.
	mark, err := randomWord()
	if err != nil {
		return nil, nil, err
	}
	if err := spec.Variables["answer_mark"].Set(mark); err != nil {
		return nil, nil, fmt.Errorf("preparing the eBPF objects: %w", err)
	}
	var o bpf.EndpointObjects
	if err := spec.LoadAndAssign(&o, &ebpf.CollectionOptions{Cache: kernelTypes}); err != nil {
		if errors.Is(err, os.ErrPermission) {
			err = fmt.Errorf("%w: run as root, or with CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN", err)
		}
		return nil, nil, fmt.Errorf("loading the eBPF programs: %w: %w", ErrKernel, err)
	}
	p := &programs{
		calls: o.Calls, policies: o.Policies, usages: o.Usages, endpoints: o.Endpoints,
		flows: o.Flows, pins: o.Pins, counters: o.Counters, stream: o.Events, mark: mark,
	}
	err = o.ToWaker.Close() // GuardWaker loads its own
	for i, prog := range []*ebpf.Program{o.FromGuest, o.ToGuest} {
		err = errors.Join(err, p.calls.Put(uint32(i), prog), prog.Close())
	}
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("storing the eBPF programs: %w", err), p.close())
	}
	return p, o.TestNow, nil
}

// randomWord returns a random number that is not 0.
func randomWord() (uint32, error) {
	var b [4]byte
	if _, err := rand.Read(b[:]); err != nil {
		return 0, fmt.Errorf("choosing a random number: %w", err)
	}
	return binary.NativeEndian.Uint32(b[:]) | 1, nil
}

// shared is the directory of the programs that endpoints share, locked.
type shared struct {
	root, digest string
	dir          string
	lock         *os.File
}

// lockWithin is how long to wait for others that take or give back slots.
const lockWithin = 30 * time.Second

func programsDir(root, digest string) string { return filepath.Join(root, programsPrefix+digest) }

// lockShared locks the directory of a version of the programs. It makes the directory of this version if it is
// missing; for any other version it fails with os.ErrNotExist. It waits for other holders.
func lockShared(root, version string) (*shared, error) {
	dir := programsDir(root, version)
	ctx, cancel := context.WithTimeoutCause(context.Background(), lockWithin, fmt.Errorf("%w after %v", ErrBusy, lockWithin))
	defer cancel()
	for {
		if version == digest() {
			if err := os.MkdirAll(dir, bpffsMode); err != nil {
				return nil, fmt.Errorf("making the directory of the programs: %w", err)
			}
		}
		lock, err := osfile.OpenLocked(ctx, dir, lockFlags, 0, osfile.Exclusive)
		switch {
		case err == nil:
			return &shared{root, version, dir, lock}, nil
		case errors.Is(err, os.ErrNotExist) && version == digest() && ctx.Err() == nil:
			// Another process removed the directory before it was locked.
		default:
			return nil, fmt.Errorf("waiting for others who attach policies: %w", err)
		}
	}
}

func (s *shared) unlock() { s.lock.Close() }

// usable reports whether an open map has the type and sizes that its name implies: its pin may have been replaced
// by a foreign one.
func usable(name string, m *ebpf.Map) bool {
	kind, entries, value := ebpf.ArrayOfMaps, uint32(netpolicy.MaxEndpoints), uint32(4)
	switch name {
	case pinCalls:
		kind, entries = ebpf.ProgramArray, uint32(len(netpolicy.Directions))
	case pinEndpoints:
		return m.Type() == ebpf.Hash && m.MaxEntries() == 2*netpolicy.MaxEndpoints && m.KeySize() == 16 &&
			m.ValueSize() == uint32(binary.Size(bpf.EndpointTagged{}))
	case pinPolicies, pinFlows:
		entries = 2 * netpolicy.MaxEndpoints
	case pinUsages:
		kind, entries, value = ebpf.Array, 2*netpolicy.MaxEndpoints, uint32(binary.Size(bpf.EndpointUsage{}))
	}
	if m.Type() != kind || m.MaxEntries() != entries || m.KeySize() != 4 || m.ValueSize() != value {
		return false
	}
	if name != pinCalls {
		return true
	}
	for d := range entries {
		var program uint32
		if err := m.Lookup(d, &program); err != nil {
			return false // it would drop every packet
		}
	}
	return true
}

// open opens the pinned maps. A missing or unusable map is os.ErrNotExist.
func (s *shared) open() (_ *programs, err error) {
	if _, err := os.Readlink(filepath.Join(s.dir, pinReady)); err != nil {
		return nil, err
	}
	p := &programs{}
	for name, m := range p.byName() {
		if *m, err = ebpf.LoadPinnedMap(filepath.Join(s.dir, name), nil); err != nil {
			return nil, errors.Join(fmt.Errorf("opening the programs: %s: %w", name, err), p.close())
		}
		if !usable(name, *m) {
			return nil, errors.Join(fmt.Errorf("opening the programs: %s is something else: %w", name, os.ErrNotExist), p.close())
		}
	}
	return p, nil
}

// openOrLoad opens the programs, or loads them if they are missing.
func (s *shared) openOrLoad() (p *programs, loaded bool, err error) {
	p, err = s.open()
	if err == nil || !errors.Is(err, os.ErrNotExist) {
		return p, false, err
	}
	// This also removes the slots of endpoints that use older programs. Those endpoints do not give them back
	// later, since their claims are unknown here.
	if err := clearPins(s.dir); err != nil {
		return nil, false, err
	}
	if p, _, err = loadPrograms(false); err != nil {
		return nil, false, err
	}
	for name, m := range p.byName() {
		if err := (*m).Pin(filepath.Join(s.dir, name)); err != nil {
			return nil, false, errors.Join(fmt.Errorf("pinning %s of the programs: %w", name, err), p.close())
		}
	}
	if err := os.Symlink(fmt.Sprintf("%s/%d", s.digest, p.mark), filepath.Join(s.dir, pinReady)); err != nil {
		return nil, false, errors.Join(fmt.Errorf("pinning the programs: %w", err), p.close())
	}
	return p, true, nil
}

// place is where the programs find an endpoint: its slot, and its claim, the number by which they verify that the
// slot is still the endpoint's.
type place struct {
	version     string
	slot, claim uint32
}

// table returns the index of one of the endpoint's two tables in the map of policies.
func (p place) table(which uint32) uint32 { return p.slot*2 + which }

func (p place) String() string { return fmt.Sprintf("%s/%d/%d", p.version, p.slot, p.claim) }

// placeOf reads the place from an endpoint's directory.
func placeOf(dir string) (p place, err error) {
	text, err := os.Readlink(filepath.Join(dir, pinSlot))
	if err != nil {
		return p, err
	}
	words := strings.Split(text, "/")
	if len(words) == 3 {
		slot, err1 := strconv.ParseUint(words[1], 10, 32)
		claim, err2 := strconv.ParseUint(words[2], 10, 32)
		if errors.Join(err1, err2) == nil && slot < netpolicy.MaxEndpoints && endpointName.MatchString(words[0]) {
			return place{words[0], uint32(slot), uint32(claim)}, nil
		}
	}
	return p, fmt.Errorf("reading the slot of %s: %q is none: %w", dir, text, os.ErrNotExist)
}

func (s *shared) slotLink(slot uint32) string {
	return filepath.Join(s.dir, slotPrefix+strconv.FormatUint(uint64(slot), 10))
}

// take gives an endpoint a slot, searching from a random one. A slot is free if its endpoint's directory does not
// name it. take writes the endpoint's directory first; a slot that then is missing in the shared directory is
// free.
func (s *shared) take(endpoint string) (place, error) {
	first, err := randomWord()
	if err != nil {
		return place{}, err
	}
	return s.takeFrom(endpoint, first)
}

func (s *shared) takeFrom(endpoint string, first uint32) (p place, err error) {
	claim, err := randomWord()
	if err != nil {
		return p, err
	}
	dir := filepath.Join(s.root, endpoint)
	for i := range uint32(netpolicy.MaxEndpoints) {
		p = place{s.digest, (first + i) % netpolicy.MaxEndpoints, claim}
		owned, err := s.owned(s.slotLink(p.slot), p.slot)
		switch {
		case errors.Is(err, os.ErrNotExist):
		case err != nil:
			return p, err
		case owned:
			continue
		default:
			if err := os.Remove(s.slotLink(p.slot)); err != nil {
				return p, fmt.Errorf("taking a slot: %w", err)
			}
		}
		if err := os.Symlink(p.String(), filepath.Join(dir, pinSlot)); err != nil {
			return p, fmt.Errorf("taking a slot: %w", err)
		}
		if err := os.Symlink(endpoint, s.slotLink(p.slot)); err != nil {
			return p, fmt.Errorf("taking a slot: %w", err)
		}
		return p, nil
	}
	return p, fmt.Errorf("taking a slot: %w: %d", ErrSlots, netpolicy.MaxEndpoints)
}

// release gives a slot back, and empties it of its maps.
func (s *shared) release(endpoint string, p place) error {
	owner, err := os.Readlink(s.slotLink(p.slot))
	if errors.Is(err, os.ErrNotExist) || err == nil && owner != endpoint {
		return nil // it already belongs to another endpoint
	}
	if err != nil {
		return fmt.Errorf("giving back a slot: %w", err)
	}
	progs, err := s.open()
	if err == nil {
		err = errors.Join(s.unregister(endpoint, p.claim), progs.empty(p.slot), progs.close())
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := os.Remove(s.slotLink(p.slot)); err != nil {
		return fmt.Errorf("giving back a slot: %w", err)
	}
	return nil
}

// owned reports whether the endpoint that a slot's link names has that slot by its own directory.
func (s *shared) owned(link string, slot uint32) (bool, error) {
	owner, err := os.Readlink(link)
	if err != nil {
		return false, fmt.Errorf("looking for a slot: %w", err)
	}
	has, err := placeOf(filepath.Join(s.root, owner))
	return err == nil && has.version == s.digest && has.slot == slot, nil
}

// used reports whether any endpoint has a slot.
func (s *shared) used() (bool, error) {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return false, fmt.Errorf("looking for slots: %w", err)
	}
	for _, e := range entries {
		text, ok := strings.CutPrefix(e.Name(), slotPrefix)
		slot, err := strconv.ParseUint(text, 10, 32)
		if !ok || err != nil {
			continue
		}
		if owned, err := s.owned(filepath.Join(s.dir, e.Name()), uint32(slot)); owned || err != nil {
			return owned, err
		}
	}
	return false, nil
}

// Sweep removes programs that no endpoint uses, of all versions. The next endpoint loads them anew. An empty root
// is DefaultRoot.
func Sweep(root string) error { return unloadIdle(Config{Root: root}.root(), "") }

// SweepOld removes unused programs of other versions alone. So the only VM of a host, when it sleeps and wakes,
// need not wait for the kernel to verify the programs again. An empty root is DefaultRoot.
func SweepOld(root string) error { return unloadIdle(Config{Root: root}.root(), digest()) }

// unloadIdle removes the unused programs of all versions but keep.
func unloadIdle(root, keep string) error {
	entries, err := readRoot(root)
	if err != nil {
		return fmt.Errorf("listing programs: %w", err)
	}
	var errs []error
	for _, e := range entries {
		version, ok := strings.CutPrefix(e.Name(), programsPrefix)
		if !ok || version == keep || !e.IsDir() {
			continue
		}
		errs = append(errs, unload(root, version))
	}
	return errors.Join(errs...)
}

func unload(root, version string) error {
	dir := programsDir(root, version)
	lock, err := lockDir(dir)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, ErrBusy) {
		return nil // the process that holds the lock uses or removes it
	}
	if err != nil {
		return err
	}
	s := &shared{root, version, dir, lock}
	defer s.unlock()
	used, err := s.used()
	if err != nil || used {
		return err
	}
	return removePins(s.dir)
}

// slotMap is a map of an endpoint and the map of maps in which the programs find it.
type slotMap struct {
	of   *ebpf.Map
	slot uint32
	own  *ebpf.Map
}

// publish puts maps into slots whose previous content has no users. The kernel makes each writer wait until all
// processors have passed through a quiescent state, 10 to 100 ms, in case there are users. So publish returns once
// the maps are visible. wait waits for the writers and returns their errors.
func publish(maps []slotMap) (wait func() error, err error) {
	done := make(chan error, len(maps))
	for _, m := range maps {
		// Put the descriptor's number: once the map is visible its owner may close it while the writer still waits.
		fd := uint32(m.own.FD())
		go func() { done <- m.of.Put(m.slot, fd) }()
	}
	ended := 0
	wait = func() error {
		var errs []error
		for ; ended < len(maps); ended++ {
			errs = append(errs, <-done)
		}
		return errors.Join(errs...)
	}
	for _, m := range maps {
		id, err := mapID(m.own)
		if err != nil {
			return nil, errors.Join(err, wait())
		}
		for {
			var there ebpf.MapID
			if err := m.of.Lookup(m.slot, &there); err == nil && there == id {
				break
			}
			if ended == len(maps) {
				return nil, errors.New("an endpoint's map is not where it was put")
			}
			select {
			case err := <-done:
				if ended++; err != nil {
					return nil, errors.Join(fmt.Errorf("storing an endpoint's maps: %w", err), wait())
				}
			case <-time.After(publishPause):
			}
		}
	}
	return wait, nil
}

// publishPause is the pause between two looks, while a writer waits for a processor.
const publishPause = 50 * time.Microsecond

// empty takes all maps out of a slot. The writers wait in parallel.
func (p *programs) empty(slot uint32) error {
	at := place{slot: slot}
	all := []slotMap{
		{of: p.policies, slot: at.table(0)}, {of: p.policies, slot: at.table(1)},
		{of: p.flows, slot: at.table(0)}, {of: p.flows, slot: at.table(1)}, {of: p.pins, slot: slot}, {of: p.counters, slot: slot}, {of: p.stream, slot: slot},
	}
	done := make(chan error, len(all))
	for _, m := range all {
		go func() {
			err := m.of.Delete(m.slot)
			if errors.Is(err, ebpf.ErrKeyNotExist) {
				err = nil
			}
			done <- err
		}()
	}
	var errs []error
	for range all {
		errs = append(errs, <-done)
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("emptying a slot: %w", err)
	}
	return nil
}

// tagged returns an endpoint as the programs of others see it, without its device.
func tagged(claim, edition uint32, tags []string) bpf.EndpointTagged {
	v := bpf.EndpointTagged{Claim: claim, Edition: edition}
	for i, t := range tags {
		v.Tag[i] = netpolicy.TagHash(t)
	}
	return v
}

// register puts an endpoint with its tags into the list of endpoints, before its device is up. It first records in
// the endpoint's directory what unregister must take back. It also unregisters earlier owners of the addresses
// from programs of other versions: those do not know this endpoint, and would apply a dead one's tags.
func (s *shared) register(p *programs, endpoint string, id netpolicy.Identity, claim uint32, ifindex int, tags []string) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("registering endpoint %s: %w", endpoint, err)
		}
	}()
	mine := tagged(claim, 0, tags)
	mine.Ifindex = uint32(ifindex)
	if mine.Netns, err = netnsCookie(); err != nil {
		return err
	}
	var keys [][16]byte
	for _, a := range []netip.Addr{id.Address4, id.Address6} {
		if a.IsValid() {
			keys = append(keys, a.As16())
		}
	}
	others, err := filepath.Glob(programsDir(s.root, "*"))
	for _, dir := range others {
		if dir != s.dir {
			err = errors.Join(err, unregisterIn(dir, keys, 0))
		}
	}
	for _, k := range keys {
		if err == nil {
			err = os.Symlink(endpoint, filepath.Join(s.root, endpoint, knownPrefix+hex.EncodeToString(k[:])))
		}
		if err == nil {
			err = p.endpoints.Put(k, &mine)
		}
	}
	return err
}

// netnsCookie returns the kernel's cookie of this thread's network namespace (socket(7), SO_NETNS_COOKIE): an
// interface's index is unique only within one.
func netnsCookie() (uint64, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("making a socket: %w", err)
	}
	defer unix.Close(fd)
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		return 0, fmt.Errorf("asking for the network namespace: %w", err)
	}
	return cookie, nil
}

// retag changes the tags by which others know an endpoint, all tags of one address at once.
func (s *shared) retag(endpoint string, claim uint32, tags []string) error {
	keys, err := s.known(endpoint)
	if err != nil {
		return err
	}
	m, err := ebpf.LoadPinnedMap(filepath.Join(s.dir, pinEndpoints), nil)
	if err == nil && !usable(pinEndpoints, m) {
		err = errors.Join(os.ErrNotExist, m.Close())
	}
	if err != nil {
		return fmt.Errorf("opening the list of endpoints: %w", err)
	}
	defer m.Close()
	// Check all entries first: change nothing if one is missing.
	next := make([]bpf.EndpointTagged, len(keys))
	for i, k := range keys {
		var v bpf.EndpointTagged
		if err := m.Lookup(k, &v); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("looking for endpoint %s: %w", endpoint, err)
		}
		if v.Claim != claim {
			return fmt.Errorf("%w: others do not know %s by its address any more", ErrGone, endpoint)
		}
		next[i] = tagged(claim, v.Edition+1, tags)
		next[i].Ifindex, next[i].Netns = v.Ifindex, v.Netns
	}
	for i, k := range keys {
		if err := m.Update(k, &next[i], ebpf.UpdateExist); err != nil {
			return err
		}
	}
	return nil
}

// unregister undoes register.
func (s *shared) unregister(endpoint string, claim uint32) error {
	keys, err := s.known(endpoint)
	if err != nil {
		return err
	}
	return unregisterIn(s.dir, keys, claim)
}

// known returns the addresses by which others know an endpoint.
func (s *shared) known(endpoint string) (keys [][16]byte, err error) {
	entries, err := os.ReadDir(filepath.Join(s.root, endpoint))
	if err != nil {
		return nil, fmt.Errorf("looking for an endpoint's addresses: %w", err)
	}
	for _, e := range entries {
		if text, ok := strings.CutPrefix(e.Name(), knownPrefix); ok {
			if k, err := hex.DecodeString(text); err == nil && len(k) == 16 {
				keys = append(keys, [16]byte(k))
			}
		}
	}
	return keys, nil
}

// unregisterIn removes the entries of addresses from a list of endpoints, if they have this claim; 0 is any claim.
func unregisterIn(dir string, keys [][16]byte, claim uint32) error {
	m, err := ebpf.LoadPinnedMap(filepath.Join(dir, pinEndpoints), nil)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("opening the list of endpoints: %w", err)
	}
	defer m.Close()
	if m.KeySize() != 16 {
		return nil // a foreign map, or one of a version with another layout
	}
	for _, k := range keys {
		v, err := m.LookupBytes(k)
		if err == nil && len(v) >= 4 && (claim == 0 || binary.NativeEndian.Uint32(v) == claim) {
			err = m.Delete(k)
		}
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("taking an endpoint from the list of endpoints: %w", err)
		}
	}
	return nil
}

// resetUsage resets the usage of both directions of a slot.
func (p *programs) resetUsage(slot uint32) error {
	zero := make([]byte, p.usages.ValueSize())
	for d := range uint32(2) {
		if err := p.usages.Put(slot*2+d, zero); err != nil {
			return fmt.Errorf("resetting the use of the network: %w", err)
		}
	}
	return nil
}

// ownedByUs refuses a directory that another user could change.
func ownedByUs(dir string) error {
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return &os.PathError{Op: "lstat", Path: dir, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR || int(st.Uid) != os.Geteuid() || st.Mode&0o022 != 0 {
		return fmt.Errorf("%w: %s is not a directory that only user %d can write to: remove it", ErrRoot, dir, os.Geteuid())
	}
	return nil
}
