package disk

import (
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/internal/test/faultfs"
	"github.com/drowse-vm/drowse/internal/test/racetest"
)

var (
	powerLossSeeds = flag.Int("disk.powerloss-seeds", 0, "how many seeds of the power-loss test to run; 0: 150, or 15 with -short or -race")
	modelSeeds     = flag.Int("disk.model-seeds", 15, "how many seeds of the random workload test to run")
	killRounds     = flag.Int("disk.kill-rounds", 25, "how many times the SIGKILL test kills its child")
	firstSeed      = flag.Uint64("disk.first-seed", 1, "the first seed of the seeded tests")
)

const (
	sectorSize = 512
	// modelSize makes an index of three chunks. The last is short and not a whole word.
	modelSize = (2*chunkBlocks + 7) * BlockSize
)

// windows are the block ranges that the model tests use: the ends, and both sides of a chunk border.
var windows = [][2]int64{{0, 10}, {chunkBlocks - 6, chunkBlocks + 6}, {2*chunkBlocks - 1, 2*chunkBlocks + 7}}

// stamp fills a sector with its version, so that a mixture with other data is visible. Version 0 is zeros.
func stamp(p []byte, sector int64, version uint64) {
	for i := 0; i < sectorSize; i += 8 {
		v := version
		if version != 0 {
			v = version<<20 ^ uint64(sector)*0x9e3779b97f4a7c15 ^ uint64(i)<<56
		}
		binary.LittleEndian.PutUint64(p[i:], v)
	}
}

// versionOf returns the version that a sector holds. ok is false if stamp did not write the content.
func versionOf(p []byte, sector int64) (version uint64, ok bool) {
	var want [sectorSize]byte
	if v := binary.LittleEndian.Uint64(p); v != 0 {
		version = (v ^ uint64(sector)*0x9e3779b97f4a7c15) >> 20
	}
	stamp(want[:], sector, version)
	return version, string(want[:]) == string(p[:sectorSize])
}

// A model maps each sector to the versions that it may hold, the newest last. A sector that is not in the map is
// zero.
type model map[int64][]uint64

func (m model) get(s int64) []uint64 {
	if v, ok := m[s]; ok {
		return v
	}
	return []uint64{0}
}

// put adds a version. If unsure, the older ones stay possible.
func (m model) put(off, n int64, version uint64, unsure bool) {
	for s := off / sectorSize; s < (off+n)/sectorSize; s++ {
		if unsure {
			m[s] = append(slices.Clone(m.get(s)), version)
		} else {
			m[s] = []uint64{version}
		}
	}
}

// check reads all windows and returns an error if the disk differs from the model. learn narrows the model to what
// was read.
func (m model) check(d *Disk, learn bool) error {
	var errs []error
	for _, w := range windows {
		off, n := w[0]*BlockSize, (w[1]-w[0])*BlockSize
		p := make([]byte, n)
		if _, err := d.ReadAt(p, off); err != nil {
			return err
		}
		for i := int64(0); i < n; i += sectorSize {
			s := (off + i) / sectorSize
			v, ok := versionOf(p[i:], s)
			if !ok {
				errs = append(errs, fmt.Errorf("sector %d of block %d is garbage (%x...), want one of %v", s%8, s/8, p[i:i+8], m.get(s)))
			} else if !slices.Contains(m.get(s), v) {
				errs = append(errs, fmt.Errorf("sector %d of block %d has version %d, want one of %v", s%8, s/8, v, m.get(s)))
			}
			if learn {
				m[s] = []uint64{v}
			}
		}
	}
	if len(errs) > 5 {
		errs = append(errs[:5], fmt.Errorf("and %d more", len(errs)-5))
	}
	return errors.Join(errs...)
}

// A snapshot is a sealed stack and what it must always hold.
type snapshot struct {
	stack Stack
	want  model
}

// world runs random operations on a disk and on its model.
type world struct {
	t    *testing.T
	r    *rand.Rand
	env  env
	dir  string
	d    *Disk
	m    model // what reads may return now
	next uint64
	file int

	// durable holds what may be on disk after a power loss: the versions since the last flush.
	durable   model
	committed Stack // at the last flush
	snaps     []snapshot
	unsynced  []snapshot // those sealed since the last flush
	log       []string
	squashed  bool
}

func newWorld(t *testing.T, e env, dir string, seed uint64) *world {
	return &world{t: t, r: rand.New(rand.NewPCG(seed, 1)), env: e, dir: dir, m: model{}, durable: model{}, next: 1}
}

