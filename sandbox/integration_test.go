package sandbox_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/pool"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/vmm"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// keeper holds a random value in memory and answers each question with its pid and that value. It is a shell that
// starts no process: in a guest whose kernel is interpreted each one costs seconds.
const keeper = `read value </proc/sys/kernel/random/uuid
while read question </run/ask; do echo $$ $value >/run/answer; done`

// keep starts the keeper in a VM and returns its answer.
func keep(e *guesttest.Env, name string) string {
	e.T.Helper()
	e.Do(name, "mkfifo", "/run/ask", "/run/answer")
	p, err := e.Agent(name).Start(e.T.Context(), guest.Cmd{Argv: []string{"/bin/sh", "-c", keeper}, Detach: true})
	if err != nil {
		e.T.Fatal(err)
	}
	if err := p.Close(); err != nil {
		e.T.Fatal(err)
	}
	return ask(e, name)
}

// ask asks the keeper of a VM, or another program that has taken its place.
func ask(e *guesttest.Env, name string) string {
	e.T.Helper()
	return order(e, name, "", "/run/ask", "/run/answer")
}

// order writes a line to one named pipe of a VM, and returns the answer from the other.
func order(e *guesttest.Env, name, line, to, from string) string {
	e.T.Helper()
	e.Write(name, line, to)
	return e.Read(name, from)
}

// askAndRead asks the keeper, and then reads files.
func askAndRead(e *guesttest.Env, name string, paths ...string) string {
	e.T.Helper()
	return ask(e, name) + "\n" + e.Read(name, paths...)
}

const hostname = "/proc/sys/kernel/hostname"

// identity returns values that must differ between any two VMs.
func identity(e *guesttest.Env, name string) []string {
	e.T.Helper()
	var random bytes.Buffer
	if _, err := e.Agent(name).ReadFile(e.T.Context(), "/dev/urandom", &random, 0, 16); err != nil {
		e.T.Fatal(err)
	}
	return append(strings.Split(e.Read(name, "/proc/sys/kernel/random/uuid", "/proc/sys/kernel/random/boot_id", hostname), "\n"), random.String())
}

// The main job, with every kernel that this host can run, with one vCPU and with two.
func TestSleep_and_wake_keep_processes_memory_and_files(t *testing.T) {
	t.Parallel()
	host := guesttest.New(t)
	for _, kernel := range host.Kernels() {
		for _, vcpus := range []int{1, 2} {
			t.Run(fmt.Sprintf("%s kernel, %d vCPUs", kernel, vcpus), func(t *testing.T) {
				if vcpus > 1 && vmm.SoftKVM() {
					guesttest.Long(t)
				}
				e := guesttest.New(t)
				given := spec.Service{Name: "given", Argv: []string{"/bin/sleep", "1000000"}}
				e.Boot(sandbox.Spec{Name: "main", Kernel: kernel, VCPUs: vcpus, MemoryMiB: 256, Services: []spec.Service{given}})
				// Secrets need FUSE, which is a module of Debian's kernel.
				cpus := map[int]string{1: "0", 2: "0-1"}[vcpus]
				if got := e.Read("main", "/sys/devices/system/cpu/online", "/proc/filesystems"); !strings.HasPrefix(got, cpus+"\n") || !slices.Contains(strings.Fields(got), "fuse") {
					t.Errorf("CPUs, and file systems: %q, want %s and fuse", got, cpus)
				}
				clockIsRight(e, "main", "booted")
				// A service in the spec starts when the VM boots.
				started := service(e, "main", "given", "running")
				if started.PID == 0 || started.Restarts != 0 {
					t.Errorf("after the boot the service is %+v", started)
				}
				registersAreSaved(e, "main")
				before := keep(e, "main")
				data := make([]byte, 200_000)
				rand.NewChaCha8([32]byte{1}).Read(data)
				if err := e.Agent("main").WriteFile(t.Context(), "/root/data", bytes.NewReader(data), guest.WriteOptions{}); err != nil {
					t.Fatal(err)
				}
				sameFile := func(when string) {
					t.Helper()
					var back bytes.Buffer
					if _, err := e.Agent("main").ReadFile(t.Context(), "/root/data", &back, 0, 0); err != nil || !bytes.Equal(back.Bytes(), data) {
						t.Errorf("%s the file is another one (%v)", when, err)
					}
				}
				sameFile("before the sleep")
				r, err := e.Store.State.Get("main")
				if err != nil {
					t.Fatal(err)
				}
				const passing = 2 << 20
				e.Sh("main", fmt.Sprintf("exec head -c %d /dev/zero > /dev/shm/passing", passing))
				e.Remove("main", "/dev/shm/passing")
				res := e.Sleep("main")
				// Other pages than the file's are free as well.
				if least := uint64(passing / guestmem.PageSize / 2); res.PagesFree < least || res.PagesFree >= res.PagesChanged {
					t.Errorf("of %d pages that have changed %d are left out since they are free; at least %d are", res.PagesChanged, res.PagesFree, least)
				}
				for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
					// This test is the parent of the process and has to reap it.
					if _, err := os.Stat(fmt.Sprintf("/proc/%d", r.PID)); errors.Is(err, fs.ErrNotExist) {
						break
					}
					if time.Now().After(deadline) {
						t.Error("the process of the sleeping VM is still there")
						break
					}
				}
				if err := e.Store.State.VerifySnapshot(t.Context(), res.Snapshot); err != nil {
					t.Error(err)
				}
				onlyItsUsers(t, e.Store.State.Dir())
				rep := e.Wake("main")
				onlyItsUsers(t, e.Store.State.Dir())
				t.Logf("woken: %v, %d faults, %.1f MiB touched", rep.Stages, rep.Faults, rep.MiBTouched)
				if rep.Stages[vmm.StageAgentAnswer.String()] == 0 {
					t.Error("the agent was not there when the guest came back: it was asked over vsock")
				}
				clockIsRight(e, "main", "woken")
				e.Sh("main", "echo heard after the wake >/dev/console")
				for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
					if log, err := os.ReadFile(e.Store.State.ConsoleLog("main")); err == nil && bytes.Contains(log, []byte("heard after the wake")) {
						break
					}
					if time.Now().After(deadline) {
						t.Error("what the guest writes to its console after the wake is not in its log")
						break
					}
				}
				if after := ask(e, "main"); after != before {
					t.Errorf("the process said %q before the sleep and %q after it", before, after)
				}
				sameFile("after the wake")
				if s := service(e, "main", "given", "running"); s.PID != started.PID {
					t.Errorf("after the wake the service is %+v, before the sleep %+v", s, started)
				}
			})
		}
	}
}

