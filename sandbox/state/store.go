package state

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/lazyregexp"
	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/hosthooks"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/template"
	"github.com/drowse-vm/drowse/snapshot"
)

// MaxSocketPath is the longest path of a Unix socket, in bytes (unix(7)).
const MaxSocketPath = 107

// CheckPaths refuses a name whose sockets would have paths that are too long.
func (s *Store) CheckPaths(name string) error {
	if n := len(guest.SelfPath(s.VsockPath(name))); n > MaxSocketPath {
		return fmt.Errorf("%w: the paths of its sockets have %d bytes, and %d are possible: use a shorter name or state directory", spec.ErrInvalid, n, MaxSocketPath)
	}
	return nil
}

// ErrBetween means that a VM is between two phases, for some milliseconds. The caller must look again.
var ErrBetween = errors.New("the VM is falling asleep or being woken")

// GoBack makes a VM without a process sleep in a snapshot.
func (r *Record) GoBack(m *snapshot.Manifest) {
	r.Disk = SnapshotStack(m)
	var then Record
	if json.Unmarshal([]byte(m.Labels[LabelRecord]), &then) == nil && then.Version == RecordVersion {
		// Those that its memory has.
		r.Spec.Services = then.Spec.Services
		r.Spec.VCPUs, r.Spec.MemoryMiB = then.Spec.VCPUs, then.Spec.MemoryMiB
	}
	r.Phase, r.PID, r.Problem, r.Exit = Asleep, 0, "", nil
	r.NextLayer++ // its last layer belongs to the disk that it leaves: see LastLayer
}

// SnapshotStack returns the writable disk in a snapshot.
func SnapshotStack(m *snapshot.Manifest) disk.Stack {
	for _, d := range m.Disks {
		if d.Name == instance.DeviceDisk {
			return disk.Stack{Layers: d.Layers}
		}
	}
	return disk.Stack{}
}

// Manifest returns the manifest of a snapshot.
func (s *Store) Manifest(id string) (*snapshot.Manifest, error) {
	snap, err := snapshot.Open(s.SnapshotDir(id))
	if errors.Is(err, snapshot.ErrNotFound) && s.IsArriving(id) {
		err = arrivingError(id)
	}
	if err != nil {
		return nil, err
	}
	m := snap.Manifest()
	return m, snap.Close()
}

// Creating reports whether a VM is being made: it has not come up yet, and has never slept.
func (r *Record) Creating() bool {
	return r.Phase == Starting && len(r.Sleeps) == 0 && (r.Snapshot == "" || r.Snapshot == r.Parent || r.Snapshot == r.Template)
}

// SleptAfter reports whether a VM has slept since an earlier look at its record.
func (r *Record) SleptAfter(before *Record) bool {
	n := len(r.Sleeps)
	return n > 0 && r.Sleeps[n-1].Snapshot == r.Snapshot && r.Snapshot != before.Snapshot && r.ID == before.ID
}

// Origin says which VM another one is a fork of. The snapshot of the fork is Record.Parent.
type Origin struct {
	// Parent is the name that the other VM had, and ParentID its id.
	Parent   string `json:"parent"`
	ParentID string `json:"parent_id"`
	// Generation is 1 for a fork of a VM that is not a fork, 2 for a fork of that.
	Generation int       `json:"generation"`
	Time       time.Time `json:"time"`
	// Asked says that the guest of the parent has asked for the fork: see spec.Self.
	Asked bool `json:"asked,omitempty"`
}

// Origin returns the origin of a fork of r.
func (r *Record) Origin() *Origin {
	o := &Origin{Parent: r.Spec.Name, ParentID: r.ID, Generation: 1, Time: time.Now().UTC()}
	if r.Fork != nil {
		o.Generation += r.Fork.Generation
	}
	return o
}

// adoptFork makes a VM that has not slept come back from the snapshot of its fork, once that is on disk. The
// parent's process writes it. Until then the record says that the VM has nothing to come back from.
func (s *Store) adoptFork(r *Record) {
	if r.Fork == nil || r.Snapshot != "" || r.Parent == "" {
		return
	}
	if _, err := os.Stat(filepath.Join(s.SnapshotDir(r.Parent), snapshot.ManifestName)); err == nil {
		r.Snapshot = r.Parent
	}
}

// IDPattern matches ids of VMs and snapshots.
var IDPattern = lazyregexp.New(`^[0-9a-f]{32}$`)

// PoolSocket returns the socket of the process that serves a pool.
func (s *Store) PoolSocket() string { return filepath.Join(s.Dir(), "pool.sock") }

// MemoryOf returns an id that a VM shares with all VMs that began with its memory, and so with what that has of
// its proxy.
func (r *Record) MemoryOf() string {
	if r.Lineage != "" {
		return r.Lineage
	}
	return r.ID
}

