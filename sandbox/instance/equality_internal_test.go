package instance

import (
	"bytes"
	"context"
	"debug/elf"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/snapshot/pagecache"
	"github.com/drowse-vm/drowse/snapshot/pager"
	"github.com/drowse-vm/drowse/vmm"
	"github.com/drowse-vm/drowse/vmm/boot"
	"github.com/drowse-vm/drowse/vmm/guestmem"
	"github.com/drowse-vm/drowse/vmm/kvm"
)

// This test is inside this package because it is about what Instance.Capture, Restore and RestoreFork do with KVM's
// log, guestmem's marks, frozen views, images, snapshots and the pager together. Package vmm may not know snapshots,
// and package snapshot may not know machines. A test that repeated the same steps on its own would prove nothing about
// the steps taken here.
//
// The test knows the expected RAM independently. While the machine is paused, it reads the pages that the host has
// committed through /proc/self/mem. The others are what they were when the machine was restored, unless the test has
// discarded them since.

var (
	equalitySeeds = flag.Int("sandbox.equality-seeds", 0, "how many random histories of machines to compare page by page; 0: a number that takes seconds")
	equalityFirst = flag.Uint64("sandbox.equality-first", 0, "the first seed of these histories")
)

const (
	equalityDefault = 14
	// Two of this many seeds have a long chain.
	equalityDeepEvery = 100
	equalityDeep      = 32
)

// writingGuest writes to pages for ever, and has a disk write to pages. It has its own page tables, and runs in
// user mode if its parameters say so. Its parameters, which may change while it runs, are at RBX. Page numbers are
// relative to a window at R11.
//
//	R12 random number  R8, R9 multiplier and increment  R10 counter of rounds  RBP virtqueue
var writingGuest = []byte{
	0xb8, 0x00, 0x00, 0x23, 0x01, 0x0f, 0x22, 0xd8, // mov eax, tables; mov cr3, rax
	0x0f, 0x01, 0x14, 0x25, 0x00, 0x10, 0x24, 0x01, // lgdt [...]
	0xbe, 0x00, 0x00, 0x22, 0x01, // mov esi, script
	0x8b, 0x06, 0x83, 0xf8, 0xff, 0x74, 0x1e, 0x8b, 0x4e, 0x04, // 1: mov eax, [rsi]; cmp eax, -1; je 2; mov ecx, [rsi+4]
	0x3d, 0x00, 0x00, 0x00, 0x40, 0x73, 0x0a, // cmp eax, 0x40000000; jae MSR
	0xbf, 0x00, 0x00, 0x00, 0xd0, 0x89, 0x0c, 0x07, 0xeb, 0x05, // mov edi, MMIO; mov [rdi+rax], ecx; jmp next
	0x91, 0x31, 0xd2, 0x0f, 0x30, // MSR: xchg eax, ecx; xor edx, edx; wrmsr
	0x83, 0xc6, 0x08, 0xeb, 0xdb, // next: add esi, 8; jmp 1
	0xbb, 0x00, 0x00, 0x20, 0x01, // 2: mov ebx, parameters
	// mov r8, [rbx+0x28]; r9, [rbx+0x30]; r12, [rbx+0x38]
	0x4c, 0x8b, 0x43, 0x28, 0x4c, 0x8b, 0x4b, 0x30, 0x4c, 0x8b, 0x63, 0x38,
	0x41, 0xba, 0x00, 0x10, 0x20, 0x01, 0x41, 0xbb, 0x00, 0x00, 0x00, 0x40, // mov r10d, counter; mov r11d, window
	0xbd, 0x00, 0x00, 0x21, 0x01, // mov ebp, virtqueue
	0x48, 0x83, 0x7b, 0x40, 0x00, 0x74, 0x15, // cmp qword [rbx+0x40], 0; je loop
	0x6a, 0x3b, 0x68, 0x00, 0x28, 0x20, 0x01, 0x6a, 0x02, 0x6a, 0x33, // push SS, RSP, RFLAGS, CS
	0x48, 0x8d, 0x05, 0x03, 0x00, 0x00, 0x00, 0x50, 0x48, 0xcf, // lea rax, [rip+loop]; push rax; iretq
	0x4d, 0x0f, 0xaf, 0xe0, 0x4d, 0x01, 0xcc, // loop: imul r12, r8; add r12, r9
	// rcx = ((r12>>40 & [rbx+8]) + [rbx]) << 12
	0x4c, 0x89, 0xe1, 0x48, 0xc1, 0xe9, 0x28, 0x48, 0x23, 0x4b, 0x08, 0x48, 0x03, 0x0b, 0x48, 0xc1, 0xe1, 0x0c,
	0x4d, 0x89, 0x64, 0x0b, 0x18, // mov [r11+rcx+0x18], r12
	// the same of r12>>30
	0x4c, 0x89, 0xe1, 0x48, 0xc1, 0xe9, 0x1e, 0x48, 0x23, 0x4b, 0x08, 0x48, 0x03, 0x0b, 0x48, 0xc1, 0xe1, 0x0c,
	0x4c, 0x89, 0xe2, 0xf0, 0x49, 0x0f, 0xc1, 0x54, 0x0b, 0x40, // mov rdx, r12; lock xadd [r11+rcx+0x40], rdx
	// rcx = ((r12>>36 & [rbx+0x18]) + [rbx+0x10]) << 12
	0x4c, 0x89, 0xe1, 0x48, 0xc1, 0xe9, 0x24, 0x48, 0x23, 0x4b, 0x18, 0x48, 0x03, 0x4b, 0x10, 0x48, 0xc1, 0xe1, 0x0c,
	0x41, 0x02, 0x94, 0x0b, 0x80, 0x00, 0x00, 0x00, // add dl, [r11+rcx+0x80], only to read
	0x4c, 0x89, 0xe2, 0x48, 0xc1, 0xea, 0x3c, 0x75, 0x2f, // mov rdx, r12; shr rdx, 60; jnz kick
	// rcx of r12>>33
	0x4c, 0x89, 0xe1, 0x48, 0xc1, 0xe9, 0x21, 0x48, 0x23, 0x4b, 0x08, 0x48, 0x03, 0x0b, 0x48, 0xc1, 0xe1, 0x0c,
	// lea rdi, [r11+rcx]; rax = 0, or r12
	0x49, 0x8d, 0x3c, 0x0b, 0x4c, 0x89, 0xe0, 0x48, 0xc1, 0xe8, 0x14, 0x83, 0xe0, 0x01, 0x48, 0xf7, 0xd8, 0x4c, 0x21, 0xe0,
	0xb9, 0x00, 0x02, 0x00, 0x00, 0xfc, 0xf3, 0x48, 0xab, // mov ecx, 512; cld; rep stosq: a whole page
	// kick: mov rdx, r12; shr rdx, 57; and edx, 7; jnz end
	0x4c, 0x89, 0xe2, 0x48, 0xc1, 0xea, 0x39, 0x83, 0xe2, 0x07, 0x75, 0x3e,
	0x48, 0x83, 0x7b, 0x20, 0x00, 0x74, 0x37, // cmp qword [rbx+0x20], 0; je end
	// mov cx, [avail.idx]; sub cx, [used.idx]
	0x66, 0x8b, 0x8d, 0x02, 0x10, 0x00, 0x00, 0x66, 0x2b, 0x8d, 0x02, 0x20, 0x00, 0x00,
	0x66, 0x83, 0xf9, 0x10, 0x77, 0x23, // cmp cx, 16; ja end
	// mov [sector], r12>>24 & 63
	0x4c, 0x89, 0xe2, 0x48, 0xc1, 0xea, 0x18, 0x83, 0xe2, 0x3f, 0x48, 0x89, 0x95, 0x08, 0x30, 0x00, 0x00,
	0x66, 0xff, 0x85, 0x02, 0x10, 0x00, 0x00, // inc word [avail.idx]
	0xba, 0x50, 0x00, 0x00, 0xd0, 0xc7, 0x02, 0x00, 0x00, 0x00, 0x00, // mov edx, QueueNotify; mov dword [rdx], 0
	0x49, 0xff, 0x02, 0xe9, 0x21, 0xff, 0xff, 0xff, // end: inc qword [r10]; jmp loop
}

