package vmm

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/snapshot/pager"
	"github.com/drowse-vm/drowse/vmm/guestmem"
	"github.com/drowse-vm/drowse/vmm/kvm"
)

// rewriter waits for a word to change and then writes one word to each of a number of pages, in the order k*R8 & RSI
// from RBX on. R10 points to the work done, the work wanted, and the number of pages.
var rewriter = []byte{
	0xf3, 0x90, 0x49, 0x8b, 0x4a, 0x08, // pause; mov rcx, [r10+8]
	0x49, 0x3b, 0x0a, 0x74, 0xf5, 0x48, 0x31, 0xc0, // cmp rcx, [r10]; je back; xor rax, rax
	0x48, 0x89, 0xc7, 0x49, 0x0f, 0xaf, 0xf8, 0x48, 0x21, 0xf7, // mov rdi, rax; imul rdi, r8; and rdi, rsi
	0x48, 0xc1, 0xe7, 0x0c, 0x48, 0x89, 0x0c, 0x3b, // shl rdi, 12; mov [rbx+rdi], rcx
	0x48, 0xff, 0xc0, 0x49, 0x3b, 0x42, 0x10, 0x72, 0xe5, // inc rax; cmp rax, [r10+16]; jb back
	0x49, 0x89, 0x0a, 0xeb, 0xd2, // mov [r10], rcx; jmp to the start
}

const wishAt = 0x1800000

// rewriting is a guest that uses all of its RAM and rewrites a part of it.
type rewriting struct {
	m    *Machine
	wish uint64
}

func newRewriting(b *testing.B, ram uint64, tracked, scattered bool) *rewriting {
	b.Helper()
	mem, err := guestmem.New(ram)
	if err != nil {
		b.Fatal(err)
	}
	m, err := testConfig{TrackDirty: tracked}.with(mem)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := errors.Join(m.Close(), mem.Close()); err != nil {
			b.Error(err)
		}
	})
	for _, s := range mem.Slots() {
		for off := uint64(0); off < s.Size; off += 1 << 20 {
			if err := mem.Write(s.GPA+guestmem.GPA(off), bytes.Repeat([]byte{byte(off >> 20), 1, 2, 3}, 1<<18)); err != nil {
				b.Fatal(err)
			}
		}
	}
	if err := m.Boot(BootOptions{Kernel: program(b, rewriter...)}); err != nil {
		b.Fatal(err)
	}
	// Map the first 5 GiB one to one, for user code, in pages of 2 MiB.
	le, tables := binary.LittleEndian, make([]byte, 7*guestmem.PageSize)
	le.PutUint64(tables, scribbleTable+0x1000|7)
	for i := range uint64(5) {
		le.PutUint64(tables[0x1000+8*i:], scribbleTable+0x2000+i<<12|7)
		for j := range uint64(512) {
			le.PutUint64(tables[0x2000+i<<12+8*j:], (i*512+j)<<21|0x87)
		}
	}
	c := m.cpus[0].kvm
	sregs, err := c.Sregs()
	if err != nil {
		b.Fatal(err)
	}
	code := kvm.Segment{Limit: 0xffffffff, Selector: 0x33, Typ: 0xb, Present: 1, DPL: 3, S: 1, L: 1, G: 1}
	data := kvm.Segment{Limit: 0xffffffff, Selector: 0x2b, Typ: 3, Present: 1, DPL: 3, DB: 1, S: 1, G: 1}
	sregs.CS, sregs.DS, sregs.ES, sregs.FS, sregs.GS, sregs.SS = code, data, data, data, data, data
	sregs.CR3 = scribbleTable
	regs := kvm.Regs{RIP: codeAt, R8: 1, RBX: 256 << 20, RSI: 256<<20/guestmem.PageSize - 1, R10: wishAt, RFLAGS: 2 | 3<<12}
	if ram > uint64(guestmem.HoleStart) {
		regs.RBX, regs.RSI = uint64(guestmem.HoleEnd), 1<<30/guestmem.PageSize-1
	}
	if scattered {
		regs.R8 = 6364136223846793005
	}
	if err := errors.Join(mem.Write(scribbleTable, tables), mem.Zero(wishAt, 24), c.SetSregs(sregs), c.SetRegs(&regs), m.Start()); err != nil {
		b.Fatal(err)
	}
	return &rewriting{m: m}
}

// ask makes the guest rewrite pages, and returns at once.
func (r *rewriting) ask(b *testing.B, pages uint64) {
	b.Helper()
	r.wish++
	var p [16]byte
	binary.LittleEndian.PutUint64(p[8:], pages)
	if err := r.m.Memory().Write(wishAt+16, p[8:]); err != nil {
		b.Fatal(err)
	}
	binary.LittleEndian.PutUint64(p[:], r.wish)
	if err := r.m.Memory().Write(wishAt+8, p[:8]); err != nil {
		b.Fatal(err)
	}
}

// wait waits for the guest to finish, and returns how long that took.
func (r *rewriting) wait(b *testing.B) time.Duration {
	b.Helper()
	began := time.Now()
	for p := make([]byte, 8); binary.LittleEndian.Uint64(p) != r.wish; time.Sleep(50 * time.Microsecond) {
		if err := r.m.Memory().Read(wishAt, p); err != nil {
			b.Fatal(err)
		}
	}
	return time.Since(began)
}