// Inherit records what a VM that is made of another one's memory has of its proxy.
func (r *Record) Inherit(from *Record) {
	// A snapshot may come from elsewhere.
	if l := from.MemoryOf(); IDPattern.MatchString(l) {
		r.Lineage, r.TrustedCA = l, from.TrustedCA
	}
}

// Store is a directory that holds everything of a set of VMs. Any number of
// processes may use one at once. The zero value is unusable; see OpenStore.
//
//	vms/NAME/vm.json       the record, replaced by renaming
//	vms/NAME/lock          held by the VM's process as long as it lives
//	vms/NAME/sandbox.json  its Metadata, replaced by renaming; sandbox.lock is held meanwhile
//	vms/NAME/*.sock        control.sock, vsock.sock: of the VM's process
//	vms/NAME/*.log         console.log: serial port; vmm.log: the process
//	vms/NAME/audit.jsonl*  what was done in it through its agent: package audit
//	proxy.key              what the proxies of VMs are believed by: a secret of this host's
//	pool.sock, pool.lock   of the process that serves a pool: Pool.Serve
//	layers/ID-N            layers of writable disks; ID is the VM's that wrote it
//	layers/ext4-*          the empty file systems that these begin with
//	snapshots/ID/          snapshots
//	removed/               histories of removed VMs: Removed
//	events/        what became of VMs: package events
//	hooks.d/       the operator's, for what becomes of VMs: package hosthooks
//	volumes/NAME/          volumes: package volume
//	templates/             which snapshots stand for a boot: package template
//	pages/                 pages of snapshots that were woken before: package pagecache
//	images/, kernels/, downloads/, cache/   of packages image, kernel and others
type Store struct {
	dir string
	// hostHooks never change.
	hostHooks []hosthooks.Func
	// FS is where records are written, for tests of failures. Grace is graceTime, for tests that do not wait.
	FS    osfile.FS
	Grace time.Duration
}

// OpenStore opens or makes a store. dir is made absolute.
func OpenStore(dir string) (*Store, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("opening the state directory: %w", err)
	}
	s := &Store{dir: dir, FS: osfile.OS, Grace: graceTime}
	err, empty := os.MkdirAll(dir, 0o700), true
	for _, d := range []string{"vms", "layers", "snapshots"} {
		merr := os.Mkdir(filepath.Join(dir, d), 0o700)
		if empty = empty && merr == nil; !errors.Is(merr, fs.ErrExist) {
			err = errors.Join(err, merr)
		}
	}
	if err == nil && empty {
		err = s.lend(lentComplete)
	}
	if err != nil {
		return nil, fmt.Errorf("opening the state directory: %w: name another with --state or $DROWSE_STATE", err)
	}
	return s, nil
}

// Dir returns the store's directory.
func (s *Store) Dir() string { return s.dir }

// ImageDir returns the directory for package image.
func (s *Store) ImageDir() string { return s.dir }

// KernelDir returns the directory for package kernel.
func (s *Store) KernelDir() string { return s.dir }

// CacheDir returns the directory of system disks and initramfs archives.
func (s *Store) CacheDir() string { return filepath.Join(s.dir, "cache") }

// PageCacheDir returns the directory for package pagecache. It is not below CacheDir, which several stores may
// share: a store sweeps out the pages of all snapshots but its own.
func (s *Store) PageCacheDir() string { return filepath.Join(s.dir, "pages") }

// oldPageCacheDir is the former place of those pages. They are parts of guests' memory, so they must not stay behind.
func (s *Store) oldPageCacheDir() string { return filepath.Join(s.CacheDir(), "pages") }

// Templates returns the store's templates.
func (s *Store) Templates() template.Dir { return template.In(s.dir) }

// VMDir returns a VM's own directory.
func (s *Store) VMDir(name string) string { return filepath.Join(s.dir, "vms", name) }

// RecordPath returns the file of a VM's record.
func (s *Store) RecordPath(name string) string { return filepath.Join(s.VMDir(name), "vm.json") }

// LayerDir returns the directory of the layers of writable disks.
func (s *Store) LayerDir() string { return filepath.Join(s.dir, "layers") }

// ControlSocket returns the socket on which a VM's process answers.
func (s *Store) ControlSocket(name string) string {
	return filepath.Join(s.VMDir(name), "control.sock")
}

// Listens reports whether there is a control socket of a VM. A VM that sleeps has none, but that of a process that was
// killed stays.
func (s *Store) Listens(name string) bool {
	if !spec.ValidName(name) {
		return false
	}
	_, err := os.Lstat(s.ControlSocket(name))
	return err == nil
}

// VsockPath returns the Unix socket that leads to the vsock ports of a VM.
func (s *Store) VsockPath(name string) string { return filepath.Join(s.VMDir(name), "vsock.sock") }

// ConsoleLog returns the log of a VM's serial port.
func (s *Store) ConsoleLog(name string) string { return filepath.Join(s.VMDir(name), "console.log") }