// The layout of the guest's RAM. Virtual addresses equal physical ones except in the window. The guest and devices
// write at random from dataFrom on.
const (
	guestCode    = 0x1000000
	guestParams  = 0x1200000
	guestCounter = 0x1201000
	guestQueue   = 0x1210000 // descriptors, then avail, used, header, status, a page each
	guestScript  = 0x1220000
	guestTables  = 0x1230000
	guestGDT     = 0x1240000
	guestKVM     = 0x1250000
	dataFrom     = 0x2000000
	windowAt     = 0x40000000
	windowPages  = 2048
	diskRequests = 64
	diskSectors  = 128
)

// guestProgram returns an ELF file that is entered like a kernel.
func guestProgram(code []byte) []byte {
	var b bytes.Buffer
	h := elf.Header64{
		Type: uint16(elf.ET_EXEC), Machine: uint16(elf.EM_X86_64), Version: 1, Entry: guestCode,
		Phoff: 64, Ehsize: 64, Phentsize: 56, Phnum: 1, Shentsize: 64,
	}
	copy(h.Ident[:], elf.ELFMAG)
	h.Ident[elf.EI_CLASS], h.Ident[elf.EI_DATA], h.Ident[elf.EI_VERSION] = 2, 1, 1
	p := elf.Prog64{
		Type: uint32(elf.PT_LOAD), Flags: 7, Off: 120, Vaddr: guestCode, Paddr: guestCode,
		Filesz: uint64(len(code)), Memsz: 1 << 20, Align: guestmem.PageSize,
	}
	// A buffer never fails.
	_ = errors.Join(binary.Write(&b, binary.LittleEndian, h), binary.Write(&b, binary.LittleEndian, p))
	b.Write(code)
	return b.Bytes()
}

// content is RAM at one instant: the pages that are not zeros, by their linear number.
type content map[uint64][]byte

var zeros = make([]byte, guestmem.PageSize)

// An instant is a snapshot and the RAM that it must hold.
type instant struct {
	dir   string
	ram   content
	depth int // of the chain, 1 for one without a base
}

// A history is the course of events of one seed.
type history struct {
	t        *testing.T
	seed     uint64
	rnd      *rand.Rand
	dir      string
	spec     spec.VM
	user     bool
	pool     []uint64 // linear pages that the guest's window shows
	noise    *os.File
	mem      *os.File // /proc/self/mem
	pagemap  *os.File
	instants []*instant
	machines []*testMachine
	last     content // the last content seen, to share equal pages
	names    int
	saw      *sightings
}

// sightings count the events of all histories.
type sightings struct {
	captures, deltas, live, forks, childCaptures, wokenCaptures, failures, whole, discards, waking, compared, pages, diskReads, deepest, cachedFrames, damagedFrames, damages int
}

