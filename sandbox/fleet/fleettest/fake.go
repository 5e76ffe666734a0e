package fleettest

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"maps"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/guest/audit"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/snapshot"
)

// VMs are virtual machines in memory: fleet.VMs without guests. What they do takes no time, and they fail as those of a
// store do. Memory and disk of each are one text, which Write changes and Read returns, and which sleeps, wakes,
// snapshots, restores and forks treat as a store treats memory and disk. Its methods may be called from any goroutine.
// Make it with New.
type VMs struct {
	// Now is the clock; New sets it to the host's. It must not be changed while the VMs are used.
	Now func() time.Time
	// Fail, if it is not nil, is asked before each operation ("run", "start", "wake", "sleep", "snapshot", "promote",
	// "restore", "fork", "rename", "remove") on a VM; an error of it is that of the operation, which has done nothing
	// then. It must not be changed while the VMs are used, and may be called from several goroutines.
	Fail func(op, name string) error

	labels sync.Mutex // held while metadata is changed

	mu    sync.Mutex // guards what follows
	vms   map[string]*vm
	snaps map[string]*snap
	gone  []*state.Removed // the newest last
	stamp int
	boots int
	wakes int
}

// vm is one of them.
type vm struct {
	record state.Record
	label  state.Metadata
	stamp  int
	state  string // memory and disk
	began  time.Time
	runs   []audit.Entry
}

// snap is a snapshot.
type snap struct {
	info   state.SnapshotInfo
	record state.Record
	state  string
}

// New makes an empty set.
func New() *VMs {
	return &VMs{Now: time.Now, vms: map[string]*vm{}, snaps: map[string]*snap{}}
}

var nameRE = regexp.MustCompile(spec.NamePattern)

func newID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

func (v *VMs) asked(ctx context.Context, op, name string) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%s %s: %w", op, name, err)
	}
	if v.Fail != nil {
		return v.Fail(op, name)
	}
	return nil
}

// find returns a VM. The mutex is held.
func (v *VMs) find(name string) (*vm, error) {
	m := v.vms[name]
	if m == nil {
		return nil, fmt.Errorf("%w: %s", sandbox.ErrNotFound, name)
	}
	return m, nil
}

func (v *VMs) changed(m *vm) {
	v.stamp++
	m.stamp = v.stamp
}

func (v *VMs) now() time.Time { return v.Now().UTC() }

func live(p state.Phase) bool { return p == state.Running || p == state.Starting }

// Counts says how many VMs were booted, and how many woken, so far.
func (v *VMs) Counts() (boots, wakes int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.boots, v.wakes
}

// Write replaces the memory and disk of a VM that runs.
func (v *VMs) Write(name, text string) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	m, err := v.find(name)
	if err != nil {
		return err
	}
	if m.record.Phase != state.Running {
		return fmt.Errorf("%w: %s is %s", sandbox.ErrNotRunning, name, m.record.Phase)
	}
	m.state = text
	return nil
}

// Read returns the memory and disk of a VM that runs.
func (v *VMs) Read(name string) (string, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	m, err := v.find(name)
	if err != nil {
		return "", err
	}
	if m.record.Phase != state.Running {
		return "", fmt.Errorf("%w: %s is %s", sandbox.ErrNotRunning, name, m.record.Phase)
	}
	return m.state, nil
}

// Ran notes that a command was run in a VM, as state.Store.Audit would tell of it.
func (v *VMs) Ran(name string, exit int, argv ...string) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	m, err := v.find(name)
	if err != nil {
		return err
	}
	if m.record.Phase != state.Running {
		return fmt.Errorf("%w: %s is %s", sandbox.ErrNotRunning, name, m.record.Phase)
	}
	now := v.now()
	m.runs = append(m.runs, audit.Entry{
		ID: newID()[:16], Status: audit.Ended, Begin: now, End: now,
		Action: audit.Action{Kind: audit.KindExec, Argv: argv, User: "root"}, Outcome: &audit.Outcome{Exit: &exit, CPUMs: 1},
	})
	return nil
}

// Kill has a VM end as if its process had got SIGKILL. One that does not run is left alone.
func (v *VMs) Kill(name string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if m := v.vms[name]; m != nil && live(m.record.Phase) {
		m.record.Phase, m.record.PID, m.record.Problem = state.Crashed, 0, "its process was killed"
		v.changed(m)
	}
}

