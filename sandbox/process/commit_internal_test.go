package process

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/internal/test/faultfs"
	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/snapshot"
)

var commitRounds = flag.Int("commit-rounds", 8, "how many kills, and how many power cuts, each file system gets")

// commitEnv makes the test binary the process of a VM without a guest. See commitForEver.
const commitEnv = "DROWSE_COMMIT_TEST"

func init() {
	if dir := os.Getenv(commitEnv); dir != "" {
		err := hideBoot(os.Getenv(commitEnv + "_BOOT"))
		if err == nil {
			err = commitForEver(dir)
		}
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// hideBoot gives this process, which has a mount namespace of its own, another boot id: that in a file.
func hideBoot(file string) error {
	if file == "" {
		return nil
	}
	return unix.Mount(file, "/proc/sys/kernel/random/boot_id", "", unix.MS_BIND, "")
}

const (
	commitBlocks = 16
	commitDisk   = 4 << 20
)

// commitVM makes a VM with an empty disk and nothing else.
func commitVM(dir string) error {
	s, err := state.OpenStore(dir)
	if err != nil {
		return err
	}
	r := &state.Record{Version: state.RecordVersion, ID: spec.NewID(), Spec: spec.VM{Name: "a", VCPUs: 1}, Phase: state.Stopped, Created: time.Now()}
	st, err := disk.Create(filepath.Join(s.LayerDir(), r.NewLayer()), commitDisk)
	if err != nil {
		return err
	}
	r.Disk = s.Relative(st)
	l, err := s.Create(r)
	if err != nil {
		return err
	}
	l.Release()
	return errors.Join(osfile.SyncDir(dir), osfile.SyncDir(filepath.Join(dir, "vms")), osfile.SyncDir(s.VMDir("a")))
}

// beginVM does what the process of a VM does with its disk at a boot or wake.
func beginVM(s *state.Store) (*process, *disk.Disk, error) {
	r, err := s.Get("a")
	if err != nil {
		return nil, nil, err
	}
	p := &process{store: s, r: r, log: slog.New(slog.DiscardHandler)}
	st, err := s.Absolute(r.Disk)
	if err != nil {
		return nil, nil, err
	}
	if r.Phase == state.Asleep {
		st, err = p.newTop(context.Background(), st)
	} else {
		st, err = p.writable(context.Background(), st)
	}
	if err != nil {
		return nil, nil, err
	}
	r.Disk, r.Phase, r.PID = s.Relative(st), state.Starting, os.Getpid()
	if err := s.SaveOver(r, st.Top()); err != nil {
		return nil, nil, err
	}
	r.Phase = state.Running
	if err := s.SaveBy(s.ReplaceFile, r); err != nil {
		return nil, nil, err
	}
	d, err := disk.Open(st, disk.Options{})
	return p, d, err
}

// commitForEver writes numbers to the VM's disk, flushes and reports each. Sometimes it takes a snapshot, or
// sleeps and wakes, with the steps of Capture and sleep but without a guest.
func commitForEver(dir string) error {
	s, err := state.OpenStore(dir)
	if err != nil {
		return err
	}
	l, err := s.Lock("a")
	if err != nil {
		return err
	}
	l.Release() // with the lock free, beginVM finds the VM's process gone
	p, d, err := beginVM(s)
	if err != nil {
		return err
	}
	if l, err = s.Lock("a"); err != nil {
		return err
	}
	defer l.Release()
	v, err := strconv.ParseUint(os.Getenv(commitEnv+"_NEXT"), 10, 64)
	if err != nil {
		return err
	}
	for ; ; v++ {
		var b [disk.BlockSize]byte
		binary.LittleEndian.PutUint64(b[:], v)
		if _, err := d.WriteAt(b[:], int64(v%commitBlocks)*disk.BlockSize); err != nil {
			return err
		}
		if err := d.Flush(); err != nil {
			return err
		}
		fmt.Println("flushed", v)
		if v%3 != 0 {
			continue
		}
		before := d.Stack()
		path, err := p.newLayer()
		if err == nil {
			err = d.Prepare(path)
		}
		if err == nil {
			_, err = d.Seal(context.Background(), path)
		}
		if err == nil {
			err = p.sealed(d.Stack())
		}
		if err == nil {
			err = d.Flush()
		}
		if err != nil {
			return err
		}
		id := spec.NewID()
		if _, err := snapshot.Create(context.Background(), s.SnapshotDir(id), snapshot.Spec{
			ID: id, Sandbox: "a", VCPUs: 1, Disks: []snapshot.Disk{{Name: instance.DeviceDisk, Size: commitDisk, Layers: s.Relative(before).Layers}}, Memory: state.NoMemory{},
		}); err != nil {
			return err
		}
		if v%2 != 0 {
			continue
		}
		if err := errors.Join(p.fallAsleep(id, before, state.SleepRecord{Snapshot: id}), d.Close()); err != nil {
			return err
		}
		if err := os.Remove(path); err != nil {
			return err
		}
		fmt.Println("slept", v)
		if p, d, err = beginVM(s); err != nil {
			return fmt.Errorf("waking: %w", err)
		}
	}
}

// recovered opens the VM of a store whose process is gone, and checks that everything flushed and everything that
// the record names is there.
func recovered(dir string, flushed, last uint64) error {
	s, err := state.OpenStore(dir)
	if err != nil {
		return err
	}
	r, err := s.Get("a")
	if err != nil {
		return err
	}
	if r.Phase == state.Asleep {
		snap, err := snapshot.Open(s.SnapshotDir(r.Snapshot))
		if err != nil {
			return fmt.Errorf("it sleeps in: %w", err)
		}
		snap.Close()
	}
	_, d, err := beginVM(s)
	if err != nil {
		return fmt.Errorf("as %s, %s: %w", r.Phase, r.Problem, err)
	}
	defer d.Close()
	for i := range uint64(commitBlocks) {
		var b [disk.BlockSize]byte
		if _, err := d.ReadAt(b[:], int64(i)*disk.BlockSize); err != nil {
			return err
		}
		got := binary.LittleEndian.Uint64(b[:])
		// The newest flushed number of this block.
		want := uint64(0)
		for v := flushed; v > 0 && v+commitBlocks > flushed; v-- {
			if v%commitBlocks == i {
				want = v
				break
			}
		}
		if got < want || got > last {
			return fmt.Errorf("as %s: block %d has %d; %d was flushed, %d written at most (layers %v)", r.Phase, i, got, want, last, d.Stack().Layers)
		}
	}
	return nil
}

// runAndKill runs a process that works on the VM, and kills it after a while. It returns the last flushed number.
// boot has the id of the boot that it sees, unless that is "".
func runAndKill(t *testing.T, dir string, next uint64, after time.Duration, boot string) uint64 {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), commitEnv+"="+dir, fmt.Sprintf("%s_NEXT=%d", commitEnv, next), commitEnv+"_BOOT="+boot)
	cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	if boot != "" {
		cmd.SysProcAttr.Unshareflags = unix.CLONE_NEWNS
	}
	var said strings.Builder
	cmd.Stderr = &said
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	flushed := next - 1
	in := bufio.NewReader(out)
	for line, err := in.ReadString('\n'); err == nil; line, err = in.ReadString('\n') {
		if n, ok := strings.CutPrefix(line, "flushed "); ok {
			if flushed == next-1 { // the time runs from the first flush
				time.AfterFunc(after, func() { _ = cmd.Process.Kill() })
			}
			fmt.Sscan(n, &flushed)
		}
	}
	_ = cmd.Wait()
	if flushed == next-1 || said.Len() > 0 {
		t.Fatalf("the process ended by itself after number %d: %s", flushed, said.String())
	}
	return flushed
}