// A testMachine is a running machine.
type testMachine struct {
	h     *history
	in    *Instance
	born  content // RAM when it was restored; nil after a boot
	gone  *guestmem.PageSet
	depth int
	child bool
	woken bool
}

func (h *history) fatal(args ...any) {
	h.t.Helper()
	h.t.Fatalf("seed %d: %s", h.seed, strings.TrimSuffix(fmt.Sprintln(args...), "\n"))
}

func (h *history) must(err error) {
	h.t.Helper()
	if err != nil {
		h.fatal(err)
	}
}

func (h *history) path(kind string) string {
	h.names++
	return filepath.Join(h.dir, fmt.Sprintf("%s%d", kind, h.names))
}

// chance is true once in n times.
func (h *history) chance(n int) bool { return h.rnd.IntN(n) == 0 }

func (h *history) pages() uint64 { return h.spec.Memory() / guestmem.PageSize }

// Every page of every restored machine must equal that of the captured machine at the instant of the capture. This
// holds for chains of deltas, for forks, and for chains that continue in both, whatever the guest, a disk and the
// host write and the balloon discards before, during and after the capture, and whether captures in between fail
// or not. RAM is one slot or two. Threads are not synchronized, so a seed gives the same course of events but not
// the same bytes.
func TestEvery_page_of_a_restored_machine_equals_that_of_the_captured_one(t *testing.T) {
	t.Parallel()
	needMachines(t)
	n := *equalitySeeds
	if n == 0 {
		n = equalityDefault
	}
	// The test makes hundreds of machines, whose RAM is not the garbage collector's.
	defer debug.SetGCPercent(debug.SetGCPercent(400))
	saw := &sightings{}
	for seed := *equalityFirst; seed < *equalityFirst+uint64(n); seed++ {
		runHistory(t, seed, saw)
		if done := seed - *equalityFirst + 1; done%100 == 0 {
			t.Logf("%d histories: %+v", done, *saw)
		}
	}
	t.Logf("%+v", *saw)
	for what, k := range map[string]int{
		"deltas": saw.deltas, "live captures": saw.live, "forks": saw.forks, "captures of children": saw.childCaptures,
		"captures of woken machines": saw.wokenCaptures, "failures": saw.failures, "discards": saw.discards, "wakes": saw.waking,
		"reads from the disk": saw.diskReads, "frames out of the cache": saw.cachedFrames, "damages of the cache": saw.damages,
	} {
		if k == 0 && n >= equalityDefault {
			t.Errorf("there were no %s: this test shows less than it says", what)
		}
	}
	if saw.deepest < equalityDeep && n >= equalityDefault {
		t.Errorf("the longest chain has %d snapshots, want %d", saw.deepest, equalityDeep)
	}
}

func needMachines(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("runs a guest: not in short mode")
	}
	sys, err := kvm.Open()
	if err == nil {
		sys.Close()
		return
	}
	if !errors.Is(err, kvm.ErrNoKVM) {
		t.Fatal(err)
	}
	t.Skip(err)
}

// memoryDir returns a directory in memory if there is one with room. The test needs no durability, and syncs files
// hundreds of times.
func memoryDir(t *testing.T) string {
	t.Helper()
	const shm, room = "/dev/shm", 1 << 30
	var st unix.Statfs_t
	if err := unix.Statfs(shm, &st); err != nil || st.Bavail*uint64(st.Bsize) < room {
		return t.TempDir()
	}
	dir, err := os.MkdirTemp(shm, "dq")
	if err != nil {
		return t.TempDir()
	}
	return dir
}

func runHistory(t *testing.T, seed uint64, saw *sightings) {
	t.Helper()
	h := &history{t: t, seed: seed, rnd: rand.New(rand.NewPCG(seed, 3)), dir: memoryDir(t), saw: saw}
	defer h.close()
	target := 3 + h.rnd.IntN(4)
	if deep := seed % equalityDeepEvery; deep <= 1 { // once with each layout
		target = equalityDeep
	}
	h.prepare()
	m := h.boot()
	deepest := 0
	for range 3 * target {
		if deepest >= target {
			break
		}
		m.work()
		i, child := m.capture()
		if i == nil { // the capture was meant to fail
			if child != nil && h.chance(2) {
				m = h.only(child)
			}
			continue
		}
		deepest = max(deepest, i.depth)
		m = h.goOn(m, child, i, target == equalityDeep)
	}
	saw.deepest = max(saw.deepest, deepest)
	if p := h.last[(guestQueue+0x2000)/guestmem.PageSize]; p != nil {
		saw.diskReads += int(binary.LittleEndian.Uint16(p[2:])) // used.idx
	}
	if len(h.instants) == 0 {
		return // the only one was removed, and all later captures failed
	}
	h.compare(h.instants[len(h.instants)-1], seed < 2)
	for range 3 {
		h.compare(h.instants[h.rnd.IntN(len(h.instants))], false)
	}
}

// goOn chooses the machine in which the chain continues after a capture.
func (h *history) goOn(m, child *testMachine, i *instant, deep bool) *testMachine {
	h.t.Helper()
	next := m
	switch k := h.rnd.IntN(10); {
	case child != nil && k < 6:
		next = child
	case k < 8:
	case k < 9 || deep:
		next = h.wake(i)
	default:
		next = h.wake(h.instants[h.rnd.IntN(len(h.instants))])
	}
	return h.only(next)
}