// onlyItsUsers checks that only its user can open a state directory and everything in it. tmp is an exception: the
// tools that make images there run as another user.
func onlyItsUsers(t *testing.T, dir string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.Type()&fs.ModeSymlink != 0 || path == filepath.Join(dir, "tmp") {
			return err
		}
		info, err := d.Info()
		if err == nil && info.Mode()&0o077 != 0 {
			t.Errorf("%s has the mode %v", path, info.Mode())
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

// registersAreSaved checks that programs in the guest use no registers that its kernel does not save on a context
// switch. A kernel without XSAVE among its flags saves only the registers of x87 and SSE.
func registersAreSaved(e *guesttest.Env, name string) {
	e.T.Helper()
	for line := range strings.Lines(e.Read(name, "/proc/cpuinfo")) {
		if fields := strings.Fields(line); len(fields) > 0 && fields[0] == "flags" && slices.ContainsFunc(fields, func(f string) bool { return strings.HasPrefix(f, "xsave") }) {
			return
		}
	}
	// The C library prints what CPUID says to a program (cpuid) and which of it the library uses (active), for
	// leaf 1 ECX and leaf 7 EBX.
	say := map[string]uint64{}
	for line := range strings.Lines(e.Do(name, "/lib64/ld-linux-x86-64.so.2", "--list-diagnostics")) {
		if what, value, ok := strings.Cut(strings.TrimSpace(line), "="); ok && strings.HasPrefix(what, "x86.cpu_features.features[") {
			n, err := strconv.ParseUint(value, 0, 32)
			if err != nil {
				e.T.Fatalf("the C library says %q: %v", line, err)
			}
			say[strings.TrimPrefix(what, "x86.cpu_features.features")] = n
		}
	}
	// Leaf 1 is the first element and leaf 7 the second. Among their registers EBX has index 1 and ECX index 2.
	const cpuidLeaf1ECX, activeLeaf1ECX, activeLeaf7EBX = "[0x0].cpuid[0x2]", "[0x0].active[0x2]", "[0x1].active[0x1]"
	for _, what := range []string{cpuidLeaf1ECX, activeLeaf1ECX, activeLeaf7EBX} {
		if _, ok := say[what]; !ok {
			e.T.Fatalf("the C library does not say %s: %v", what, say)
		}
	}
	cpuid1c, active1c, active7b := say[cpuidLeaf1ECX], say[activeLeaf1ECX], say[activeLeaf7EBX]
	const osxsave, avx, avx2, avx512f = 1 << 27, 1 << 28, 1 << 5, 1 << 16
	if cpuid1c&osxsave == 0 {
		return // without OSXSAVE no program uses AVX
	}
	if active1c&avx != 0 || active7b&(avx2|avx512f) != 0 {
		e.T.Errorf("the C library uses AVX: %v", say)
	}
	if env := e.Read(name, "/proc/1/environ") + e.Do(name, "env"); strings.Count(env, "GODEBUG=cpu.avx=off") != 2 {
		e.T.Errorf("Go programs may use AVX: their environment is %q", env)
	}
}

// clockIsRight compares the guest's clock with the host's before and after it was asked.
func clockIsRight(e *guesttest.Env, name, when string) {
	e.T.Helper()
	asked := time.Now()
	info, err := e.Agent(name).Ping(e.T.Context())
	if err != nil {
		e.T.Fatal(err)
	}
	e.T.Logf("%s: the guest's clock is %v to %v ahead", when, info.Wall.Sub(time.Now()), info.Wall.Sub(asked))
	if w := info.Wall; w.Before(asked.Add(-time.Second)) || w.After(time.Now().Add(time.Second)) {
		e.T.Errorf("the clock of a guest that has %s says %v, and it was asked at %v", when, w, asked)
	}
}

// booted is a sleeping VM with a keeper in it.
var booted = guesttest.Booted{
	Spec: sandbox.Spec{
		Name: "base", Self: spec.Self{Allow: []string{guest.SelfSleep, guest.SelfSnapshot, guest.SelfHold, guest.SelfFork + "=1"}},
		Hooks: spec.Hooks{TimeoutSeconds: spec.MaxHookSeconds, AllSeconds: spec.MaxHookSeconds},
	},
	Prepare: func(e *guesttest.Env) { bootedSays = keep(e, "base") },
}

// bootedSays is the answer of its keeper, set by Prepare.
var bootedSays string

// base returns a store with that VM, its snapshot to make clones of, and the keeper's answer.
func base(t *testing.T) (e *guesttest.Env, snap, said string) {
	t.Helper()
	e = booted.New(t)
	r, err := e.Store.State.Get("base")
	if err != nil {
		t.Fatal(err)
	}
	return e, r.Snapshot, bootedSays
}

// standbys returns the standby processes of a store that no VM has taken yet.
func standbys(e *guesttest.Env) (pids []int) {
	e.T.Helper()
	records, err := e.Store.State.List()
	if err != nil {
		e.T.Fatal(err)
	}
	lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		e.T.Fatal(err)
	}
	for _, path := range lines {
		line, err := os.ReadFile(path)
		if err != nil || !bytes.Contains(line, []byte(e.Store.State.Dir()+"\x00--standby\x00")) {
			continue // it has ended
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if err != nil {
			e.T.Fatal(err)
		}
		if !slices.ContainsFunc(records, func(r *state.Record) bool { return r.PID == pid }) {
			pids = append(pids, pid)
		}
	}
	return pids
}

func clone(e *guesttest.Env, snap, name string) {
	e.T.Helper()
	if _, err := e.Store.With(e.Launcher).Clone(e.T.Context(), snap, sandbox.CloneOptions{Name: name}); err != nil {
		e.T.Fatal(err)
	}
}

// unread is RAM of which nothing is read.
type unread struct {
	zeros
	slots []snapshot.Slot
}

func (u unread) Slots() []snapshot.Slot { return u.slots }

// otherTSC returns a copy of a snapshot in which the time stamp counter of each vCPU has another value: a host that was
// restarted since has a smaller one, another host any.
func otherTSC(t *testing.T, s *state.Store, snap string, tsc uint64) string {
	t.Helper()
	from, err := snapshot.Open(s.SnapshotDir(snap))
	if err != nil {
		t.Fatal(err)
	}
	defer from.Close()
	m, states, changed := from.Manifest(), from.Payloads(), 0
	for i := range states {
		if states[i].Kind != "kvm-vcpu" {
			continue
		}
		const msrTSC, entry = 0x10, 16
		data := bytes.Clone(states[i].Data)
		for rest := data; len(rest) > 8; { // records: tag, length, data
			n := binary.LittleEndian.Uint32(rest[4:])
			record := rest[8 : 8+n]
			rest = rest[8+n:]
			for ; n%entry == 0 && len(record) > 0; record = record[entry:] {
				if binary.LittleEndian.Uint64(record) == msrTSC && binary.LittleEndian.Uint64(record[8:]) > 1<<20 {
					binary.LittleEndian.PutUint64(record[8:], tsc)
					changed++
				}
			}
		}
		states[i].Data = data
	}
	if changed != m.VCPUs {
		t.Fatalf("%d counters of %d vCPUs", changed, m.VCPUs)
	}
	id := spec.NewID()
	if _, err := snapshot.Create(t.Context(), s.SnapshotDir(id), snapshot.Spec{
		ID: id, Sandbox: m.Sandbox, VCPUs: m.VCPUs, Kernel: m.Kernel, Image: m.Image, Disks: m.Disks, Host: m.Host, Labels: m.Labels,
		Payloads: states, Memory: unread{slots: from.Memory().Slots()}, Base: from, Changed: guestmem.NewPageSet(from.Memory().Pages()),
	}); err != nil {
		t.Fatal(err)
	}
	return id
}

// One boot serves all subtests.
func TestWith_clones_of_one_snapshot(t *testing.T) {
	t.Parallel()
	e, snap, said := base(t)
	sub := func(name string, f func(t *testing.T, e *guesttest.Env)) {
		t.Run(name, func(t *testing.T) {
			own := *e
			own.T = t
			f(t, &own)
		})
	}
	sub("two clones differ in randomness and identity, and go on from the same memory", func(t *testing.T, e *guesttest.Env) {
		var seen [][]string
		for _, name := range []string{"a", "b"} {
			clone(e, snap, name)
			if got := ask(e, name); got != said {
				t.Errorf("the keeper says %q in the clone, %q in the original", got, said)
			}
			seen = append(seen, identity(e, name))
		}
		for i, a := range seen[0] {
			if a == seen[1][i] {
				t.Errorf("both clones have %q", a)
			}
		}
	})
	sub("the kernel learns of a clone and of a way back in time, and not of a wake", func(t *testing.T, e *guesttest.Env) {
		// The kernel logs a line when it finds a new VM generation ID.
		until := func(want int) {
			t.Helper()
			got := -1
			for end := time.Now().Add(2 * time.Minute); got < want && time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
				got = strings.Count(e.Do("learns", "dmesg"), "crng reseeded due to virtual machine fork")
			}
			if got != want {
				t.Errorf("it has learned of %d clones or ways back, want %d", got, want)
			}
		}
		clone(e, snap, "learns")
		// A template is made from another VM, and what was booted once for all tests from that.
		clones := 1
		if list, _, err := e.Store.State.Templates().List(); err != nil {
			t.Fatal(err)
		} else if len(list) > 0 {
			clones = 3
		}
		until(clones)
		box := e.Store.With(e.Launcher).Sandbox("learns")
		taken, err := box.Snapshot(t.Context(), sandbox.SnapshotOptions{})
		if err != nil {
			t.Fatal(err)
		}
		e.Sleep("learns")
		e.Wake("learns")
		until(clones)
		e.Sleep("learns")
		if err := box.Rewind(t.Context(), taken.Snapshot); err != nil {
			t.Fatal(err)
		}
		e.Wake("learns")
		until(clones + 1)
		if err := errors.Join(box.Delete(t.Context(), sandbox.DeleteOptions{Force: true}), e.Store.State.RemoveSnapshot(t.Context(), taken.Snapshot)); err != nil {
			t.Error(err)
		}
	})
	sub("the clocks go on where the host's counter has begun anew or is far ahead", func(t *testing.T, e *guesttest.Env) {
		const read = "import time; print(time.monotonic_ns(), time.time_ns())"
		clocks := func(name string) (mono, wall time.Duration) {
			t.Helper()
			out := e.Do(name, "python3", "-I", "-S", "-c", read)
			if _, err := fmt.Sscan(out, &mono, &wall); err != nil {
				t.Fatalf("the clocks are %q: %v", out, err)
			}
			return mono, wall
		}
		clone(e, snap, "usual")
		usual, _ := clocks("usual")
		for _, host := range []struct {
			name string
			tsc  uint64 // in place of what the guest had
		}{{"restarted", 1 << 60}, {"ahead", 1}} {
			begun := time.Now()
			clone(e, otherTSC(t, e.Store.State, snap, host.tsc), host.name)
			mono, wall := clocks(host.name)
			if mono < usual-time.Since(begun) || mono > usual+time.Since(begun)+time.Hour {
				t.Errorf("%s: the monotonic clock is %v, elsewhere %v", host.name, mono, usual)
			}
			if off := wall - time.Duration(time.Now().UnixNano()); off > 0 || off < -time.Since(begun)-time.Second {
				t.Errorf("%s: the time is off by %v", host.name, off)
			}
			if again, _ := clocks(host.name); again < mono {
				t.Errorf("%s: the monotonic clock goes back from %v to %v", host.name, mono, again)
			}
		}
	})
	sub("an exported snapshot comes to life in another store", func(t *testing.T, e *guesttest.Env) {
		var file bytes.Buffer
		if err := e.Store.State.ExportSnapshot(t.Context(), snap, &file); err != nil {
			t.Fatal(err)
		}
		other := guesttest.New(t)
		damaged := bytes.Clone(file.Bytes())
		damaged[len(damaged)/2] ^= 1
		for name, stream := range map[string][]byte{"damaged": damaged, "cut off": file.Bytes()[:file.Len()-1]} {
			if _, err := other.Store.State.ImportSnapshot(t.Context(), bytes.NewReader(stream), state.ImportOptions{}); !errors.Is(err, snapshot.ErrCorrupt) && !errors.Is(err, snapshot.ErrIncomplete) {
				t.Errorf("%s: got %v, want a typed error", name, err)
			}
			for _, dir := range []string{"snapshots", "layers"} {
				if left, err := os.ReadDir(filepath.Join(other.Store.State.Dir(), dir)); err != nil || len(left) != 0 {
					t.Errorf("%s: it has left %v in %s (%v)", name, left, dir, err)
				}
			}
		}
		info, err := other.Store.State.ImportSnapshot(t.Context(), bytes.NewReader(file.Bytes()), state.ImportOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := other.Store.State.ImportSnapshot(t.Context(), bytes.NewReader(file.Bytes()), state.ImportOptions{}); !errors.Is(err, snapshot.ErrExists) {
			t.Errorf("a second time: got %v, want ErrExists", err)
		}
		// It is a sleep snapshot, and no VM of this store sleeps in it. The sweep must keep it.
		if _, err := other.Store.State.Sweep(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := other.Store.State.VerifySnapshot(t.Context(), info.ID); err != nil {
			t.Fatal(err)
		}
		clone(other, info.ID, "there")
		if got := ask(other, "there"); got != said {
			t.Errorf("the keeper says %q there, %q here", got, said)
		}
	})
	sub("a later clone finds pages decompressed, and no damaged one", func(t *testing.T, e *guesttest.Env) {
		// Each wake stores the pages that it needed, some time after it, if it is still awake then.
		pages := filepath.Join(e.Store.State.Dir(), "pages")
		kept := func() (files []string) {
			all, err := filepath.Glob(filepath.Join(pages, "*.pages"))
			if err != nil {
				t.Fatal(err)
			}
			return all
		}
		if _, err := e.Store.With(e.Launcher).Clone(t.Context(), snap, sandbox.CloneOptions{Name: "keeps"}); err != nil {
			t.Fatal(err)
		}
		for end := time.Now().Add(2 * time.Minute); len(kept()) == 0; time.Sleep(100 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatal("no pages were kept")
			}
		}
		if err := e.Store.Sandbox("keeps").Kill(t.Context()); err != nil {
			t.Fatal(err)
		}
		again := func(name string) control.Report {
			var rep control.Report
			_, err := e.Store.With(e.Launcher).Clone(t.Context(), snap, sandbox.CloneOptions{Name: name, Report: &rep})
			if err != nil {
				t.Fatal(err)
			}
			if got := ask(e, name); got != said {
				t.Errorf("the keeper says %q in the clone, %q in the original", got, said)
			}
			if err := e.Store.Sandbox(name).Kill(t.Context()); err != nil {
				t.Fatal(err)
			}
			return rep
		}
		if rep := again("cached"); rep.FramesCached <= rep.FramesRead {
			t.Errorf("%d frames were in the cache, %d were decompressed", rep.FramesCached, rep.FramesRead)
		}
		// The lock keeps VMs from adding pages, which would repair the damage.
		lock, err := os.Open(pages)
		if err != nil {
			t.Fatal(err)
		}
		defer lock.Close()
		if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
			t.Fatal(err)
		}
		for _, path := range kept() {
			b, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			// Flip a bit in each page of the content, which follows the list.
			for at := (64 + 32*int(binary.LittleEndian.Uint32(b[12:])) + 4095) / 4096 * 4096; at < len(b); at += 4096 {
				b[at+at/4096%4096] ^= 1
			}
			if err := os.WriteFile(path, b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if rep := again("uncached"); rep.FramesCached != 0 || rep.FramesRead == 0 {
			t.Errorf("of a damaged cache %d frames were used, %d were decompressed", rep.FramesCached, rep.FramesRead)
		}
	})
	sub("poweroff is reported as such", func(t *testing.T, e *guesttest.Env) {
		if err := e.Store.Sandbox("a").Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
		if r := e.WaitPhase("a", state.Stopped, time.Minute); r.Exit == nil || r.Exit.Reason != string(vmm.PoweredOff) {
			t.Errorf("exit %+v, want powered-off", r.Exit)
		}
		// Waking would go back to the snapshot and drop what was written since.
		if _, err := e.Store.With(e.Launcher).Sandbox("a").Wake(t.Context()); !errors.Is(err, sandbox.ErrNotRunning) {
			t.Errorf("waking a VM that has shut down: got %v, want ErrNotRunning", err)
		}
	})
	sub("reboot is reported as such", func(t *testing.T, e *guesttest.Env) {
		if err := e.Agent("b").Shutdown(t.Context(), guest.Shutdown{Reboot: true}); err != nil {
			t.Fatal(err)
		}
		if r := e.WaitPhase("b", state.Stopped, time.Minute); r.Exit == nil || r.Exit.Reason != string(vmm.Rebooted) {
			t.Errorf("exit %+v, want rebooted", r.Exit)
		}
	})
	sub("a panic is reported as such", func(t *testing.T, e *guesttest.Env) {
		clone(e, snap, "c")
		p, err := e.Agent("c").Start(t.Context(), guest.Cmd{Argv: []string{"/bin/sh", "-c", "echo 1 > /proc/sys/kernel/sysrq; echo c > /proc/sysrq-trigger"}, Detach: true})
		if err != nil {
			t.Fatal(err)
		}
		p.Close()
		if r := e.WaitPhase("c", state.Stopped, time.Minute); r.Exit == nil || r.Exit.Reason != string(vmm.Panicked) {
			t.Errorf("exit %+v, want panicked", r.Exit)
		}
	})
	sub("a killed VM leaves nothing behind and comes back as of its snapshot", func(t *testing.T, e *guesttest.Env) {
		clone(e, snap, "d")
		r, err := e.Store.State.Get("d")
		if err != nil {
			t.Fatal(err)
		}
		e.Write("d", "lost", "/root/after")
		if err := unix.Kill(r.PID, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		r = e.WaitPhase("d", state.Crashed, time.Minute)
		if r.Problem == "" {
			t.Error("the record does not say what has happened")
		}
		entries, err := os.ReadDir(filepath.Dir(e.Store.State.VsockPath("d")))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range entries {
			if f.Type()&fs.ModeSocket != 0 {
				t.Errorf("socket %s is left", f.Name())
			}
		}
		e.Wake("d")
		if got := ask(e, "d"); got != said {
			t.Errorf("after the crash the keeper says %q, want %q", got, said)
		}
		if e.Exists("d", "/root/after") {
			t.Error("a file that was written after the snapshot is there")
		}
	})
	sub("processes that were made ahead become those of VMs", func(t *testing.T, e *guesttest.Env) {
		pool, err := pool.New(e.Store.State, e.Launcher, pool.Options{Processes: 2, Shapes: []spec.Shape{{MemoryMiB: spec.DefaultMemoryMiB, VCPUs: 1}}})
		if err != nil {
			t.Fatal(err)
		}
		if err := pool.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		ahead := standbys(e)
		if len(ahead) != 2 {
			t.Fatalf("%d processes stand by", len(ahead))
		}
		l := pool.Launcher()
		l.Command = []string{"/bin/false"} // only the pool's processes work
		begin := time.Now().Round(0)
		var rep control.Report
		_, err = e.Store.With(l).Clone(t.Context(), snap, sandbox.CloneOptions{Name: "p", Report: &rep})
		if err != nil {
			t.Fatal(err)
		}
		if !rep.Pooled || rep.Begun.Before(begin) || rep.Begun.After(time.Now()) {
			t.Errorf("the report of %v says that the process stood by: %v, and began at %v", begin, rep.Pooled, rep.Begun)
		}
		r, err := e.Store.State.Get("p")
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Contains(ahead, r.PID) {
			t.Errorf("the VM's process is %d, and %v stood by", r.PID, ahead)
		}
		// A standby process that dies does no harm.
		if err := pool.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		for _, pid := range standbys(e) {
			if err := unix.Kill(pid, unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := e.Store.With(pool.Launcher()).Clone(t.Context(), snap, sandbox.CloneOptions{Name: "q"}); err != nil {
			t.Fatal(err)
		}
		// Another process gets its standby processes from the one that serves the pool.
		if err := pool.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		ahead = standbys(e)
		ctx, stop := context.WithCancel(t.Context())
		served := make(chan error, 1)
		go func() { served <- pool.Serve(ctx) }()
		for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
			if _, err := os.Stat(filepath.Join(e.Store.State.Dir(), "pool.sock")); err == nil {
				break
			} else if time.Now().After(end) {
				t.Fatal(err)
			}
		}
		l = e.Launcher
		l.Supervised = true
		if _, err := e.Store.With(l).Clone(t.Context(), snap, sandbox.CloneOptions{Name: "r"}); err != nil {
			t.Fatal(err)
		}
		if r, err := e.Store.State.Get("r"); err != nil || !slices.Contains(ahead, r.PID) {
			t.Errorf("the VM's process is %d (%v), and %v stood by", r.PID, err, ahead)
		}
		stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
		if err := pool.Close(); err != nil {
			t.Error(err)
		}
		if left := standbys(e); len(left) != 0 {
			t.Errorf("processes %v stand by after the pool's end", left)
		}
		for _, name := range []string{"p", "q", "r"} {
			if got := ask(e, name); got != said {
				t.Errorf("the keeper says %q in VM %s, want %q", got, name, said)
			}
			if err := e.Store.Sandbox(name).Delete(t.Context(), sandbox.DeleteOptions{Force: true}); err != nil {
				t.Error(err)
			}
		}
	})
	sub("a snapshot of a running VM lets it run on", func(t *testing.T, e *guesttest.Env) {
		e.Write("d", "kept", "/root/kept")
		res, err := e.Store.Sandbox("d").Snapshot(t.Context(), sandbox.SnapshotOptions{Note: "a note"})
		if err != nil {
			t.Fatal(err)
		}
		if res.BytesShared == 0 || res.BytesStored > 16<<20 {
			t.Errorf("%d bytes stored and %d shared: it is no delta", res.BytesStored, res.BytesShared)
		}
		e.Write("d", "later", "/root/later")
		clone(e, res.Snapshot, "e")
		if got := e.Read("e", "/root/kept"); got != "kept" || e.Exists("e", "/root/later") {
			t.Errorf("the clone has %q, or what was written later", got)
		}
		if got := e.Read("d", "/root/later"); got != "later" {
			t.Errorf("the source has %q", got)
		}
		if err := e.Store.Sandbox("e").Delete(t.Context(), sandbox.DeleteOptions{Force: true}); err != nil {
			t.Error(err)
		}
		if err := e.Store.State.RemoveSnapshot(t.Context(), res.Snapshot); err != nil {
			t.Error(err)
		}
	})
	sub("a full disk during sleep lets the VM run on", func(t *testing.T, e *guesttest.Env) {
		dir := filepath.Join(e.Store.State.Dir(), "snapshots")
		if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"); err != nil {
			t.Fatal(err)
		}
		_, err := e.Store.Sandbox("d").Sleep(t.Context(), sandbox.SleepOptions{})
		left, derr := os.ReadDir(dir)
		if uerr := unix.Unmount(dir, 0); uerr != nil {
			t.Fatal(uerr)
		}
		if !errors.Is(err, snapshot.ErrNoSpace) {
			t.Errorf("got %v, want ErrNoSpace", err)
		}
		if derr != nil || len(left) != 0 {
			t.Errorf("the failed sleep has left %v (%v)", left, derr)
		}
		if got := askAndRead(e, "d", "/root/later"); got != said+"\nlater" {
			t.Errorf("the VM says %q", got)
		}
		e.Sleep("d")
		e.Wake("d")
		if got := askAndRead(e, "d", "/root/later"); got != said+"\nlater" {
			t.Errorf("after the sleep that worked it says %q", got)
		}
	})
	sub("two wakes at once make one VM", func(t *testing.T, e *guesttest.Env) {
		e.Sleep("d")
		errs := make(chan error)
		for range 2 {
			go func() {
				_, err := e.Store.With(e.Launcher).Sandbox("d").Wake(t.Context())
				errs <- err
			}()
		}
		if err := errors.Join(<-errs, <-errs); err != nil {
			t.Error(err)
		}
		if got := ask(e, "d"); got != said {
			t.Errorf("the keeper says %q", got)
		}
	})
	sub("a wake that is called off takes the VM from nobody", func(t *testing.T, e *guesttest.Env) {
		for _, after := range []time.Duration{0, 30 * time.Millisecond, 300 * time.Millisecond} {
			e.Sleep("d")
			ctx, cancel := context.WithTimeout(t.Context(), after)
			called := make(chan error)
			go func() {
				_, err := e.Store.With(e.Launcher).Sandbox("d").Wake(ctx)
				called <- err
			}()
			if _, err := e.Store.With(e.Launcher).Sandbox("d").Wake(t.Context()); err != nil {
				t.Errorf("beside one that is called off after %v: %v", after, err)
			}
			woken, werr := e.Store.State.Get("d")
			if err := <-called; err != nil && !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("called off after %v: %v", after, err)
			}
			cancel()
			if r, err := e.Store.State.Get("d"); errors.Join(err, werr) != nil || r.Phase != state.Running || r.PID != woken.PID {
				t.Errorf("called off after %v: it is %s as process %d, and was woken as process %d (%v, %v)", after, r.Phase, r.PID, woken.PID, err, werr)
			}
		}
		if got := ask(e, "d"); got != said {
			t.Errorf("the keeper says %q", got)
		}
	})
	sub("a wake during a sleep waits and wins", func(t *testing.T, e *guesttest.Env) { wakeDuringSleep(t, e, "d") })
	sub("sandboxes are what package fleet promises", func(t *testing.T, e *guesttest.Env) { sandboxesOfGuests(t, e, snap) })
	sub("a damaged snapshot is refused or stops the VM, and gives no wrong memory", func(t *testing.T, e *guesttest.Env) {
		e.Sleep("d")
		r, err := e.Store.State.Get("d")
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range []string{snapshot.ManifestName, snapshot.MemoryName} {
			path := filepath.Join(e.Store.State.SnapshotDir(r.Snapshot), file)
			good, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			bad := bytes.Clone(good)
			for i := len(bad) / 3; i < len(bad); i += 4096 {
				bad[i] ^= 1
			}
			if err := os.WriteFile(path, bad, 0o600); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			_, err = e.Store.With(e.Launcher).Sandbox("d").Wake(ctx)
			cancel()
			if err == nil || errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("waking from a damaged %s: got %v, want an error at once", file, err)
			} else {
				t.Logf("damaged %s: %v", file, err)
			}
			if err := os.WriteFile(path, good, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		e.Wake("d")
		if got := ask(e, "d"); got != said {
			t.Errorf("after the repair the keeper says %q", got)
		}
	})
	sub("forwards, ssh and sftp reach a guest, and a sleep resets what is open", func(t *testing.T, e *guesttest.Env) {
		clone(e, snap, "access")
		sshServesAGuestWithoutAServer(t, e, "access")
		forwardsEndWithTheSleep(t, e, "access")
		recordedInTheTrail(t, e, "access")
	})
	sub("a copy, a watch and a terminal go on after a sleep", func(t *testing.T, e *guesttest.Env) {
		workThatASleepCuts(t, e, "access")
	})
	sub("a guest asks its host for a snapshot, a hold and a sleep", func(t *testing.T, e *guesttest.Env) {
		guestAsksItsHost(t, e, "access")
	})
	sub("stats tell what the guest and the host count", func(t *testing.T, e *guesttest.Env) {
		statsOfAGuest(t, e, "access")
	})
	sub("a VM that nobody uses goes to sleep by itself", func(t *testing.T, e *guesttest.Env) { idleVM(t, e, snap, said) })
	sub("removing all VMs leaves no layers and no snapshots", func(t *testing.T, e *guesttest.Env) {
		records, err := e.Store.State.List()
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range records {
			if err := e.Store.Sandbox(r.Spec.Name).Delete(t.Context(), sandbox.DeleteOptions{Force: true}); err != nil {
				t.Error(err)
			}
		}
		e.RemoveTemplates()
		for _, sub := range []string{"layers", "vms"} {
			left, err := os.ReadDir(filepath.Join(e.Store.State.Dir(), sub))
			// The store keeps the empty file systems that disks begin with.
			left = slices.DeleteFunc(left, func(f fs.DirEntry) bool { return strings.HasPrefix(f.Name(), "ext4-") || f.Name() == ".ext4.lock" })
			if err != nil || len(left) != 0 {
				t.Errorf("%s: %v left (%v)", sub, left, err)
			}
		}
	})
}

// Two sandboxes of one template are as two that have booted.
func TestCreate_from_a_template_gives_each_guest_its_own_identity(t *testing.T) {
	t.Parallel()
	e := guesttest.New(t)
	host := e.Store.With(e.Launcher)
	given := spec.Service{Name: "given", Argv: []string{"/bin/sleep", "1000000"}, Env: []string{"SAID=to one"}}
	want := sandbox.Spec{Image: guesttest.ImageTag, MemoryMiB: 256, DiskMiB: 256}
	e.Template(want)
	var seen [][]string
	for _, name := range []string{"one", "two"} {
		if want.Name, want.Services = name, nil; name == "one" {
			want.Services = []spec.Service{given}
		}
		begun := time.Now()
		if _, err := host.Create(t.Context(), want, sandbox.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		if got := e.Do(name, "/bin/echo", "first"); got != "first" {
			t.Errorf("the first command of %s says %q", name, got)
		}
		t.Logf("to the end of the first command: %v", time.Since(begun))
		id := identity(e, name)
		r, err := e.Store.State.Get(name)
		if err != nil || r.Template == "" {
			t.Fatalf("%s has booted because %q (%v)", name, r.Booted, err)
		}
		if id[2] != name {
			t.Errorf("the host name of %s is %q", name, id[2])
		}
		machine := e.Read(name, "/etc/machine-id")
		if len(machine) != 32 {
			t.Errorf("the machine id of %s is %q", name, machine)
		}
		if got := e.Read(name, "/proc/cmdline"); !strings.Contains(got, "drowse.hostname=template") {
			t.Errorf("the command line is %q: the boot was somebody's", got)
		}
		seen = append(seen, append(id, machine))
	}
	for i, a := range seen[0] {
		if a == seen[1][i] {
			t.Errorf("both have %q", a)
		}
	}
	process := fmt.Sprintf("/proc/%d/", service(e, "one", "given", "running").PID)
	if got := e.Read("one", process+"environ"); !slices.Contains(strings.Split(got, "\x00"), "SAID=to one") {
		t.Errorf("the service has %q", got)
	}
	if e.Exists("two", process) && e.Read("two", process+"comm") == "sleep" {
		t.Error("a service of one runs in two")
	}
	// Its template removed, it sleeps and wakes.
	e.RemoveTemplates()
	e.Write("one", "kept", "/root/file", "/run/file")
	e.Sleep("one")
	e.Wake("one")
	if got := e.Read("one", "/root/file", "/run/file"); got != "kept\nkept" {
		t.Errorf("after a sleep it has %q", got)
	}
	if again := identity(e, "one"); again[1] != seen[0][1] {
		t.Errorf("its boot id was %s and is %s", seen[0][1], again[1])
	}
}