// ProcessLog returns the log of a VM's process.
func (s *Store) ProcessLog(name string) string { return filepath.Join(s.VMDir(name), "vmm.log") }

// Phase is the phase that a VM is in.
type Phase string

// The phases of a VM. A record says starting or running only while the VM's process lives; afterwards it is crashed.
const (
	Starting Phase = "starting"
	Running  Phase = "running"
	Asleep   Phase = "asleep"
	Stopped  Phase = "stopped"
	Crashed  Phase = "crashed"
)

// RecordVersion goes up with each incompatible change of Record.
const RecordVersion = 1

// Record is the stored record of a VM.
type Record struct {
	Version int       `json:"version"`
	ID      string    `json:"id"`
	Spec    spec.VM   `json:"spec"`
	Created time.Time `json:"created"`
	Phase   Phase     `json:"phase"`
	// PID is the VM's own process, which holds the record's lock; 0 if there is none.
	PID int `json:"pid,omitempty"`
	// Confined reports that the process has, or had last, the guest in a confined child.
	Confined bool `json:"confined,omitempty"`
	// Maker is the process that makes the VM, until the VM has its own. It belongs to another program and must
	// never be killed.
	Maker int `json:"maker,omitempty"`
	// Boot are the files that it boots.
	Boot BootFiles `json:"boot"`
	// Disk is its writable disk, as names of layers in the store.
	Disk disk.Stack `json:"disk"`
	// NextLayer numbers its layers.
	NextLayer int `json:"next_layer"`
	// Snapshot is the last one that the VM can come back from, or empty.
	Snapshot string `json:"snapshot,omitempty"`
	// Resumed is the snapshot from which the VM last ran on, or to which it was taken back. A wake from it goes
	// back in time.
	Resumed string `json:"resumed,omitempty"`
	// NetworkID is the last id of the VM's link to the host, if it is not ID: the link was made before the VM was
	// known.
	NetworkID string `json:"network_id,omitempty"`
	// Exit says how the guest ended, if the VM is stopped.
	Exit *ExitRecord `json:"exit,omitempty"`
	// Problem is why the VM is crashed, or what is wrong with the guest; one line.
	Problem string `json:"problem,omitempty"`
	// Parent is the snapshot that the VM was made from, if any.
	Parent string `json:"parent,omitempty"`
	// Template is the snapshot of the template that the VM was made from. If it has booted instead, Booted says why.
	Template string `json:"template,omitempty"`
	Booted   string `json:"booted,omitempty"`
	// Fork says which VM this one is a fork of, if any.
	Fork *Origin `json:"fork,omitempty"`
	// Base is the snapshot of a fork that the next snapshot of this VM builds on, while its process lives.
	Base string `json:"base,omitempty"`
	// Lineage is the id of the VM whose memory this VM's memory began as, across all forks and clones; empty means
	// its own.
	Lineage string `json:"lineage,omitempty"`
	// TrustedCA is the fingerprint of the proxy authority that the guest has in its memory.
	TrustedCA string `json:"trusted_ca,omitempty"`
	// Secrets are the secrets, without values, that the VM waits for after a wake or a boot. VMs made of it have none.
	Secrets []spec.SecretFile `json:"secrets,omitempty"`
	// Previous is the snapshot that the VM slept in before it was taken back to Snapshot, until it sleeps again.
	Previous string `json:"previous,omitempty"`
	// Left is the snapshot of the disk that the VM had at its last rotation, if it had crashed or stopped then.
	// The previous one is removed.
	Left string `json:"left,omitempty"`
	// Rotated is the time of its Rotation at which the VM last began anew.
	Rotated time.Time `json:"rotated,omitzero"`
	// DiskUsed is the most that it can have made the host store when it fell asleep, in bytes, as its disk quota counts;
	// 0 if that is not known.
	DiskUsed int64 `json:"disk_used,omitempty"`
	// Awake is when its process last began. Sleeps are its last sleeps, the newest last.
	Awake  time.Time     `json:"awake,omitzero"`
	Sleeps []SleepRecord `json:"sleeps,omitempty"`
	// Former is the name before the VM was renamed. NextName is the name that it may have already.
	Former   string `json:"former,omitempty"`
	NextName string `json:"next_name,omitempty"`

	// metadata is the metadata of a VM that is not made yet.
	metadata *spec.Metadata
}

// SleepRecord has the results of a sleep.
type SleepRecord struct {
	Snapshot string `json:"snapshot"`
	// Awake is when the VM's process began, and Asleep when the sleep was committed.
	Awake  time.Time `json:"awake,omitzero"`
	Asleep time.Time `json:"asleep"`
	// Raw is the memory in the snapshot, Stored what that takes on disk, and Shared what is in files of earlier
	// snapshots: bytes.
	Raw    uint64 `json:"bytes_raw"`
	Stored int64  `json:"bytes_stored"`
	Shared int64  `json:"bytes_shared"`
	// CPUSeconds is the processor time of the VM's process since Awake, including its vCPUs.
	CPUSeconds float64 `json:"cpu_seconds"`
	// NetworkIn and NetworkOut are the bytes of packets that the policy let pass to and from the guest in that time.
	NetworkIn  uint64 `json:"network_in_bytes"`
	NetworkOut uint64 `json:"network_out_bytes"`
}