// A kill between sealing a layer and recording it once made the next boot fail, or lose what the guest had
// flushed. A record could also be durable before the layer that it names.
func TestAttack_kill_between_sealing_a_disk_and_recording_it(t *testing.T) {
	dir := t.TempDir()
	if err := commitVM(dir); err != nil {
		t.Fatal(err)
	}
	r := rand.New(rand.NewPCG(1, uint64(time.Now().UnixNano())))
	next := uint64(1)
	for round := range *commitRounds {
		flushed := runAndKill(t, dir, next, time.Duration(r.IntN(40_000))*time.Microsecond, "")
		if err := recovered(dir, flushed, flushed+1); err != nil {
			t.Fatalf("kill %d: %v", round, err)
		}
		next = flushed + 1
		next, dir = fresh(t, round, next, dir, t.TempDir())
	}
}

// fresh changes to a new VM every 16 rounds, so that its disk does not get too many layers.
func fresh(t *testing.T, round int, next uint64, dir, other string) (uint64, string) {
	t.Helper()
	if round%16 != 15 {
		return next, dir
	}
	if err := commitVM(other); err != nil {
		t.Fatal(err)
	}
	return 1, other
}

func TestAttack_power_cut_between_sealing_a_disk_and_recording_it(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounting a file system needs root")
	}
	for _, kind := range []struct {
		name    string
		mkfs    []string
		size    int64
		options string
	}{
		{"ext4", []string{"mkfs.ext4", "-q", "-F"}, 64 << 20, "defaults"},
		// The copy has the same id as a file system that may still be mounted: another process may have made a
		// mount namespace meanwhile.
		{"xfs", []string{"mkfs.xfs", "-q", "-f"}, 320 << 20, "nouuid"},
		{"btrfs", []string{"mkfs.btrfs", "-q", "-f"}, 128 << 20, "defaults"},
	} {
		t.Run(kind.name, func(t *testing.T) {
			if _, err := exec.LookPath(kind.mkfs[0]); err != nil {
				if os.Getenv("CI") != "" {
					t.Fatal(err)
				}
				t.Skip(err)
			}
			dir := t.TempDir()
			r := rand.New(rand.NewPCG(2, uint64(time.Now().UnixNano())))
			m := &cutDisk{t: t, dir: dir, options: kind.options}
			t.Cleanup(m.unmount)
			next := uint64(0)
			for round := range *commitRounds {
				if round%16 == 0 {
					m.unmount()
					m.make(kind.mkfs, kind.size)
					m.mount()
					if err := commitVM(m.state()); err != nil {
						t.Fatal(err)
					}
					next = 1
				}
				// A host whose power was cut has another boot id then: what was written and not flushed does not count.
				boot := filepath.Join(dir, "boot_id")
				if err := os.WriteFile(boot, fmt.Appendf(nil, "%016x%016x\n", r.Uint64(), r.Uint64()), 0o600); err != nil {
					t.Fatal(err)
				}
				flushed := runAndKill(t, m.state(), next, time.Duration(r.IntN(60_000))*time.Microsecond, boot)
				m.cut()
				if err := recovered(m.state(), flushed, flushed+1); err != nil {
					t.Fatalf("cut %d: %v", round, err)
				}
				next = flushed + 1
			}
		})
	}
}