// only closes all machines but one.
func (h *history) only(next *testMachine) *testMachine {
	for _, o := range slices.Clone(h.machines) {
		if o != next {
			o.close()
		}
	}
	return next
}

func (h *history) close() {
	var errs []error
	for _, m := range h.machines {
		errs = append(errs, m.in.Close())
	}
	for _, f := range []*os.File{h.noise, h.mem, h.pagemap} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	if err := errors.Join(append(errs, os.RemoveAll(h.dir))...); err != nil {
		h.t.Errorf("seed %d: %v", h.seed, err)
	}
}

func (m *testMachine) close() {
	m.h.keepPages(m.in)
	m.h.must(m.in.Close())
	m.h.machines = slices.DeleteFunc(m.h.machines, func(o *testMachine) bool { return o == m })
}

// prepare chooses the properties of this history's machines.
func (h *history) prepare() {
	h.spec = spec.VM{Name: "equal", VCPUs: 1, MemoryMiB: 64 + h.rnd.IntN(200)}
	if h.seed%2 == 1 {
		h.spec.MemoryMiB = 3<<10 + 1 + h.rnd.IntN(300)
		if h.seed%10 == 5 {
			h.spec.MemoryMiB = 5 << 10
		}
	}
	h.user = h.seed/2%2 == 1
	text := make([]byte, diskSectors*512)
	for i := range text {
		text[i] = byte(h.rnd.Uint32())
	}
	var err error
	h.must(os.WriteFile(h.file("noise"), text, 0o600))
	h.must(os.WriteFile(h.file("guest"), guestProgram(writingGuest), 0o600))
	h.noise, err = os.Open(h.file("noise"))
	h.must(err)
	h.mem, err = os.Open("/proc/self/mem")
	h.must(err)
	h.pagemap, err = os.Open("/proc/self/pagemap")
	h.must(err)
	h.choosePool()
}

func (h *history) file(name string) string { return filepath.Join(h.dir, name) }

// choosePool chooses pages in runs and alone, in random order. The first and the last free page of each slot are
// among them.
func (h *history) choosePool() {
	first, low, all := uint64(dataFrom/guestmem.PageSize), uint64(guestmem.HoleStart/guestmem.PageSize), h.pages()
	taken := guestmem.NewPageSet(all)
	add := func(page uint64) {
		if page >= first && page < all && !taken.Has(page) && len(h.pool) < windowPages {
			taken.Add(page, page+1)
			h.pool = append(h.pool, page)
		}
	}
	add(first)
	add(all - 1)
	if all > low {
		add(low - 1)
		add(low)
	}
	for len(h.pool) < windowPages {
		page := first + h.rnd.Uint64N(all-first)
		for n := 1 + h.rnd.Uint64N([]uint64{1, 8, 100}[h.rnd.IntN(3)]); n > 0; n-- {
			add(page + n)
		}
	}
	h.rnd.Shuffle(len(h.pool), func(i, j int) { h.pool[i], h.pool[j] = h.pool[j], h.pool[i] })
}

func (h *history) parts() Parts {
	st, err := disk.Create(h.path("disk"), 1<<20)
	h.must(err)
	p := Parts{Spec: h.spec, Kernel: h.file("guest"), Image: h.file("noise"), Disk: st, Socket: h.path("s"), VM: "0"}
	if h.seed%4 != 3 {
		p.PageCache = h.file("pages")
	}
	return p
}

// adopt adds an instance with its devices to the machines of this history.
func (h *history) adopt(in *Instance, born content, depth int) *testMachine {
	m := &testMachine{h: h, in: in, born: born, depth: depth, gone: guestmem.NewPageSet(h.pages())}
	h.machines = append(h.machines, m)
	return m
}

// gpa returns the address of a linear page.
func (m *testMachine) gpa(page uint64) guestmem.GPA {
	a, err := m.in.mem.FromLinear(page * guestmem.PageSize)
	m.h.must(err)
	return a
}

func (h *history) boot() *testMachine {
	h.t.Helper()
	in, err := begin(h.parts())
	h.must(err)
	if err := in.assemble(netOpen); err != nil {
		h.fatal(errors.Join(err, in.Close()))
	}
	m := h.adopt(in, nil, 0)
	h.must(in.machine.Boot(vmm.BootOptions{Kernel: in.parts.Kernel}))
	m.furnish()
	h.must(in.machine.Start())
	return m
}