// MaxSleeps is the maximum number of sleeps in a record.
const MaxSleeps = 16

// BootFiles are what a VM boots, by path and, where it has one, id. Paths are relative to the store's directory, which
// may be moved, except for files outside of it. Records of older versions have absolute ones: see Store.BootPath.
type BootFiles struct {
	KernelID   string `json:"kernel_id"`
	Kernel     string `json:"kernel"`
	Initramfs  string `json:"initramfs,omitempty"`
	SystemDisk string `json:"system_disk,omitempty"`
	Cmdline    string `json:"cmdline"`
	ImageID    string `json:"image_id"`
	Image      string `json:"image"`
}

// ExitRecord says how a guest has ended.
type ExitRecord struct {
	Reason string    `json:"reason"`
	Detail string    `json:"detail,omitempty"`
	Time   time.Time `json:"time"`
}

// ReplaceFile is like osfile.WriteFile, but after a loss of power the file may be the previous one.
func (s *Store) ReplaceFile(path string, data []byte) error {
	temp, err := osfile.WriteTemp(s.FS, path, data, 0o600)
	if err != nil {
		return err
	}
	if err := s.FS.Rename(temp, path); err != nil {
		return errors.Join(err, s.FS.Remove(temp))
	}
	return nil
}

// EncodeRecord returns the text of a record.
func EncodeRecord(r *Record) ([]byte, error) {
	data, err := json.MarshalIndent(r, "", "  ")
	return append(data, '\n'), err
}

// Save writes a record durably. The lock of its VM must be held.
func (s *Store) Save(r *Record) error {
	return s.SaveBy(func(path string, data []byte) error { return osfile.WriteFileIn(s.FS, path, data, 0o600) }, r)
}

// SaveOver is Save for a record that names a disk layer at path top, which is not durable yet; empty is none. It makes
// the layer durable before the record. It writes both at once, since a wake may wait for it.
func (s *Store) SaveOver(r *Record, top string) error {
	synced := make(chan error, 1)
	if top == "" {
		synced <- nil
	} else {
		go func() { synced <- disk.Sync(top) }()
	}
	return s.SaveBy(func(path string, data []byte) error {
		temp, err := osfile.WriteTemp(s.FS, path, data, 0o600)
		if serr := <-synced; err == nil && serr != nil {
			err = errors.Join(serr, s.FS.Remove(temp))
		}
		if err == nil {
			err = osfile.Put(s.FS, temp, path)
		}
		return err
	}, r)
}

// SaveRunning records that a VM runs. starting is the record in its file. If only the phase differs, SaveRunning writes
// nothing: see Get. Otherwise it does not wait for the disk: after a loss of power, either record means a crash.
func (s *Store) SaveRunning(r *Record, starting Record) error {
	starting.Phase = r.Phase
	if reflect.DeepEqual(&starting, r) {
		return nil
	}
	return s.SaveBy(s.ReplaceFile, r)
}

// SaveBy writes a record to its file by write.
func (s *Store) SaveBy(write func(path string, data []byte) error, r *Record) error {
	data, err := EncodeRecord(r)
	if err == nil {
		err = s.lend(borrowed(r.ID, r.Disk.Layers)...)
	}
	if err == nil {
		err = write(s.RecordPath(r.Spec.Name), data)
	}
	if err != nil {
		return fmt.Errorf("saving VM %s: %w", r.Spec.Name, err)
	}
	return nil
}