// A cutDisk is a file system on an image, whose power can be cut.
type cutDisk struct {
	t     *testing.T
	dir   string
	image string
	n     int
	loop  string
	// options are the mount options.
	options string
}

func (m *cutDisk) point() string { return filepath.Join(m.dir, "mnt") }

func (m *cutDisk) state() string { return filepath.Join(m.point(), "s") }

func (m *cutDisk) do(name string, args ...string) string {
	m.t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		m.t.Fatalf("%s %v: %v: %s", name, args, err, out)
	}
	return strings.TrimSpace(string(out))
}

func (m *cutDisk) next() string {
	m.n++
	return filepath.Join(m.dir, fmt.Sprintf("image-%d", m.n))
}

func (m *cutDisk) make(mkfs []string, size int64) {
	m.t.Helper()
	m.image = m.next()
	if err := errors.Join(os.WriteFile(m.image, nil, 0o600), os.Truncate(m.image, size), os.MkdirAll(m.point(), 0o700)); err != nil {
		m.t.Fatal(err)
	}
	m.do(mkfs[0], append(mkfs[1:], m.image)...)
}

func (m *cutDisk) mount() {
	m.t.Helper()
	m.loop = m.do("losetup", "--find", "--show", m.image)
	m.do("mount", "-o", m.options, m.loop, m.point())
}

func (m *cutDisk) unmount() {
	if m.loop == "" {
		return
	}
	m.do("umount", m.point())
	m.do("losetup", "--detach", m.loop)
	m.loop = ""
	if err := os.Remove(m.image); err != nil {
		m.t.Error(err)
	}
}

// cut keeps what the device has of the file system, and loses what is in memory: it mounts a copy of the image,
// made while the file system did not write.
func (m *cutDisk) cut() {
	m.t.Helper()
	copied := m.next()
	for try := 0; ; try++ {
		before := m.writes()
		m.do("cp", "--sparse=always", m.image, copied)
		if before != "" && m.writes() == before {
			break
		}
		if try == 100 {
			m.t.Fatal("the file system does not stop to write")
		}
		time.Sleep(5 * time.Millisecond)
	}
	m.unmount()
	m.image = copied
	m.mount()
}

// writes returns the count of writes to the device, or "" while one is under way.
func (m *cutDisk) writes() string {
	sys := "/sys/block/" + filepath.Base(m.loop)
	stat, err := os.ReadFile(sys + "/stat")
	if err != nil {
		m.t.Fatal(err)
	}
	f := strings.Fields(string(stat))
	if len(f) < 9 || f[8] != "0" {
		return ""
	}
	return f[4] + " " + f[6]
}