// furnish writes to RAM what the guest needs before its first instruction.
func (m *testMachine) furnish() {
	h, le := m.h, binary.LittleEndian
	write := func(at guestmem.GPA, p []byte) { h.must(m.in.mem.Write(at, p)) }
	const rights, large = 7, 0x80 // present, writable, user; a page of 2 MiB
	const dirs, tables = 0x2000, 0x5000
	t := make([]byte, tables+windowPages/512*guestmem.PageSize)
	le.PutUint64(t, guestTables+0x1000|rights)
	for i, gib := range []int{0, 1, 3} {
		le.PutUint64(t[0x1000+8*gib:], uint64(guestTables+dirs+i<<12|rights))
	}
	for i := range uint64(dataFrom >> 21) {
		le.PutUint64(t[dirs+8*i:], i<<21|large|rights)
	}
	for i := range uint64(windowPages / 512) {
		le.PutUint64(t[dirs+0x1000+8*i:], guestTables+tables+i<<12|rights)
	}
	le.PutUint64(t[dirs+0x2000+8*(uint64(boot.MMIOBase)>>21&511):], uint64(boot.MMIOBase)|large|rights)
	for i, page := range h.pool {
		le.PutUint64(t[tables+8*i:], uint64(m.gpa(page))|rights)
	}
	write(guestTables, t)

	gdt := make([]byte, 0x40)
	for i, d := range []uint64{2: 0x00af9b000000ffff, 3: 0x00cf93000000ffff, 6: 0x00affb000000ffff, 7: 0x00cff3000000ffff} {
		le.PutUint64(gdt[8*i:], d)
	}
	write(guestGDT, gdt)
	write(guestGDT+0x1000, le.AppendUint64([]byte{0x3f, 0}, guestGDT))

	// The register writes that start a virtio device (virtio 1.2, 3.1.1 and 4.2.3), and MSRs by which a guest
	// tells KVM where to write (Documentation/virt/kvm/x86/msr.rst).
	var script []byte
	for _, s := range [][2]uint32{
		{0x70, 0}, {0x70, 1}, {0x70, 3}, {0x24, 1}, {0x20, 1}, {0x24, 0}, {0x20, 0}, {0x70, 0xb},
		{0x30, 0}, {0x38, 256}, {0x80, guestQueue}, {0x84, 0}, {0x90, guestQueue + 0x1000}, {0x94, 0},
		{0xa0, guestQueue + 0x2000}, {0xa4, 0}, {0x44, 1}, {0x70, 0xf},
		{0x4b564d00, guestKVM}, {0x4b564d01, guestKVM + 0x1000 | 1}, {0x4b564d03, guestKVM + 0x2000 | 1},
		{0xffffffff, 0},
	} {
		script = le.AppendUint32(le.AppendUint32(script, s[0]), s[1])
	}
	write(guestScript, script)
	m.furnishQueue()

	params := make([]byte, 0x48)
	le.PutUint64(params[0x28:], 6364136223846793005)
	le.PutUint64(params[0x30:], 1442695040888963407)
	le.PutUint64(params[0x38:], h.rnd.Uint64())
	if h.user {
		params[0x40] = 1
	}
	write(guestParams, params)
}

// furnishQueue lays out requests that read from the disk to pages of the pool, some
// across two (virtio 1.2, 2.7 and 5.2.6).
func (m *testMachine) furnishQueue() {
	h, le := m.h, binary.LittleEndian
	const next, deviceWrites, noInterrupt = 1, 2, 1
	desc, avail := make([]byte, 4096), make([]byte, 6+2*256)
	put := func(i int, at guestmem.GPA, n uint32, flags, to uint16) {
		d := desc[16*i:]
		le.PutUint64(d, uint64(at))
		le.PutUint32(d[8:], n)
		le.PutUint16(d[12:], flags)
		le.PutUint16(d[14:], to)
	}
	for r := range diskRequests {
		at := m.gpa(h.pool[h.rnd.IntN(len(h.pool))]) + guestmem.GPA(h.rnd.Uint64N(guestmem.PageSize))
		n := uint32(512 * (1 + h.rnd.IntN(16)))
		for !m.in.mem.Contains(at, uint64(n)) {
			at -= 8192
		}
		i := 3 * r
		put(i, guestQueue+0x3000, 16, next, uint16(i+1))
		put(i+1, at, n, next|deviceWrites, uint16(i+2))
		put(i+2, guestQueue+0x4000+guestmem.GPA(r), 1, deviceWrites, 0)
	}
	le.PutUint16(avail, noInterrupt)
	for i := range 256 {
		le.PutUint16(avail[4+2*i:], uint16(i%diskRequests*3))
	}
	h.must(m.in.mem.Write(guestQueue, desc))
	h.must(m.in.mem.Write(guestQueue+0x1000, avail))
}

// wake restores a machine from a snapshot.
func (h *history) wake(i *instant) *testMachine {
	h.t.Helper()
	in, err := Restore(h.t.Context(), h.parts(), i.dir, RestoreOptions{EntryOnly: true})
	h.must(err)
	h.saw.waking++
	m := h.adopt(in, i.ram, i.depth)
	m.woken = true
	if in.cached != nil {
		h.saw.cachedFrames += int(in.cached.Stats().Hits)
	}
	return m
}

// keepPages adds pages that a machine was restored with to the cache, and sometimes damages one of the cache's
// files. A machine that is restored from it must not notice.
func (h *history) keepPages(in *Instance) {
	h.t.Helper()
	if in.Caches() {
		err := KeepPages(h.t.Context(), in.parts.PageCache, in.snap.Dir(), in.MissedPages(), nil)
		if !errors.Is(err, snapshot.ErrNotFound) { // it may have been removed
			h.must(err)
		}
	}
	files, err := filepath.Glob(filepath.Join(h.file("pages"), "*"))
	h.must(err)
	if len(files) == 0 || !h.chance(3) {
		return
	}
	path := files[h.rnd.IntN(len(files))]
	b, err := os.ReadFile(path)
	h.must(err)
	switch at := h.rnd.IntN(len(b)); h.rnd.IntN(3) {
	case 0:
		b[at] ^= 1 << h.rnd.IntN(8)
	case 1:
		b = b[:at]
	case 2: // in place of another file
		path = files[h.rnd.IntN(len(files))]
	}
	// Machines that have the file open see the change.
	h.must(os.WriteFile(path, b, 0o600))
	h.saw.damages++
}