// Load reads a record as it is in its file.
func (s *Store) Load(name string) (*Record, error) {
	if !spec.ValidName(name) {
		return nil, fmt.Errorf("%w: %q is not the name of a VM", spec.ErrNotFound, name)
	}
	data, err := os.ReadFile(s.RecordPath(name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: %s: see Host.List", spec.ErrNotFound, name)
	}
	if err != nil {
		return nil, fmt.Errorf("reading VM %s: %w", name, err)
	}
	r, err := DecodeRecord(data)
	if err != nil {
		return nil, fmt.Errorf("reading VM %s: %w: %w: it was written by another version, or is damaged", name, spec.ErrRecord, err)
	}
	r.adoptName(name)
	if r.Version != RecordVersion || r.Spec.Name != name {
		return nil, fmt.Errorf("reading VM %s: %w: version %d, this build reads %d", name, spec.ErrRecord, r.Version, RecordVersion)
	}
	s.adoptFork(r)
	return r, nil
}

// DecodeRecord is the reverse of EncodeRecord.
func DecodeRecord(data []byte) (*Record, error) {
	r := &Record{}
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	return r, d.Decode(r)
}

// Get returns a VM's record. It first cleans up after a killed process. A VM that is starting by its file runs if its
// process answers: a wake does not write its record twice.
func (s *Store) Get(name string) (*Record, error) {
	r, err := s.Load(name)
	if err != nil {
		return nil, err
	}
	if r.Phase != Starting && r.Phase != Running {
		return r, nil
	}
	l, err := s.Lock(name)
	if errors.Is(err, spec.ErrRunning) {
		// Its process has removed the socket of an earlier one before it saved this record.
		if s.Listens(name) {
			r.Phase = Running
		}
		return r, nil
	}
	if err != nil {
		return nil, err
	}
	defer l.Release()
	if r.making() {
		// Its maker has not started its process yet.
		return r, nil
	}
	// The process is gone. It may have just finished its record.
	if r, err = s.Load(name); err != nil || r.Phase != Starting && r.Phase != Running {
		return r, err
	}
	return r, s.Tidy(r)
}

// making reports whether the VM has no process yet, and its maker is alive.
func (r *Record) making() bool {
	return r.Phase == Starting && r.PID == 0 && r.Maker > 0 && unix.Kill(r.Maker, 0) == nil
}

// Tidy turns the record of a killed process into one of a crashed VM and removes its sockets. The lock must be
// held. TAP devices and memory went with the process.
func (s *Store) Tidy(r *Record) error {
	r.Problem = "its process (pid " + fmt.Sprint(r.PID) + ") was killed"
	if r.PID == 0 {
		r.Problem = "its process was never started"
	}
	if r.Snapshot != "" {
		since := "its last sleep"
		if r.Fork != nil && r.Snapshot == r.Parent {
			since = "the fork"
		}
		r.Problem += "; whatever uses it, and Sandbox.Start, boots it with its disk as it is; Sandbox.Wake brings it back as of " + since + ", and keeps that disk as a snapshot"
	} else {
		r.Problem += "; Sandbox.Start boots it again with its disk as it is"
	}
	r.Phase, r.PID, r.Maker = Crashed, 0, 0
	s.awaitChild(r)
	if err := s.adoptLayers(r); err != nil {
		r.Problem += "; its disk cannot be read: " + err.Error()
	}
	if err := s.RemoveSockets(r.Spec.Name); err != nil {
		return err
	}
	if err := removeLeftNetwork(r); err != nil {
		return err
	}
	if err := s.Save(r); err != nil {
		return err
	}
	// The lock is held, and the record now says it, so the event is written once.
	s.Tell(s.Event(events.WithCause(context.Background(), events.Killed), r, events.Crashed))
	return nil
}

// childTime is how long the confined process of a killed VM may take to end.
const childTime = 10 * time.Second

// awaitChild waits until nobody writes to the disk of a VM whose process was killed. The kernel kills its confined
// process as well, but a moment after the VM's lock is free.
func (s *Store) awaitChild(r *Record) {
	ctx, cancel := context.WithTimeout(context.Background(), childTime)
	defer cancel()
	files, _ := filepath.Glob(filepath.Join(s.LayerDir(), r.ID+"-*")) // the pattern is well-formed
	for _, path := range files {
		// Only who writes has the exclusive lock. What goes wrong here shows when the disk is opened.
		if f, err := osfile.OpenLocked(ctx, path, os.O_RDONLY, 0, osfile.Shared); err == nil {
			f.Close()
		}
	}
}

// adoptLayers adds to a VM's disk the layers that its process began after it last saved the record. The process
// was killed, or could not save, between sealing one layer and naming the next, and the guest may have made data
// durable since. Layer names count up from the record's, and each lies over the one before. The lock must be held.
func (s *Store) adoptLayers(r *Record) error {
	if len(r.Disk.Layers) == 0 {
		return nil
	}
	st, err := s.Absolute(r.Disk)
	if err != nil {
		return err
	}
	entries, err := os.ReadDir(s.LayerDir())
	if err != nil {
		return fmt.Errorf("looking for layers of VM %s: %w", r.Spec.Name, err)
	}
	var later []int
	for _, e := range entries {
		number, ours := strings.CutPrefix(e.Name(), r.ID+"-")
		if n, err := strconv.Atoi(number); ours && err == nil && n > r.NextLayer {
			later = append(later, n)
		}
	}
	slices.Sort(later)
	for _, n := range later {
		path := filepath.Join(s.LayerDir(), fmt.Sprintf("%s-%d", r.ID, n))
		ok := false
		if err := s.WithLayers(r.Snapshot, st, func(at disk.Stack) (err error) { ok, err = disk.Continues(path, at); return err }); err != nil {
			return fmt.Errorf("looking for layers of VM %s: %w", r.Spec.Name, err)
		} else if ok {
			st = st.With(path)
			r.Disk, r.NextLayer = s.Relative(st), n
		}
	}
	return nil
}

// RemoveSockets removes sockets and temporary files of a killed process from its VM's directory.
func (s *Store) RemoveSockets(name string) error {
	entries, err := os.ReadDir(s.VMDir(name))
	if err != nil {
		return fmt.Errorf("tidying up VM %s: %w", name, err)
	}
	var errs []error
	for _, e := range entries {
		if e.Type()&fs.ModeSocket != 0 || strings.HasPrefix(e.Name(), osfile.TempPrefix) {
			errs = append(errs, os.Remove(filepath.Join(s.VMDir(name), e.Name())))
		}
	}
	return errors.Join(errs...)
}

// List returns all VMs in the order of their names. An unreadable record is in the error, and does not hide the others.
func (s *Store) List() ([]*Record, error) {
	entries, err := os.ReadDir(filepath.Join(s.dir, "vms"))
	if err != nil {
		return nil, fmt.Errorf("listing VMs: %w", err)
	}
	var (
		out  []*Record
		errs []error
	)
	for _, e := range entries {
		r, err := s.Get(e.Name())
		switch {
		case errors.Is(err, spec.ErrNotFound): // being made, or removed
		case err != nil:
			errs = append(errs, err)
		default:
			out = append(out, r)
		}
	}
	return out, errors.Join(errs...)
}

// FileStamps returns a stamp of each VM's record and metadata, without reading them. An unchanged stamp means unchanged
// files. A stamp is empty if the files were replaced so recently that the next replacement might have the same time.
func (s *Store) FileStamps() (map[string]string, error) {
	entries, err := os.ReadDir(filepath.Join(s.dir, "vms"))
	if err != nil {
		return nil, fmt.Errorf("listing VMs: %w", err)
	}
	out := make(map[string]string, len(entries))
	for _, e := range entries {
		record, settled := fileStamp(s.RecordPath(e.Name()))
		if record == "" {
			continue
		}
		label, lsettled := fileStamp(filepath.Join(s.VMDir(e.Name()), metadataFile))
		stamp := record + " " + label
		if !settled || !lsettled {
			stamp = ""
		}
		out[e.Name()] = stamp
	}
	return out, nil
}

// settleTime is how old a file must be for its time to differ from the next one's: file systems count in steps of
// milliseconds.
const settleTime = 100 * time.Millisecond

// fileStamp returns a stamp that changes when a file is replaced by renaming; empty if there is no file.
func fileStamp(path string) (stamp string, settled bool) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return "", true
	}
	age := time.Since(time.Unix(st.Mtim.Unix()))
	return fmt.Sprintf("%d.%d.%d", st.Mtim.Nano(), st.Ino, st.Size), age > settleTime || age < -settleTime
}