func (w *world) path() string {
	w.file++
	return filepath.Join(w.dir, fmt.Sprintf("layer-%d", w.file))
}

func (w *world) span() (off, n int64) {
	win := windows[w.r.IntN(len(windows))]
	secs := (win[1] - win[0]) * BlockSize / sectorSize
	a, b := w.r.Int64N(secs), w.r.Int64N(secs)
	if a > b {
		a, b = b, a
	}
	b++
	if w.r.IntN(2) == 0 { // whole blocks
		a, b = a/8*8, (b+7)/8*8
	}
	return win[0]*BlockSize + a*sectorSize, (b - a) * sectorSize
}

// put records a change in both models.
func (w *world) put(off, n int64, version uint64, failed bool) {
	w.m.put(off, n, version, failed)
	w.durable.put(off, n, version, true)
	if failed { // the old content stays possible, after the new one
		for s := off / sectorSize; s < (off+n)/sectorSize; s++ {
			w.durable[s] = append(w.durable[s], w.m[s]...)
		}
	}
}

func (w *world) write() error {
	off, n := w.span()
	v := w.next
	w.next++
	p := make([]byte, n)
	for i := int64(0); i < n; i += sectorSize {
		stamp(p[i:], (off+i)/sectorSize, v)
	}
	w.log = append(w.log, fmt.Sprintf("write %d: sectors %d+%d", v, off/sectorSize, n/sectorSize))
	_, err := w.d.WriteAt(p, off)
	w.put(off, n, v, err != nil)
	return err
}

func (w *world) zero() error {
	off, n := w.span()
	unmap := w.r.IntN(2) == 0
	w.log = append(w.log, fmt.Sprintf("zero: sectors %d+%d unmap=%v", off/sectorSize, n/sectorSize, unmap))
	err := w.d.WriteZeroes(off, n, unmap)
	w.put(off, n, 0, err != nil)
	return err
}

func (w *world) discard() error {
	off, n := w.span()
	w.log = append(w.log, fmt.Sprintf("discard: sectors %d+%d", off/sectorSize, n/sectorSize))
	err := w.d.Discard(off, n)
	first, end := (off+BlockSize-1)/BlockSize*BlockSize, (off+n)/BlockSize*BlockSize
	if first < end {
		w.put(first, end-first, 0, err != nil)
	}
	return err
}

func (w *world) flush() error {
	w.log = append(w.log, "flush")
	err := w.d.Flush()
	if err == nil {
		w.flushed()
	}
	return err
}

func (w *world) flushed() {
	w.durable = maps.Clone(w.m)
	w.committed = w.d.Stack()
	w.snaps = append(w.snaps, w.unsynced...)
	w.unsynced = nil
}

func (w *world) seal() error {
	before := w.d.Stack()
	w.log = append(w.log, "seal "+filepath.Base(before.Top()))
	_, err := w.d.Seal(context.Background(), w.path())
	if err == nil {
		w.unsynced = append(w.unsynced, snapshot{stack: before, want: maps.Clone(w.m)})
	}
	return err
}

// fork leaves the disk and continues with a new one over one of its snapshots.
func (w *world) fork() error {
	if len(w.snaps) == 0 {
		return nil
	}
	sn := w.snaps[w.r.IntN(len(w.snaps))]
	w.log = append(w.log, "fork "+filepath.Base(sn.stack.Top()))
	if err := w.d.Close(); err != nil {
		return err
	}
	w.flushed()
	s, err := w.env.fork(w.path(), sn.stack, 0)
	if err != nil {
		return err
	}
	w.m = maps.Clone(sn.want)
	w.durable = maps.Clone(w.m)
	w.committed = sn.stack // the fork's own file is not durable before its first flush
	w.d, err = w.env.open(s, Options{})
	return err
}

func (w *world) reopen() error {
	w.log = append(w.log, "reopen")
	s := w.d.Stack()
	if err := w.d.Close(); err != nil {
		return err
	}
	w.flushed()
	var err error
	w.d, err = w.env.open(s, Options{})
	return err
}