// work lets the guest write to some pages and read others, and writes to some from the host.
func (m *testMachine) work() {
	h := m.h
	h.t.Helper()
	part := func() (base, mask uint64) {
		mask = []uint64{0, 7, 63, 255, 1023}[h.rnd.IntN(5)]
		return h.rnd.Uint64N(windowPages - mask), mask
	}
	for range 1 + h.rnd.IntN(3) {
		var p []byte
		for range 2 {
			base, mask := part()
			p = binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(p, base), mask)
		}
		p = binary.LittleEndian.AppendUint64(p, uint64(h.rnd.IntN(2)))
		// The mask must come last. Otherwise the guest could see a mask that is too large for its base, and leave
		// its window.
		h.must(m.in.mem.Write(guestParams+0x08, zeros[:8]))
		h.must(m.in.mem.Write(guestParams+0x18, zeros[:8]))
		m.rounds(1)
		h.must(m.in.mem.Write(guestParams, p[:8]))
		h.must(m.in.mem.Write(guestParams+0x10, p[0x10:0x18]))
		m.rounds(1)
		h.must(m.in.mem.Write(guestParams+0x08, p[0x08:0x10]))
		h.must(m.in.mem.Write(guestParams+0x18, p[0x18:]))
		m.rounds(1 + h.rnd.Uint64N(200))
		for range h.rnd.IntN(12) {
			h.must(m.write(h.rnd))
		}
	}
	if h.chance(6) {
		h.must(m.burst(h.rnd))
	}
}

// rounds waits until the guest has done n more rounds.
func (m *testMachine) rounds(n uint64) {
	m.h.t.Helper()
	count := func() uint64 {
		var b [8]byte
		m.h.must(m.in.mem.Read(guestCounter, b[:]))
		return binary.LittleEndian.Uint64(b[:])
	}
	until := count() + n
	for deadline := time.Now().Add(2 * time.Minute); count() < until; time.Sleep(100 * time.Microsecond) {
		select {
		case <-m.in.machine.Done():
			x, _ := m.in.machine.Wait(m.h.t.Context())
			m.h.fatal("the guest ended:", x)
		default:
		}
		if time.Now().After(deadline) {
			m.h.fatal("the guest does not run")
		}
	}
}

// write writes once, in one of the ways of the VMM and its devices.
func (m *testMachine) write(rnd *rand.Rand) error {
	mem, h := m.in.mem, m.h
	page := h.pool[rnd.IntN(len(h.pool))]
	at, err := mem.FromLinear(page * guestmem.PageSize)
	if err != nil {
		return err
	}
	off := rnd.Uint64N(guestmem.PageSize)
	n := 1 + rnd.Uint64N(2*guestmem.PageSize)
	if !mem.Contains(at, off+n) {
		off, n = 0, guestmem.PageSize
	}
	switch rnd.IntN(7) {
	case 0:
		return mem.Write(at+guestmem.GPA(off), bytes.Repeat([]byte{byte(rnd.Uint32())}, int(n)))
	case 1:
		return mem.StoreUint16(at+guestmem.GPA(off&^1), uint16(rnd.Uint32()))
	case 2:
		return mem.FillFrom(at+guestmem.GPA(off), int(n), h.noise, rnd.Int64N(diskSectors*512-2*guestmem.PageSize))
	case 3:
		other, err := mem.FromLinear(h.pool[rnd.IntN(len(h.pool))] * guestmem.PageSize)
		if err != nil {
			return err
		}
		return mem.PreadFull([]guestmem.Range{{GPA: at + 1, Len: 300}, {GPA: other, Len: guestmem.PageSize}}, h.noise, rnd.Int64N(1000))
	case 4:
		return mem.Zero(at, n&^(guestmem.PageSize-1))
	default:
		return m.discard(page, page+1+rnd.Uint64N(3))
	}
}

// discard discards pages, as the balloon does.
func (m *testMachine) discard(first, end uint64) error {
	at, err := m.in.mem.FromLinear(first * guestmem.PageSize)
	if err != nil {
		return err
	}
	if !m.in.mem.Contains(at, (end-first)*guestmem.PageSize) {
		end = first + 1
	}
	m.gone.Add(first, end)
	m.h.saw.discards++
	return m.in.mem.Discard(at, (end-first)*guestmem.PageSize)
}

// burst writes more at once than a live capture can copy, or discards as much.
func (m *testMachine) burst(rnd *rand.Rand) error {
	n := 600 + rnd.Uint64N(600)
	first := uint64(dataFrom/guestmem.PageSize) + rnd.Uint64N(m.h.pages()-dataFrom/guestmem.PageSize-n)
	if rnd.IntN(3) == 0 {
		return m.discard(first, first+n)
	}
	p := make([]byte, guestmem.PageSize)
	for page := first; page < first+n; page++ {
		binary.LittleEndian.PutUint64(p[8*rnd.IntN(500):], rnd.Uint64())
		at, err := m.in.mem.FromLinear(page * guestmem.PageSize)
		if err != nil {
			return err
		}
		if err := m.in.mem.Write(at, p); err != nil {
			return err
		}
	}
	return nil
}