// VMLock is an exclusive flock(2), which the kernel drops when its holder dies.
type VMLock struct{ f *os.File }

// Lock takes a VM's lock. If a process holds it, Lock returns ErrRunning.
func (s *Store) Lock(name string) (*VMLock, error) {
	f, err := osfile.TryOpenLocked(s.lockPath(name), lockFlags, 0o600, osfile.Exclusive)
	return locked(name, f, err)
}

func (s *Store) lockPath(name string) string { return filepath.Join(s.VMDir(name), "lock") }

const lockFlags = os.O_RDWR | os.O_CREATE

func locked(name string, f *os.File, err error) (*VMLock, error) {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("%w: %s", spec.ErrNotFound, name)
	case errors.Is(err, osfile.ErrLocked):
		return nil, fmt.Errorf("%w: %s", spec.ErrRunning, name)
	case err != nil:
		return nil, fmt.Errorf("locking VM %s: %w", name, err)
	}
	return &VMLock{f}, nil
}

// lockPatience is how long the process of a VM waits for its lock. Others hold it only for moments, to look at the
// record.
const lockPatience = 300 * time.Millisecond

// removePatience is how long a removal waits for the lock of a VM: its process may be exiting, and others look at it.
const removePatience = 30 * time.Second

// createPatience is how long Create waits for the lock of a name without a record.
const createPatience = 5 * time.Second

// LockSoon is Lock that waits for up to lockPatience.
func (s *Store) LockSoon(ctx context.Context, name string) (*VMLock, error) {
	return s.lockWithin(ctx, name, lockPatience)
}

func (s *Store) lockWithin(ctx context.Context, name string, patience time.Duration) (*VMLock, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, patience, osfile.ErrLocked)
	defer cancel()
	f, err := osfile.OpenLocked(ctx, s.lockPath(name), lockFlags, 0o600, osfile.Exclusive)
	return locked(name, f, err)
}

// Release releases the lock.
func (l *VMLock) Release() {
	_ = osfile.Unlock(l.f) // closing unlocks too, unless a child of this process is about to execve(2)
	l.f.Close()
}