// merge joins two layers below the top. It first forgets the snapshots whose top is the lower one.
func (w *world) merge() error {
	s := w.d.Stack()
	if len(s.Layers) < 3 {
		return nil
	}
	i := w.r.IntN(len(s.Layers) - 2)
	lower, upper := s.Layers[i], s.Layers[i+1]
	for _, sn := range slices.Concat(w.snaps, w.unsynced) {
		// Another disk may use the lower layer without the upper one. Then this disk must not merge it.
		if j := slices.Index(sn.stack.Layers, lower); j >= 0 && j+1 < len(sn.stack.Layers) && sn.stack.Layers[j+1] != upper {
			return nil
		}
		// An upper layer over the parts of a squashed layer must not change either.
		if slices.Contains(sn.stack.Layers, upper) && !slices.Contains(sn.stack.Layers, lower) {
			return nil
		}
	}
	w.log = append(w.log, fmt.Sprintf("merge %s into %s", filepath.Base(upper), filepath.Base(lower)))
	if err := w.d.Close(); err != nil {
		return err
	}
	w.flushed()
	w.snaps = slices.DeleteFunc(w.snaps, func(sn snapshot) bool { return sn.stack.Top() == lower })
	err := w.env.merge(context.Background(), lower, upper)
	if err == nil { // record it in the stacks, as their owner does
		without := func(s Stack) Stack {
			return Stack{Layers: slices.DeleteFunc(slices.Clone(s.Layers), func(p string) bool { return p == lower })}
		}
		for i := range w.snaps {
			w.snaps[i].stack = without(w.snaps[i].stack)
		}
		s = without(s)
		w.committed = s
	}
	if errors.Is(err, ErrMerging) { // an earlier merge was interrupted; do not repeat it here
		err = nil
	}
	var oerr error
	w.d, oerr = w.env.open(s, Options{})
	return errors.Join(err, oerr)
}

// squash replaces some layers below the top by one. The old ones stay for the stacks that have them.
func (w *world) squash() error {
	s := w.d.Stack()
	if len(s.Layers) < 3 {
		return nil
	}
	first := w.r.IntN(len(s.Layers) - 2)
	some := s.Layers[first : first+2+w.r.IntN(len(s.Layers)-2-first)]
	path := w.path()
	w.log = append(w.log, fmt.Sprintf("squash %s to %s into %s", filepath.Base(some[0]), filepath.Base(some[len(some)-1]), filepath.Base(path)))
	err := w.env.squash(context.Background(), some, path)
	if errors.Is(err, ErrInUse) || errors.Is(err, ErrMerging) { // unsealed until a flush, or a merge was cut
		return nil
	}
	if err != nil {
		return err
	}
	w.squashed = true
	if err := w.d.Substitute(some, path); err != nil {
		return err
	}
	if got := len(w.d.Stack().Layers); got != len(s.Layers)-len(some)+1 {
		return fmt.Errorf("after squashing %d of %d layers there are %d", len(some), len(s.Layers), got)
	}
	return nil
}

func (w *world) step() error {
	switch k := w.r.IntN(100); {
	case k < 45:
		return w.write()
	case k < 55:
		return w.zero()
	case k < 65:
		return w.discard()
	case k < 80:
		return w.flush()
	case k < 90:
		return w.seal()
	case k < 93:
		return w.fork()
	case k < 95:
		return w.merge()
	case k < 97:
		return w.squash()
	default:
		return w.reopen()
	}
}

func (w *world) start() error {
	s, err := w.env.createDisk(w.path(), Stack{}, header{size: modelSize}, true)
	if err != nil {
		return err
	}
	w.d, err = w.env.open(s, Options{})
	if err == nil {
		w.committed = s
	}
	return err
}

func (w *world) fatal(err error, doing string) {
	w.t.Helper()
	if err == nil {
		return
	}
	n := max(0, len(w.log)-40)
	for _, l := range w.log[n:] {
		w.t.Log(l)
	}
	w.t.Fatalf("%s: %v", doing, err)
}

// checkSnapshots opens each committed snapshot and checks it.
func (w *world) checkSnapshots() {
	w.t.Helper()
	for _, sn := range w.snaps {
		d, err := w.env.open(sn.stack, Options{ReadOnly: true})
		w.fatal(err, "open a snapshot")
		w.fatal(sn.want.check(d, false), "snapshot "+filepath.Base(sn.stack.Top()))
		w.fatal(d.Close(), "close a snapshot")
	}
}

var testBoot = [bootIDSize]byte{1}