// resident returns the pages in the RAM of a machine that the host has committed: present or swapped out
// (Documentation/admin-guide/mm/pagemap.rst).
func (h *history) resident(mem *guestmem.Memory) (*guestmem.PageSet, error) {
	const present, swapped = 1 << 63, 1 << 62
	set := guestmem.NewPageSet(mem.Size() / guestmem.PageSize)
	buf := make([]byte, 1<<20)
	for _, s := range mem.Slots() {
		for done := uint64(0); done < s.Size/guestmem.PageSize; {
			b := buf[:min(uint64(len(buf)), (s.Size/guestmem.PageSize-done)*8)]
			if _, err := h.pagemap.ReadAt(b, int64((uint64(s.HVA)/guestmem.PageSize+done)*8)); err != nil {
				return nil, err
			}
			for i := 0; i < len(b); i += 8 {
				if binary.LittleEndian.Uint64(b[i:])&(present|swapped) != 0 {
					page := s.Offset/guestmem.PageSize + done + uint64(i/8)
					set.Add(page, page+1)
				}
			}
			done += uint64(len(b) / 8)
		}
	}
	return set, nil
}

// look returns the content of a paused machine's RAM, and makes none of its pages resident.
func (m *testMachine) look() (content, error) {
	h := m.h
	there, err := h.resident(m.in.mem)
	if err != nil {
		return nil, err
	}
	now := make(content, len(h.last))
	for page, p := range m.born {
		if !there.Has(page) && !m.gone.Has(page) {
			now[page] = p
		}
	}
	buf := make([]byte, guestmem.PageSize)
	for _, s := range m.in.mem.Slots() {
		base, end := s.Offset/guestmem.PageSize, (s.Offset+s.Size)/guestmem.PageSize
		for lo, hi := there.NextBefore(base, end); lo < hi; lo, hi = there.NextBefore(hi, end) {
			for page := lo; page < hi; page++ {
				if _, err := h.mem.ReadAt(buf, int64(uint64(s.HVA)+(page-base)*guestmem.PageSize)); err != nil {
					return nil, err
				}
				switch old := h.last[page]; {
				case bytes.Equal(buf, zeros):
				case bytes.Equal(buf, old):
					now[page] = old
				default:
					now[page] = bytes.Clone(buf)
				}
			}
		}
	}
	h.last = now
	return now, nil
}

// Ways in which a capture is made to fail.
const (
	fails      = iota // does not fail
	failSealed        // the layers of the disk cannot be recorded
	failFork          // no child can be started
	failCancel        // canceled when everything is frozen
	failExists        // a snapshot of that name exists
	failStill         // Still returns an error
	failKinds
)

var errMeant = errors.New("meant to fail")

// capture takes a snapshot, with or without a fork. It returns a nil instant if the capture was meant to fail.
// child, if not nil, runs. After a capture that failed late, the child has no snapshot to build upon.
func (m *testMachine) capture() (i *instant, child *testMachine) {
	h := m.h
	h.t.Helper()
	fork, live, fail := h.chance(3), h.chance(4), fails
	live = fork || !live
	if h.chance(5) {
		fail = 1 + h.rnd.IntN(failKinds-1)
	}
	if fail == failFork && !fork {
		fail = failSealed
	}
	m.disturbBase()
	ctx, cancel := context.WithCancel(h.t.Context())
	defer cancel()
	dir := h.path("snap")
	if fail == failExists {
		h.must(os.Mkdir(dir, 0o700))
		h.must(os.WriteFile(filepath.Join(dir, "x"), nil, 0o600))
	}
	stop, writer := make(chan struct{}), make(chan error, 1)
	writing := false
	deviceSeed := h.rnd.Uint64()
	var ram content
	o := CaptureOptions{
		Dir: dir, ID: spec.NewID(), Live: live, NewTop: h.path("disk"), Image: "image", Kernel: "kernel",
		Names: func(st disk.Stack) []string { return st.Layers },
		Sealed: func(disk.Stack) (err error) {
			if ram, err = m.look(); err == nil && fail == failSealed {
				err = errMeant
			}
			if fail == failCancel {
				cancel()
			}
			return err
		},
		// Devices keep writing while the capture writes the snapshot.
		Resumed: func() {
			writing = true
			go func() { writer <- m.writeUntil(stop, rand.New(rand.NewPCG(deviceSeed, 5))) }()
		},
	}
	if fail == failStill {
		o.Still = func() error { return errMeant }
	}
	if fork {
		o.Fork = func(image *os.File, _ *Capture) error {
			if fail == failFork {
				return errMeant
			}
			h.compareImage(image, ram)
			child = h.child(image, dir, ram)
			return nil
		}
	}
	base := m.in.base
	c, err := m.in.Capture(ctx, o)
	close(stop)
	if writing {
		h.must(<-writer)
	}
	if fail != fails {
		if err == nil {
			h.fatal("a capture that was meant to fail, in way", fail, "has not")
		}
		h.saw.failures++
		return nil, child
	}
	h.must(err)
	if !live {
		h.must(m.in.Continue())
	}
	h.count(m, c, base, live, fork)
	i = &instant{dir: dir, ram: ram, depth: m.depth + 1}
	m.depth = i.depth
	if child != nil {
		child.depth = i.depth
	}
	h.instants = append(h.instants, i)
	return i, child
}

func (h *history) count(m *testMachine, c *Capture, base *snapshot.Snapshot, live, fork bool) {
	saw := h.saw
	saw.captures++
	for _, k := range []struct {
		is bool
		n  *int
	}{
		{c.Shared > 0, &saw.deltas}, {live, &saw.live}, {fork, &saw.forks}, {m.child, &saw.childCaptures},
		{m.woken, &saw.wokenCaptures}, {base != nil && c.Shared == 0, &saw.whole},
	} {
		if k.is {
			*k.n++
		}
	}
}