// Create makes the directory and record of a new VM, whose name must be free. The caller holds the returned lock. If
// its owner has as many VMs as allowed, the error is spec.ErrQuota.
func (s *Store) Create(r *Record) (*VMLock, error) {
	dir, owner := s.VMDir(r.Spec.Name), ""
	if r.metadata != nil {
		owner = r.metadata.Owner
	}
	// A killed `drowse run` leaves a directory without a record.
	taken := func() error {
		if _, err := os.Stat(s.RecordPath(r.Spec.Name)); err != nil {
			return nil
		}
		return fmt.Errorf("%w: %s: choose another, or remove it with Sandbox(%q).Delete", spec.ErrExists, r.Spec.Name, r.Spec.Name)
	}
	if err := taken(); err != nil {
		return nil, err
	}
	release, err := s.admitOwned(owner)
	if err != nil {
		return nil, fmt.Errorf("making VM %s: %w", r.Spec.Name, err)
	}
	defer func() { _ = release() }()
	var l *VMLock
	for begin := time.Now(); ; time.Sleep(time.Millisecond) {
		if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, fmt.Errorf("making VM %s: %w", r.Spec.Name, err)
		}
		// Meanwhile a removal or a sweep may have a directory without a record, and deletes it.
		l, err = s.Lock(r.Spec.Name)
		if !errors.Is(err, spec.ErrRunning) && !errors.Is(err, spec.ErrNotFound) {
			break
		}
		if err := taken(); err != nil {
			return nil, err
		}
		if time.Since(begin) > createPatience {
			return nil, fmt.Errorf("%w: %s: it is being made or removed at this moment", spec.ErrExists, r.Spec.Name)
		}
	}
	if err != nil {
		return nil, err
	}
	if err := taken(); err != nil {
		l.Release()
		return nil, err
	}
	// The record comes last: without one the directory can be used again.
	if err = errors.Join(s.lend(r.named()...), s.beginAudit(r), s.beginMetadata(r)); err == nil {
		err = s.Save(r)
	}
	if err == nil {
		err = osfile.SyncDir(filepath.Dir(dir))
	}
	if err != nil {
		l.Release()
		return nil, err
	}
	return l, nil
}

// NewLayer returns the name of the VM's next layer and counts it in the record. The caller must save that.
func (r *Record) NewLayer() string {
	r.NextLayer++
	return r.LastLayer()
}

// LastLayer returns the name that NewLayer returned last. While a VM sleeps, that layer is empty, lies above its disk,
// and waits for its wake, unless something has removed it.
func (r *Record) LastLayer() string { return fmt.Sprintf("%s-%d", r.ID, r.NextLayer) }

// Absolute turns the names of layers in a record or snapshot into paths. It refuses a name that leads out of the
// store, because a snapshot may come from elsewhere.
func (s *Store) Absolute(st disk.Stack) (disk.Stack, error) {
	var out disk.Stack
	for _, l := range st.Layers {
		if l != filepath.Base(l) || l == "." || l == ".." {
			return out, fmt.Errorf("%w: disk layer %q is not in the store", spec.ErrRecord, l)
		}
		out.Layers = append(out.Layers, filepath.Join(s.LayerDir(), l))
	}
	return out, nil
}

// Relative is the reverse of Absolute.
func (s *Store) Relative(st disk.Stack) disk.Stack {
	var out disk.Stack
	for _, l := range st.Layers {
		out.Layers = append(out.Layers, filepath.Base(l))
	}
	return out
}

// storeDirs are the folders of a store that BootFiles may be in.
var storeDirs = []string{"images", "kernels", "cache"}

// InStore returns the path of a file as records have it.
func (s *Store) InStore(path string) string {
	if rel, err := filepath.Rel(s.dir, path); err == nil && filepath.IsLocal(rel) {
		return rel
	}
	return path
}

// BootPath returns the absolute path of one of a record's BootFiles. A record of an older version has the former
// path of the store's directory. If that was moved or copied, the file is where the store is now.
func (s *Store) BootPath(path string) string {
	if path == "" {
		return ""
	}
	if !filepath.IsAbs(path) {
		return filepath.Join(s.dir, path)
	}
	for _, dir := range storeDirs {
		if i := strings.LastIndex(path, "/"+dir+"/"); i >= 0 {
			here := filepath.Join(s.dir, path[i:])
			if _, err := os.Stat(here); err == nil {
				return here
			}
		}
	}
	return path
}

// RemoveNew deletes a VM that did not come up, with the layers that its process may have made: nothing else can
// name them. It does not sweep, since other VMs may be being made from the same snapshot.
func (s *Store) RemoveNew(ctx context.Context, r *Record) error {
	l, err := s.lockWithin(ctx, r.Spec.Name, removePatience)
	if err != nil {
		return err
	}
	defer l.Release()
	last := r.NextLayer
	if now, err := s.Load(r.Spec.Name); err == nil {
		last = max(last, now.NextLayer)
		if err := removeLeftNetwork(now); err != nil {
			return err
		}
	}
	errs := []error{s.removeVMDir(r.Spec.Name)}
	for n := 1; n <= last+1; n++ { // one more: a layer is made before it is counted on disk
		if err := os.Remove(filepath.Join(s.LayerDir(), fmt.Sprintf("%s-%d", r.ID, n))); !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("removing VM %s: %w", r.Spec.Name, err)
	}
	return nil
}