func TestAttack_record_that_cannot_be_saved_leaves_no_flushed_byte_behind(t *testing.T) {
	for _, op := range []faultfs.Op{faultfs.OpOpen, faultfs.OpWrite, faultfs.OpSync, faultfs.OpRename, faultfs.OpSyncDir} {
		t.Run(string(op), func(t *testing.T) {
			s, p, d := runningDisk(t)
			sim, err := faultfs.NewSim(s.VMDir("a"))
			if err != nil {
				t.Fatal(err)
			}
			s.FS = sim
			sim.Inject(faultfs.Fault{Op: op, Nth: 1, Err: unix.EIO})
			path, err := p.newLayer()
			if err != nil {
				t.Fatal(err)
			}
			if _, err := d.Seal(t.Context(), path); err != nil {
				t.Fatal(err)
			}
			if err := p.sealed(d.Stack()); err == nil {
				t.Fatal("the fault was not met")
			}
			// The VM continues to run, and the guest flushes.
			writeBlock(t, d, 0, 7)
			writeBlock(t, d, 1, 8)
			if err := d.Close(); err != nil { // like the kernel for a killed process, but with a flush
				t.Fatal(err)
			}
			s.FS = osfile.OS
			_, d, err = beginVM(s)
			if err != nil {
				t.Fatal(err)
			}
			defer d.Close()
			for block, want := range []uint64{7, 8} {
				if got := readBlock(t, d, int64(block)); got != want {
					t.Errorf("block %d has %d, want %d", block, got, want)
				}
			}
		})
	}
}

func TestAttack_kill_before_a_record_names_its_first_layer_does_not_fail_the_next_start(t *testing.T) {
	for _, tc := range []struct {
		name  string
		phase state.Phase
		keeps bool
	}{
		{"a wake that was never reported is forgotten", state.Asleep, false},
		{"what a running VM flushed is kept", state.Running, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s, p, d := runningDisk(t)
			writeBlock(t, d, 0, 5)
			before := *p.r
			path, err := p.newLayer()
			if err != nil {
				t.Fatal(err)
			}
			if _, err := d.Seal(t.Context(), path); err != nil {
				t.Fatal(err)
			}
			writeBlock(t, d, 0, 6)
			if err := d.Close(); err != nil {
				t.Fatal(err)
			}
			before.Phase = tc.phase
			if err := s.Save(&before); err != nil {
				t.Fatal(err)
			}
			_, d, err = beginVM(s)
			if err != nil {
				t.Fatal(err)
			}
			defer d.Close()
			want := uint64(5)
			if tc.keeps {
				want = 6
			}
			if got := readBlock(t, d, 0); got != want {
				t.Errorf("the block has %d, want %d", got, want)
			}
		})
	}
}

func runningDisk(t *testing.T) (*state.Store, *process, *disk.Disk) {
	t.Helper()
	dir := t.TempDir()
	if err := commitVM(dir); err != nil {
		t.Fatal(err)
	}
	s, err := state.OpenStore(dir)
	if err != nil {
		t.Fatal(err)
	}
	p, d, err := beginVM(s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return s, p, d
}

func writeBlock(t *testing.T, d *disk.Disk, block int64, v uint64) {
	t.Helper()
	var b [disk.BlockSize]byte
	binary.LittleEndian.PutUint64(b[:], v)
	if _, err := d.WriteAt(b[:], block*disk.BlockSize); err != nil {
		t.Fatal(err)
	}
	if err := d.Flush(); err != nil {
		t.Fatal(err)
	}
}

func readBlock(t *testing.T, d *disk.Disk, block int64) uint64 {
	t.Helper()
	var b [disk.BlockSize]byte
	if _, err := d.ReadAt(b[:], block*disk.BlockSize); err != nil && !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	return binary.LittleEndian.Uint64(b[:])
}

// The rename of a record succeeds, and the sync of its directory fails: what the file says then must not be true of a
// VM that runs on.
func TestAttack_sleep_that_fails_after_its_record_was_put_in_place_loses_what_the_guest_writes_then(t *testing.T) {
	s, p, d := runningDisk(t)
	defer d.Close()
	sim, err := faultfs.NewSim(s.VMDir("a"))
	if err != nil {
		t.Fatal(err)
	}
	s.FS = sim
	sim.Inject(faultfs.Fault{Op: faultfs.OpSyncDir, Nth: 1, Err: unix.EIO})
	before := p.r.Phase
	if err := p.save(func() error { p.r.Phase = state.Asleep; return nil }); !errors.Is(err, unix.EIO) {
		t.Fatalf("got %v, want the fault", err)
	}
	s.FS = osfile.OS
	if r, err := s.Load("a"); err != nil || r.Phase != before || p.r.Phase != before {
		t.Errorf("the record says %s (%v), the process %s, want %s", r.Phase, err, p.r.Phase, before)
	}
}