// times are measurements in milliseconds, by name.
type times map[string][]float64

func (s times) add(name string, d time.Duration) { s[name] = append(s[name], float64(d)/1e6) }

func (s times) report(b *testing.B) {
	b.ReportMetric(0, "ns/op")
	for name, v := range s {
		slices.Sort(v)
		b.ReportMetric(v[len(v)/2], "ms-"+name+"-p50")
		if name == "pause" {
			b.ReportMetric(v[len(v)*9/10], "ms-pause-p90")
			b.ReportMetric(v[len(v)-1], "ms-pause-max")
		}
	}
}

// BenchmarkCapture measures what a capture costs the guest: the pause and its parts, and the time to rewrite the
// same pages while the capture is read and after it.
//
//	go test ./vmm -run xxx -bench Capture -benchtime 20x
func BenchmarkCapture(b *testing.B) {
	for _, ram := range []uint64{512 << 20, 4 << 30} {
		for _, scattered := range []bool{false, true} {
			b.Run(fmt.Sprintf("RAM=%dMiB/scattered=%v", ram>>20, scattered), func(b *testing.B) {
				r := newRewriting(b, ram, true, scattered)
				for _, mib := range []uint64{0, 16, 64, 256} {
					for _, how := range []struct {
						name   string
						budget uint64
					}{{"copy", 300 << 20}, {"protect", pager.MinCopyBytes}, {"default", 0}} {
						if mib == 0 && how.name == "protect" {
							continue
						}
						b.Run(fmt.Sprintf("dirty=%dMiB/%s", mib, how.name), func(b *testing.B) {
							s := times{}
							r.ask(b, mib<<8)
							r.wait(b)
							captureNow(b, r.m, pager.FreezeOptions{CopyBytes: 1 << 30}, times{}).Close()
							for range b.N {
								r.ask(b, mib<<8)
								s.add("rewrite-before", r.wait(b))
								f := captureNow(b, r.m, pager.FreezeOptions{CopyBytes: how.budget}, s)
								r.ask(b, mib<<8)
								began := time.Now()
								readAll(b, f)
								s.add("read", time.Since(began))
								r.wait(b)
								s.add("rewrite-during", time.Since(began))
								if err := f.Close(); err != nil {
									b.Fatal(err)
								}
							}
							s.report(b)
						})
					}
				}
			})
		}
	}
}

// captureNow pauses the machine, freezes what has changed, and resumes the machine.
func captureNow(b *testing.B, m *Machine, o pager.FreezeOptions, s times) *pager.Frozen {
	b.Helper()
	began := time.Now()
	n, err := m.CountDirty()
	if err != nil {
		b.Fatal(err)
	}
	o.Expect = n
	f, err := pager.Prepare(m.Memory(), nil, o)
	if err != nil {
		b.Fatal(err)
	}
	s.add("prepare", time.Since(began))
	pause := time.Now()
	step := func(name string, err error) {
		if err != nil {
			b.Fatal(err)
		}
		s.add(name, time.Since(began))
		began = time.Now()
	}
	began = pause
	step("stop", m.Pause(context.Background()))
	_, err = m.Export()
	step("export", err)
	set, err := m.TakeDirty()
	step("take", err)
	step("freeze", f.Freeze(set))
	step("resume", m.Resume())
	s.add("pause", time.Since(pause))
	return f
}

// readAll reads and releases everything, as the writer of a snapshot does.
func readAll(b *testing.B, f *pager.Frozen) {
	b.Helper()
	work := make(chan [2]uint64, 8)
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			buf := make([]byte, 64*guestmem.PageSize)
			for w := range work {
				for page := w[0]; page < w[1]; page += 64 {
					n := min(64, w[1]-page)
					if err := f.ReadPages(page, buf[:n*guestmem.PageSize]); err != nil {
						b.Error(err)
					}
				}
				f.Release(w[0], w[1])
			}
		})
	}
	for page := uint64(0); ; {
		first, end, err := f.NextData(page)
		if err != nil || first == end {
			break
		}
		page = min(end, (first/512+1)*512)
		work <- [2]uint64{first, page}
	}
	close(work)
	wg.Wait()
}

// BenchmarkTracking measures what the dirty log costs a guest: the time to write to 64 MiB for the first time,
// again, and, with a log, after it was taken.
func BenchmarkTracking(b *testing.B) {
	for _, tracked := range []bool{false, true} {
		b.Run(fmt.Sprintf("tracked=%v", tracked), func(b *testing.B) {
			const pages = 64 << 8
			s := times{}
			for range b.N {
				r := newRewriting(b, 512<<20, tracked, false)
				for _, name := range []string{"first", "again"} {
					r.ask(b, pages)
					s.add(name, r.wait(b))
				}
				if tracked {
					if err := r.m.Pause(context.Background()); err != nil {
						b.Fatal(err)
					}
					if _, err := r.m.TakeDirty(); err != nil {
						b.Fatal(err)
					}
					if err := r.m.Resume(); err != nil {
						b.Fatal(err)
					}
					r.ask(b, pages)
					s.add("after-take", r.wait(b))
				}
				if err := r.m.Close(); err != nil {
					b.Fatal(err)
				}
			}
			s.report(b)
		})
	}
}