// End has a VM's guest end by itself.
func (v *VMs) End(name string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if m := v.vms[name]; m != nil && live(m.record.Phase) {
		m.record.Phase, m.record.PID = state.Stopped, 0
		m.record.Exit = &state.ExitRecord{Reason: "power-off", Time: v.now()}
		v.changed(m)
	}
}

// up makes a VM run. The mutex is held.
func (v *VMs) up(m *vm) control.Report {
	m.record.Phase, m.record.PID, m.record.Problem, m.record.Exit = state.Running, 1, "", nil
	m.began = v.now()
	m.record.Awake = m.began
	v.changed(m)
	return control.Report{Name: m.record.Spec.Name, Stages: map[string]float64{}}
}

// Run implements fleet.VMs.
func (v *VMs) Run(ctx context.Context, want sandbox.Spec, label state.Metadata) (control.Report, error) {
	if want.Name == "" {
		want.Name = "vm-" + newID()[:8]
	}
	if err := v.asked(ctx, "run", want.Name); err != nil {
		return control.Report{}, err
	}
	switch {
	case !nameRE.MatchString(want.Name):
		return control.Report{}, fmt.Errorf("%w: name %q", sandbox.ErrSpec, want.Name)
	case want.Image == "":
		return control.Report{}, fmt.Errorf("%w: no image", sandbox.ErrSpec)
	}
	if err := check(want, label); err != nil {
		return control.Report{}, err
	}
	def := func(n *int, d int) {
		if *n == 0 {
			*n = d
		}
	}
	def(&want.VCPUs, spec.DefaultVCPUs)
	def(&want.MemoryMiB, spec.DefaultMemoryMiB)
	def(&want.DiskMiB, spec.DefaultDiskMiB)
	if want.Network == "" {
		want.Network = spec.NetworkNone
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.vms[want.Name] != nil {
		return control.Report{}, fmt.Errorf("%w: %s", sandbox.ErrExists, want.Name)
	}
	m := &vm{label: normal(label), record: state.Record{Version: 1, ID: newID(), Spec: want, Created: v.now()}}
	v.vms[want.Name] = m
	v.boots++
	return v.up(m), nil
}

func check(spec sandbox.Spec, label state.Metadata) error {
	if err := label.Check(); err != nil {
		return err
	}
	if label.Class == lifetime.Ephemeral && spec.Idle.SleepSeconds > 0 {
		return fmt.Errorf("%w: an ephemeral sandbox does not sleep", state.ErrMetadata)
	}
	return nil
}

// normal is metadata as it is kept.
func normal(l state.Metadata) state.Metadata {
	l.Tags, l.Persist = slices.Compact(slices.Sorted(slices.Values(l.Tags))), l.Persist.Clone()
	l.Expires = l.Expires.UTC().Truncate(time.Second)
	return l
}

func (v *VMs) expired(m *vm) error {
	if !lifetime.Expired(m.label.Expires, v.Now()) {
		return nil
	}
	return fmt.Errorf("%w: %s", state.ErrExpired, m.record.Spec.Name)
}

// Start implements fleet.VMs.
func (v *VMs) Start(ctx context.Context, name string) (control.Report, error) {
	if err := v.asked(ctx, "start", name); err != nil {
		return control.Report{}, err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	m, err := v.find(name)
	if err != nil {
		return control.Report{}, err
	}
	if live(m.record.Phase) {
		return control.Report{}, fmt.Errorf("%w: %s", sandbox.ErrRunning, name)
	}
	if err := v.expired(m); err != nil {
		return control.Report{}, err
	}
	if m.record.Phase == state.Asleep {
		return control.Report{}, fmt.Errorf("%w: %s is asleep", sandbox.ErrNotRunning, name)
	}
	v.boots++
	return v.up(m), nil
}

// Wake implements fleet.VMs.
func (v *VMs) Wake(ctx context.Context, name string) (control.Report, error) {
	if err := v.asked(ctx, "wake", name); err != nil {
		return control.Report{}, err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	m, err := v.find(name)
	if err != nil {
		return control.Report{}, err
	}
	if live(m.record.Phase) {
		return control.Report{Name: name, Stages: map[string]float64{}}, nil
	}
	if err := v.expired(m); err != nil {
		return control.Report{}, err
	}
	v.rotate(m)
	if m.record.Snapshot == "" || m.record.Phase == state.Stopped {
		return control.Report{}, fmt.Errorf("%w: %s has nothing to wake from", sandbox.ErrNotRunning, name)
	}
	if m.record.Phase == state.Crashed {
		v.take(m, "abandoned", "")
	}
	m.state = v.snaps[m.record.Snapshot].state
	v.wakes++
	return v.up(m), nil
}

// BringUp implements fleet.VMs.
func (v *VMs) BringUp(ctx context.Context, name string) (control.Report, error) {
	if r, err := v.Get(name); err == nil && r.Phase == state.Crashed {
		return v.Start(ctx, name)
	}
	return v.Wake(ctx, name)
}

// rotate takes a VM that is to be woken back to the snapshot of its rotation, if it is time. The mutex is held.
func (v *VMs) rotate(m *vm) {
	rot, r := m.label.Rotate, &m.record
	if rot.To == "" || !rot.At.IsZero() && v.now().Before(rot.At) {
		return
	}
	if r.Phase == state.Asleep && r.Snapshot != rot.To {
		r.Previous = r.Snapshot
	}
	r.Phase, r.Snapshot, r.Problem, r.Exit, r.Rotated = state.Asleep, rot.To, "", nil, rot.At
	switch step := time.Duration(rot.Every) * time.Second; {
	case rot.At.IsZero():
	case step == 0:
		m.label.Rotate = state.Rotation{}
	default:
		m.label.Rotate.At = rot.At.Add((v.now().Sub(rot.At)/step + 1) * step)
	}
	v.changed(m)
}

// checkRotation refuses a rotation that no wake could do, and completes the id of its snapshot. The mutex is held.
func (v *VMs) checkRotation(m *vm, rot *state.Rotation) error {
	if rot.To == "" || rot.To == m.label.Rotate.To {
		return nil
	}
	s, err := v.findSnap(rot.To)
	switch {
	case err != nil:
		return err
	case s.info.Owner != m.record.ID:
		return fmt.Errorf("%w: %s", state.ErrForeignSnapshot, s.info.VM)
	case s.info.Kind == "disk":
		return fmt.Errorf("%w: %s", state.ErrDiskOnly, s.info.ID)
	}
	rot.To = s.info.ID
	return nil
}

// take makes a snapshot. The mutex is held.
func (v *VMs) take(m *vm, kind, note string) *snap {
	s := &snap{record: m.record, state: m.state}
	s.info = state.SnapshotInfo{
		ID: newID(), VM: m.record.Spec.Name, Owner: m.record.ID, Kind: kind, Note: note, Created: v.now(),
		RAM: uint64(m.record.Spec.MemoryMiB) << 20, Stored: int64(len(m.state)) + 1, Exclusive: int64(len(m.state)) + 1,
	}
	v.snaps[s.info.ID] = s
	return s
}

// SleepWith implements fleet.VMs. Of what does not persist it has copies that are told of and are nowhere, and the
// limit, which is on the length of the text.
func (v *VMs) SleepWith(ctx context.Context, name string, o sandbox.SleepOptions) (control.SleepResult, error) {
	if err := v.asked(ctx, "sleep", name); err != nil {
		return control.SleepResult{}, err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	m, err := v.find(name)
	if err != nil {
		return control.SleepResult{}, err
	}
	r := &m.record
	var persisted *control.Persisted
	switch {
	case r.Phase == state.Asleep:
	case r.Phase != state.Running:
		return control.SleepResult{}, fmt.Errorf("%w: %s is %s", sandbox.ErrNotRunning, name, r.Phase)
	case m.label.Class == lifetime.Ephemeral:
		return control.SleepResult{}, fmt.Errorf("%w: %s is ephemeral", state.ErrMetadata, name)
	default:
		if persist := m.label.Persist; !persist.Empty() {
			persisted = &control.Persisted{}
			if o.Hooks != spec.HooksSkip {
				persisted.Promoted = v.promote(m)
			}
			if n := int64(len(m.state)); persist.MaxBytes > 0 {
				if persisted.DiskBytes = n; n > persist.MaxBytes {
					return control.SleepResult{}, fmt.Errorf("putting %s to sleep: %w", name, &control.PersistLimitError{Bytes: n, Max: persist.MaxBytes})
				}
			}
		}
		s := v.take(m, "sleep", "")
		r.Phase, r.PID, r.Snapshot, r.Previous = state.Asleep, 0, s.info.ID, ""
		r.Sleeps = append(slices.Clone(r.Sleeps), state.SleepRecord{
			Snapshot: s.info.ID, Awake: m.began, Asleep: s.info.Created, Raw: uint64(len(m.state)), Stored: s.info.Stored, CPUSeconds: 0.001,
		})
		v.changed(m)
		v.sweep()
	}
	res := control.SleepResult{Name: name, Snapshot: r.Snapshot, Stages: map[string]float64{}, Persist: persisted}
	for _, s := range r.Sleeps {
		if s.Snapshot == r.Snapshot {
			res.BytesRaw, res.BytesStored, res.Awake, res.Asleep, res.CPUSeconds = s.Raw, s.Stored, s.Awake, s.Asleep, s.CPUSeconds
		}
	}
	return res, nil
}

// promote says what the copies of a VM would be. The mutex is held.
func (v *VMs) promote(m *vm) []control.Promoted {
	var out []control.Promoted
	at := v.now().Format("20060102T150405.000000000Z")
	for _, p := range m.label.Persist.Promote {
		out = append(out, control.Promoted{Path: p.Path, At: path.Join(p.To, m.record.Spec.Name, at, p.Path), Entries: 1, Bytes: int64(len(m.state))})
	}
	return out
}

// Promote implements fleet.VMs, as SleepWith does.
func (v *VMs) Promote(ctx context.Context, name string) ([]control.Promoted, error) {
	if err := v.asked(ctx, "promote", name); err != nil {
		return nil, err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	m, err := v.find(name)
	if err != nil {
		return nil, err
	}
	if len(m.label.Persist.Promote) == 0 {
		return nil, fmt.Errorf("%w: nothing of %s is to be promoted", state.ErrMetadata, name)
	}
	if m.record.Phase != state.Running {
		return nil, fmt.Errorf("%w: %s is %s", sandbox.ErrNotRunning, name, m.record.Phase)
	}
	return v.promote(m), nil
}

// SnapshotWith implements fleet.VMs.
func (v *VMs) SnapshotWith(ctx context.Context, name string, o sandbox.SnapshotOptions) (control.SleepResult, error) {
	if err := v.asked(ctx, "snapshot", name); err != nil {
		return control.SleepResult{}, err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	m, err := v.find(name)
	if err != nil {
		return control.SleepResult{}, err
	}
	if m.record.Phase != state.Running {
		return control.SleepResult{}, fmt.Errorf("%w: %s is %s", sandbox.ErrNotRunning, name, m.record.Phase)
	}
	kind := "named"
	if o.DiskOnly {
		kind = "disk"
	}
	s := v.take(m, kind, o.Note)
	return control.SleepResult{Name: name, Snapshot: s.info.ID, BytesRaw: uint64(len(m.state)), BytesStored: s.info.Stored, Stages: map[string]float64{}}, nil
}

// RestoreTo implements fleet.VMs.
func (v *VMs) RestoreTo(ctx context.Context, name, snapshotID string) (*state.Record, error) {
	if err := v.asked(ctx, "restore", name); err != nil {
		return nil, err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	s, err := v.findSnap(snapshotID)
	if err != nil {
		return nil, err
	}
	m, err := v.find(name)
	if err != nil {
		return nil, err
	}
	r := &m.record
	switch {
	case live(r.Phase):
		return nil, fmt.Errorf("%w: %s", sandbox.ErrRunning, name)
	case s.info.Kind == "disk":
		return nil, fmt.Errorf("%w: %s", state.ErrDiskOnly, s.info.ID)
	case s.info.Owner != r.ID:
		return nil, fmt.Errorf("%w: %s", state.ErrForeignSnapshot, s.info.VM)
	}
	if rot := m.label.Rotate; rot.To != "" && rot.To != s.info.ID && (rot.At.IsZero() || !v.now().Before(rot.At)) {
		return nil, fmt.Errorf("%w: its next wake begins anew from snapshot %s", state.ErrMetadata, rot.To)
	}
	if r.Phase != state.Asleep || r.Snapshot != s.info.ID {
		if r.Phase == state.Asleep {
			r.Previous = r.Snapshot
		} else {
			v.take(m, "abandoned", "")
		}
		r.Phase, r.Snapshot, r.Problem, r.Exit = state.Asleep, s.info.ID, "", nil
		v.changed(m)
	}
	out := *r
	return &out, nil
}

func (v *VMs) findSnap(prefix string) (*snap, error) {
	var found []*snap
	for id, s := range v.snaps {
		if prefix != "" && strings.HasPrefix(id, prefix) {
			found = append(found, s)
		}
	}
	if len(found) != 1 {
		return nil, fmt.Errorf("snapshot %q: %w", prefix, snapshot.ErrNotFound)
	}
	return found[0], nil
}

// Fork implements fleet.VMs.
func (v *VMs) Fork(ctx context.Context, name string, o sandbox.ForkOptions) (sandbox.ForkResult, error) {
	if err := v.asked(ctx, "fork", name); err != nil {
		return sandbox.ForkResult{}, err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	m, err := v.find(name)
	if err != nil {
		return sandbox.ForkResult{}, err
	}
	children := slices.Clone(o.Children)
	for i := len(children); i < max(o.Count, 1) && len(o.Children) == 0; i++ {
		c := sandbox.ForkChild{Name: o.Name}
		if o.Count > 1 && o.Name != "" {
			c.Name += "-" + strconv.Itoa(i+1)
		}
		children = append(children, c)
	}
	if len(children) > sandbox.MaxForks {
		return sandbox.ForkResult{}, fmt.Errorf("%w: %d forks", sandbox.ErrSpec, len(children))
	}
	if m.record.Phase != state.Running && m.record.Phase != state.Asleep {
		return sandbox.ForkResult{}, fmt.Errorf("%w: %s is %s", sandbox.ErrNotRunning, name, m.record.Phase)
	}
	seen := map[string]bool{}
	for i := range children {
		c := &children[i]
		if c.Name == "" {
			c.Name = "vm-" + newID()[:8]
		}
		if c.Metadata == nil {
			c.Metadata = &m.label
		}
		switch {
		case !nameRE.MatchString(c.Name) || seen[c.Name]:
			return sandbox.ForkResult{}, fmt.Errorf("%w: name %q", sandbox.ErrSpec, c.Name)
		case v.vms[c.Name] != nil:
			return sandbox.ForkResult{}, fmt.Errorf("%w: %s", sandbox.ErrExists, c.Name)
		}
		if err := check(m.record.Spec, *c.Metadata); err != nil {
			return sandbox.ForkResult{}, err
		}
		seen[c.Name] = true
	}
	var s *snap
	if m.record.Phase == state.Asleep {
		s = v.snaps[m.record.Snapshot]
	} else {
		s = v.take(m, "fork", "")
	}
	res := sandbox.ForkResult{Parent: name, Snapshot: s.info.ID, Durable: true, Stages: map[string]float64{}}
	for _, c := range children {
		child := &vm{label: normal(*c.Metadata), state: s.state}
		child.record = state.Record{
			Version: 1, ID: newID(), Spec: m.record.Spec, Created: v.now(), Boot: m.record.Boot, Snapshot: s.info.ID, Parent: s.info.ID,
			Fork: &state.Origin{Parent: name, ParentID: m.record.ID, Generation: 1, Time: v.now()},
		}
		if m.record.Fork != nil {
			child.record.Fork.Generation += m.record.Fork.Generation
		}
		child.record.Spec.Name = c.Name
		v.vms[c.Name] = child
		res.Children = append(res.Children, v.up(child))
	}
	return res, nil
}

// Rename implements fleet.VMs.
func (v *VMs) Rename(ctx context.Context, name, to string) error {
	if err := v.asked(ctx, "rename", name); err != nil {
		return err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if !nameRE.MatchString(to) {
		return fmt.Errorf("%w: name %q", sandbox.ErrSpec, to)
	}
	m, err := v.find(name)
	there := v.vms[to]
	switch {
	case err != nil && there != nil && there.record.Former == name:
		return nil
	case err != nil:
		return err
	case name == to:
		return nil
	case live(m.record.Phase):
		return fmt.Errorf("%w: %s", sandbox.ErrRunning, name)
	case there != nil:
		return fmt.Errorf("%w: %s", sandbox.ErrExists, to)
	}
	delete(v.vms, name)
	m.record.Former, m.record.Spec.Name = name, to
	v.vms[to] = m
	v.changed(m)
	return nil
}

// RemoveFreed implements fleet.VMs.
func (v *VMs) RemoveFreed(ctx context.Context, name string, force bool) (state.Freed, error) {
	if err := v.asked(ctx, "remove", name); err != nil {
		return state.Freed{}, err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	m, err := v.find(name)
	if err != nil {
		return state.Freed{}, err
	}
	if live(m.record.Phase) && !force {
		return state.Freed{}, fmt.Errorf("%w: %s", sandbox.ErrRunning, name)
	}
	delete(v.vms, name)
	if m.label.Class != lifetime.Ephemeral {
		v.gone = append(v.gone, &state.Removed{Version: 1, Time: v.now(), Record: &m.record, Metadata: m.label, Runs: m.runs})
	}
	return v.sweep(), nil
}

// Removed implements fleet.VMs.
func (v *VMs) Removed(nameOrID string) (*state.Removed, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, g := range slices.Backward(v.gone) {
		if g.Record.Spec.Name == nameOrID || g.Record.ID == nameOrID {
			return g, nil
		}
	}
	return nil, fmt.Errorf("%w: %s", sandbox.ErrNotFound, nameOrID)
}

// ForgetRemoved implements fleet.VMs.
func (v *VMs) ForgetRemoved(before time.Time) (int64, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	n := len(v.gone)
	v.gone = slices.DeleteFunc(v.gone, func(g *state.Removed) bool { return g.Time.Before(before) })
	return int64(n - len(v.gone)), nil
}

// Get implements fleet.VMs.
func (v *VMs) Get(name string) (*state.Record, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	m, err := v.find(name)
	if err != nil {
		return nil, err
	}
	r := m.record
	return &r, nil
}

// List implements fleet.VMs.
func (v *VMs) List() ([]*state.Record, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	var out []*state.Record
	for _, name := range slices.Sorted(maps.Keys(v.vms)) {
		r := v.vms[name].record
		out = append(out, &r)
	}
	return out, nil
}

// FileStamps implements fleet.VMs.
func (v *VMs) FileStamps() (map[string]string, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	out := map[string]string{}
	for name, m := range v.vms {
		out[name] = m.record.ID + "." + strconv.Itoa(m.stamp)
	}
	return out, nil
}

// Metadata implements fleet.VMs.
func (v *VMs) Metadata(name string) (state.Metadata, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	m, err := v.find(name)
	if err != nil {
		return state.Metadata{}, err
	}
	l := m.label
	l.Tags, l.Persist = slices.Clone(l.Tags), l.Persist.Clone()
	return l, nil
}

// SetMetadata implements fleet.VMs.
func (v *VMs) SetMetadata(ctx context.Context, name string, change func(l *state.Metadata, unreadable error) error) (state.Metadata, error) {
	if err := ctx.Err(); err != nil {
		return state.Metadata{}, err
	}
	v.labels.Lock()
	defer v.labels.Unlock()
	l, err := v.Metadata(name)
	if err != nil {
		return state.Metadata{}, err
	}
	v.mu.Lock()
	is := v.vms[name]
	v.mu.Unlock()
	if err := change(&l, nil); err != nil {
		return state.Metadata{}, err
	}
	l = normal(l)
	if err := l.Check(); err != nil {
		return state.Metadata{}, err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if is == nil || v.vms[is.record.Spec.Name] != is {
		return state.Metadata{}, fmt.Errorf("%w: %s", sandbox.ErrNotFound, name)
	}
	if err := v.checkRotation(is, &l.Rotate); err != nil {
		return state.Metadata{}, err
	}
	is.label = l
	v.changed(is)
	return l, nil
}

// TellExpired implements fleet.VMs.
func (v *VMs) TellExpired(ctx context.Context, name string) error {
	_, err := v.SetMetadata(ctx, name, func(l *state.Metadata, unreadable error) error {
		if unreadable == nil && lifetime.Expired(l.Expires, v.now()) {
			l.ExpiryTold = l.Expires
		}
		return nil
	})
	return err
}

// SetSpec implements fleet.VMs.
func (v *VMs) SetSpec(_ context.Context, name string, c spec.Changes) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	m, err := v.find(name)
	if err != nil {
		return err
	}
	want := &m.record.Spec
	if c.Idle != nil || c.Hooks != nil || c.VCPUs != nil || c.MemoryMiB != nil {
		if live(m.record.Phase) {
			return fmt.Errorf("%w: %s", sandbox.ErrRunning, name)
		}
		if m.record.Phase == state.Asleep && (c.VCPUs != nil && *c.VCPUs != want.VCPUs || c.MemoryMiB != nil && *c.MemoryMiB != want.MemoryMiB) {
			return fmt.Errorf("%w: its CPUs and memory are part of what it sleeps in", sandbox.ErrSpec)
		}
	}
	set(&want.Idle, c.Idle)
	set(&want.Hooks, c.Hooks)
	set(&want.VCPUs, c.VCPUs)
	set(&want.MemoryMiB, c.MemoryMiB)
	if c.Policy != nil {
		if want.Network != spec.NetworkTAP {
			return fmt.Errorf("%w: %s has no network", sandbox.ErrSpec, name)
		}
		want.Policy = c.Policy
	}
	v.changed(m)
	return nil
}

func set[T any](to, from *T) {
	if from != nil {
		*to = *from
	}
}

// Snapshots implements fleet.VMs.
func (v *VMs) Snapshots() ([]state.SnapshotInfo, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	var out []state.SnapshotInfo
	for _, id := range slices.Sorted(maps.Keys(v.snaps)) {
		out = append(out, v.snaps[id].info)
	}
	return out, nil
}

// TagSnapshot implements fleet.VMs.
func (v *VMs) TagSnapshot(prefix string, tags []string) (state.SnapshotInfo, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	s, err := v.findSnap(prefix)
	if err != nil {
		return state.SnapshotInfo{}, err
	}
	if err := (state.Metadata{Tags: tags}).Check(); err != nil {
		return state.SnapshotInfo{}, err
	}
	s.info.Tags, s.info.Kept = slices.Compact(slices.Sorted(slices.Values(tags))), len(tags) > 0
	return s.info, nil
}

// Sweep implements fleet.VMs.
func (v *VMs) Sweep(context.Context) (state.Freed, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.sweep(), nil
}

// SweepAbandoned implements fleet.VMs.
func (v *VMs) SweepAbandoned(ctx context.Context) (state.Freed, error) {
	v.mu.Lock()
	var n int
	for id, s := range v.snaps {
		if s.info.Kind == "abandoned" && !s.info.Kept {
			delete(v.snaps, id)
			n++
		}
	}
	v.mu.Unlock()
	freed, err := v.Sweep(ctx)
	freed.Snapshots += n
	return freed, err
}

func (v *VMs) sweep() (freed state.Freed) {
	var all []lifetime.Sandbox
	needed := map[string]bool{}
	for _, m := range v.vms {
		r := &m.record
		needs := []string{r.Snapshot, r.Previous, r.Base, m.label.Rotate.To}
		for _, id := range needs {
			needed[id] = true
		}
		all = append(all, lifetime.Sandbox{ID: r.ID, Keep: m.label.Keep, Running: live(r.Phase), Needs: needs})
	}
	var sleeps []lifetime.Sleep
	drop := []string{}
	for id, s := range v.snaps {
		switch s.info.Kind {
		case "sleep":
			sleeps = append(sleeps, lifetime.Sleep{ID: id, Owner: s.info.Owner, Created: s.info.Created, Tagged: s.info.Kept})
		case "fork":
			if !needed[id] && !s.info.Kept {
				drop = append(drop, id)
			}
		}
	}
	for _, s := range lifetime.Unkept(all, sleeps, v.Now()) {
		drop = append(drop, s.ID)
	}
	for _, id := range drop {
		freed.Snapshots++
		freed.Bytes += v.snaps[id].info.Exclusive
		delete(v.snaps, id)
	}
	return freed
}

// Audit implements fleet.VMs.
func (v *VMs) Audit(ctx context.Context, name string, o audit.ReadOptions, f func(audit.Entry) error) (audit.Trailer, error) {
	v.mu.Lock()
	m, err := v.find(name)
	if err != nil {
		v.mu.Unlock()
		return audit.Trailer{}, err
	}
	is, runs := audit.Trailer{Head: audit.Head{VM: m.record.ID, Name: name}, First: 1}, slices.Clone(m.runs)
	v.mu.Unlock()
	for _, e := range runs {
		if err := ctx.Err(); err != nil {
			return is, err
		}
		if !o.Since.IsZero() && e.Begin.Before(o.Since) && e.End.Before(o.Since) {
			continue
		}
		if err := f(e); err != nil {
			return is, err
		}
	}
	return is, nil
}