func (m *testMachine) writeUntil(stop <-chan struct{}, rnd *rand.Rand) error {
	for {
		select {
		case <-stop:
			return nil
		default:
		}
		if err := m.write(rnd); err != nil {
			return fmt.Errorf("a device's write: %w", err)
		}
	}
}

// disturbBase sometimes compacts or removes the snapshot that the next one would build upon.
func (m *testMachine) disturbBase() {
	h := m.h
	dir := m.in.forkBase
	if m.in.base != nil {
		dir = m.in.base.Dir()
	}
	if dir == "" || !h.chance(12) {
		return
	}
	if _, err := os.Stat(filepath.Join(dir, snapshot.ManifestName)); err != nil {
		return // never written, or removed before a capture failed
	}
	if h.chance(2) {
		_, err := snapshot.Compact(h.t.Context(), dir)
		h.must(err)
		return
	}
	h.must(snapshot.Remove(dir))
	h.instants = slices.DeleteFunc(h.instants, func(i *instant) bool { return i.dir == dir })
}

// child starts a machine from the image of a fork.
func (h *history) child(image *os.File, dir string, ram content) *testMachine {
	h.t.Helper()
	p := h.parts()
	p.RAM = image
	in, err := RestoreFork(h.t.Context(), p, dir, RestoreOptions{EntryOnly: true})
	h.must(err)
	m := h.adopt(in, ram, 0)
	m.child = true
	return m
}

// compareImage compares the RAM that a child of a fork would have.
func (h *history) compareImage(image *os.File, want content) {
	h.t.Helper()
	mem, err := guestmem.NewPrivate(h.spec.Memory(), image)
	h.must(err)
	defer mem.Close()
	h.comparePages(mem, mem.Backed(), want, "of the image of a fork", false)
}

// compare restores a snapshot without running it, and touches its pages in random order.
func (h *history) compare(i *instant, all bool) {
	h.t.Helper()
	snap, err := snapshot.Open(i.dir)
	h.must(err)
	defer snap.Close()
	mem, err := guestmem.New(h.spec.Memory())
	h.must(err)
	defer mem.Close()
	var o pager.Options
	if h.seed%4 != 3 {
		cached := pagecache.New(h.file("pages")).Open(osfile.OS, snap)
		defer cached.Close()
		defer func() {
			st := cached.Stats()
			h.saw.cachedFrames += int(st.Hits)
			h.saw.damagedFrames += int(st.Damaged)
			h.must(pagecache.New(h.file("pages")).Add(h.t.Context(), i.dir, cached.Missed(), nil))
		}()
		o.Cache = cached
	}
	for range h.rnd.IntN(300) {
		o.WorkingSet = append(o.WorkingSet, h.pool[h.rnd.IntN(len(h.pool))])
	}
	p, err := pager.New(mem, snap.Memory(), o)
	h.must(err)
	defer p.Close()
	p.Start()
	stored := guestmem.NewPageSet(h.pages())
	for c := range snap.Memory().Chunks() {
		l, err := snap.Memory().Leaf(c)
		h.must(err)
		for k := uint64(0); l != nil && k < snapshot.ChunkPages; k++ {
			if _, _, ok := l.Page(int(k)); ok {
				stored.Add(uint64(c)*snapshot.ChunkPages+k, uint64(c)*snapshot.ChunkPages+k+1)
			}
		}
	}
	h.comparePages(mem, stored, i.ram, fmt.Sprintf("of a snapshot of depth %d", i.depth), all)
	h.must(p.Err())
}

// comparePages compares the pages that may differ from zeros, in have or in want, those of the pool, and some that
// were never written to, or all pages.
func (h *history) comparePages(mem *guestmem.Memory, have *guestmem.PageSet, want content, what string, all bool) {
	h.t.Helper()
	// Its own generator, since the threads determine how often the test uses it.
	rnd := rand.New(rand.NewPCG(h.seed, 7+uint64(h.names)))
	set := have.Clone()
	for page := range want {
		set.Add(page, page+1)
	}
	for _, page := range h.pool {
		set.Add(page, page+1)
	}
	for range 500 {
		page := rnd.Uint64N(h.pages())
		set.Add(page, page+1)
	}
	if all {
		set.Add(0, set.Pages())
	}
	order := make([]uint64, 0, set.Len())
	for lo, hi := set.Next(0); lo < hi; lo, hi = set.Next(hi) {
		for page := lo; page < hi; page++ {
			order = append(order, page)
		}
	}
	rnd.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
	copied, err := os.Create(h.path("copied"))
	h.must(err)
	defer copied.Close()
	buf, wrong := make([]byte, guestmem.PageSize), 0
	for _, page := range order {
		at, err := mem.FromLinear(page * guestmem.PageSize)
		h.must(err)
		if rnd.IntN(8) == 0 { // the kernel reads it, and faults
			err = mem.DrainTo(at, guestmem.PageSize, copied, 0)
			if err == nil {
				_, err = copied.ReadAt(buf, 0)
			}
		} else {
			err = mem.Read(at, buf)
		}
		h.must(err)
		w := want[page]
		if w == nil {
			w = zeros
		}
		if !bytes.Equal(buf, w) {
			if wrong++; wrong <= 3 {
				h.t.Errorf("seed %d: page %#x %s differs: it begins with %x, and should with %x", h.seed, page, what, buf[:32], w[:32])
			}
		}
	}
	if wrong > 0 {
		h.fatal(wrong, "pages", what, "of", len(h.instants), "differ")
	}
	h.saw.compared++
	h.saw.pages += len(order)
}