// Remove deletes a VM with its disk and its sleep snapshot, and returns what that has freed. It refuses a running VM
// with ErrRunning, and an unreadable record with ErrRecord, unless force is set; then it waits for the holder of the
// VM's lock. The VM's history stays for HistoryTime, unless it is ephemeral: see Store.Removed. If the history cannot
// be kept, Remove still removes the VM, and Freed.Problems says so. With an error the VM may be gone nevertheless. Then
// the next sweep deletes the rest of what only it needed, and the event sandbox.removed has what was freed so far.
func (s *Store) Remove(ctx context.Context, name string, force bool) (spec.Freed, error) {
	r, err := s.Get(name)
	e := events.Event{Type: events.Removed, Sandbox: name, Cause: events.CauseOf(ctx)}
	switch {
	case errors.Is(err, spec.ErrRecord) && force:
	case err != nil:
		return spec.Freed{}, err
	case !force && (r.Phase == Running || r.Phase == Starting):
		return spec.Freed{}, fmt.Errorf("%w: %s: put it to sleep, stop it, or use --force", spec.ErrRunning, name)
	default:
		// Its metadata is deleted with it.
		e = s.Event(ctx, r, events.Removed)
	}
	freed, gone, err := s.removeFiles(ctx, name)
	if gone {
		e.Details.Bytes = freed.Bytes
		s.Announce(ctx, e)
	}
	return freed, err
}

// removeVMDir deletes the directory of a VM, whose lock the caller holds. The name is free at once: a VM that is made
// meanwhile has a directory of its own, from which nothing is deleted.
func (s *Store) removeVMDir(name string) error {
	dir := s.VMDir(name)
	temp := osfile.TempPath(dir)
	switch err := os.Rename(dir, temp); {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil: // a full disk
		return os.RemoveAll(dir)
	}
	// Others who have just found it under its name may still put a lock into it, each one.
	var err error
	for range removeTries {
		if err = os.RemoveAll(temp); !errors.Is(err, unix.ENOTEMPTY) {
			break
		}
	}
	return err
}

// removeTries bounds how often: each one who puts in a lock found the directory before it was renamed.
const removeTries = 100

// removeFiles deletes a VM that is not running, and what only it needed. It returns what it has freed, and whether
// the VM is gone. The VM may be gone with an error: what only it needed is deleted afterwards, and the next sweep
// deletes the rest.
func (s *Store) removeFiles(ctx context.Context, name string) (freed spec.Freed, gone bool, err error) {
	l, err := s.lockWithin(ctx, name, removePatience)
	if err != nil {
		return freed, false, err
	}
	defer l.Release()
	var now Exempt
	var problems []string
	var removed *Record
	if r, err := s.Load(name); err == nil {
		removed = r
		now.of(r)
		// For a process that was killed after the record said that the VM sleeps.
		if err := removeLeftNetwork(r); err != nil {
			return freed, false, err
		}
		if err := s.keepHistory(ctx, r); err != nil {
			problems = append(problems, err.Error())
		}
	} else if errors.Is(err, spec.ErrRecord) {
		// What else it may have needed goes once it is old enough.
		for _, path := range vmFiles(s.VMDir(name)) {
			now.Owners = append(now.Owners, idsIn(path)...)
		}
	}
	_, own := DiskUsage(s.VMDir(name))
	// The record goes first, durably: an interrupted removal leaves a VM with all its files, or none.
	err = os.RemoveAll(s.RecordPath(name))
	if err == nil {
		err = osfile.SyncDir(s.VMDir(name))
	}
	if err == nil {
		err = s.removeVMDir(name)
	}
	if err != nil {
		// Without its record it is no longer a VM, whatever else of it remains.
		_, lerr := s.Load(name)
		return freed, errors.Is(lerr, spec.ErrNotFound), fmt.Errorf("removing VM %s: %w", name, err)
	}
	// Otherwise it could come back, after a loss of power, without what is deleted now.
	if err := osfile.SyncDir(filepath.Join(s.dir, "vms")); err != nil {
		return freed, true, fmt.Errorf("removing VM %s: %w", name, err)
	}
	l.Release() // the holder of a VM's lock must not wait for the store's
	if removed != nil {
		err = s.removeOwn(ctx, removed, &freed)
	}
	if err == nil && s.sweepDue() {
		var more spec.Freed
		more, err = s.SweepExcept(ctx, now)
		freed.Add(more)
	}
	freed.Bytes += own
	freed.Problems = append(problems, freed.Problems...)
	if err != nil {
		err = fmt.Errorf("VM %s is removed, but not all that only it needed: Fleet.Prune tries that again: %w", name, err)
	}
	return freed, true, err
}