func TestRandom_workload_reads_like_the_model(t *testing.T) {
	for i := range *modelSeeds {
		seed := *firstSeed + uint64(i)
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			w := newWorld(t, env{fs: osfile.OS, boot: testBoot}, t.TempDir(), seed)
			w.fatal(w.start(), "start")
			for range 150 {
				w.fatal(w.step(), "step")
				if w.r.IntN(4) == 0 {
					w.fatal(w.m.check(w.d, false), "check")
				}
			}
			w.fatal(w.flush(), "flush")
			w.fatal(w.m.check(w.d, false), "check")
			w.checkSnapshots()
			raw := filepath.Join(w.dir, "raw")
			rawCopy(t, w.d, raw)
			back, err := w.env.importRaw(t.Context(), filepath.Join(w.dir, "imported"), raw)
			w.fatal(err, "import")
			d, err := w.env.open(back, Options{ReadOnly: true})
			w.fatal(err, "open imported")
			w.fatal(w.m.check(d, false), "import")
			w.fatal(d.Close(), "close")
			w.fatal(w.d.Close(), "close")
			infos, err := w.env.find(w.dir)
			w.fatal(err, "find")
			for _, info := range infos {
				if info.Path == w.committed.Top() {
					s, err := chain(infos, info.ID)
					w.fatal(err, "chain")
					ro, err := w.env.open(s, Options{ReadOnly: true})
					w.fatal(err, "open the chain")
					w.fatal(w.m.check(ro, false), "chain")
					w.fatal(ro.Close(), "close")
					// A squashed layer is equivalent to the layers that it was made of.
					if !w.squashed && !slices.Equal(s.Layers, w.committed.Layers) {
						t.Errorf("chain is %v, want %v", s.Layers, w.committed.Layers)
					}
				}
			}
		})
	}
}

// openAfterCrash opens the committed stack. If its top was sealed just before the crash, it opens a fork over it,
// as the owner of a disk does.
func (w *world) openAfterCrash() error {
	var err error
	w.d, err = w.env.open(w.committed, Options{})
	if errors.Is(err, ErrSealed) {
		var s Stack
		if s, err = w.env.fork(w.path(), w.committed, 0); err == nil {
			w.d, err = w.env.open(s, Options{})
		}
	}
	return err
}

func TestPower_loss_keeps_what_was_flushed_and_every_snapshot(t *testing.T) {
	n := *powerLossSeeds
	if n == 0 {
		n = racetest.Cases(150, 15)
	}
	for i := range n {
		seed := *firstSeed + uint64(i)
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			w := newWorld(t, env{}, "", seed)
			dir := t.TempDir()
			for life := range 4 {
				sim, err := faultfs.NewSim(dir)
				must(t, err)
				w.env = env{fs: sim, boot: [bootIDSize]byte{byte(life + 1)}}
				old := w.dir
				w.dir = dir
				move := func(s Stack) Stack {
					for i := range s.Layers {
						s.Layers[i] = filepath.Join(dir, filepath.Base(s.Layers[i]))
					}
					return s
				}
				w.committed = move(w.committed)
				for i := range w.snaps {
					w.snaps[i].stack = move(w.snaps[i].stack)
				}
				w.unsynced = nil
				w.log = append(w.log, fmt.Sprintf("life %d", life))
				if old == "" {
					w.fatal(w.start(), "start")
				} else {
					w.fatal(w.openAfterCrash(), "open after a power loss")
					w.m = w.durable
					w.fatal(w.m.check(w.d, true), "after a power loss")
					// The guest continues from what was read. It is not flushed again, but it has survived a power
					// loss. So it is durable, and the next loss cannot bring back an older version.
					w.durable = maps.Clone(w.m)
					w.checkSnapshots()
				}
				sim.CutAfter(w.r.IntN(150))
				for range 100000 {
					if err = w.step(); err != nil {
						break
					}
				}
				if !errors.Is(err, faultfs.ErrPowerCut) {
					w.fatal(err, "step")
					t.Fatal("the power was never cut")
				}
				next := t.TempDir()
				must(t, sim.Crash(seed*10+uint64(life), next))
				if w.d != nil {
					_ = w.d.Close() // the power is off: this only closes the descriptors
				}
				must(t, os.RemoveAll(dir))
				dir = next
			}
		})
	}
}

// chain builds, from layers that Find has found, the stack whose top is layer top. If an interrupted merge has
// left two files of one id, the merged one counts.
func chain(layers []LayerInfo, top ID) (Stack, error) {
	byID := map[ID]LayerInfo{}
	for _, l := range layers {
		if old, ok := byID[l.ID]; ok && old.Merged != (ID{}) {
			continue
		}
		byID[l.ID] = l
	}
	var s Stack
	for id := top; id != (ID{}); {
		l, ok := byID[id]
		if !ok {
			return Stack{}, fmt.Errorf("%w: layer %v was not found", ErrMissingParent, id)
		}
		delete(byID, id) // each at most once: a cycle ends with the error above
		s.Layers = append(s.Layers, l.Path)
		id = l.Parent
	}
	slices.Reverse(s.Layers)
	return s, nil
}
