package archive_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/internal/test/faultfs"
	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox/archive"
	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/snapshot"
)

// written are the blocks of a disk: the version of each that is not zeros.
type written map[int64]uint64

func (w written) block(b int64) []byte {
	p := make([]byte, disk.BlockSize)
	if v := w[b]; v != 0 {
		r := rand.New(rand.NewPCG(v, uint64(b)))
		for i := 0; i < len(p); i += 8 {
			binary.LittleEndian.PutUint64(p[i:], r.Uint64())
		}
	}
	return p
}

// write makes a layer over others with so many random blocks, in runs here and there, and some zeros.
func (w written) write(t testing.TB, s *state.Store, below []string, name string, size int64, blocks int, version uint64) []string {
	t.Helper()
	path := filepath.Join(s.LayerDir(), name)
	st, err := s.Absolute(disk.Stack{Layers: below})
	must(t, err)
	if len(below) == 0 {
		st, err = disk.Create(path, size)
	} else {
		st, err = disk.Fork(path, st, 0)
	}
	must(t, err)
	d, err := disk.Open(st, disk.Options{})
	must(t, err)
	r := rand.New(rand.NewPCG(version, 2))
	all := size / disk.BlockSize
	for n := 0; n < blocks; {
		b := r.Int64N(all)
		for run := min(1+r.Int64N(64), all-b); run > 0 && n < blocks; run, b, n = run-1, b+1, n+1 {
			w[b] = version
			_, err := d.WriteAt(w.block(b), b*disk.BlockSize)
			must(t, err)
		}
	}
	for range blocks / 100 {
		b := r.Int64N(all)
		delete(w, b)
		must(t, d.Discard(b*disk.BlockSize, disk.BlockSize))
	}
	must(t, d.CloseSealed())
	return append(slices.Clone(below), name)
}

// check reads blocks and compares them.
func (w written) check(d *disk.Disk, blocks ...int64) error {
	p := make([]byte, disk.BlockSize)
	for _, b := range blocks {
		if _, err := d.ReadAt(p, b*disk.BlockSize); err != nil {
			return err
		}
		if !bytes.Equal(p, w.block(b)) {
			return errors.New("a block differs")
		}
	}
	return nil
}

func (w written) checkAll(t testing.TB, d *disk.Disk) {
	t.Helper()
	for b := range d.Size() / disk.BlockSize {
		if err := w.check(d, b); err != nil {
			t.Fatalf("block %d: %v", b, err)
		}
	}
}

// diskWorld is a head whose disk has large layers in an archive, and a host that lacks them.
type diskWorld struct {
	*world
	layers []string // in the head
	want   written
}

// newDiskWorld has layers of so many random blocks each.
func newDiskWorld(t testing.TB, size int64, blocks ...int) *diskWorld {
	t.Helper()
	from, to := newHost(t), newHost(t)
	like, err := from.State.Manifest(asleep(t, from))
	must(t, err)
	facts = like.Host[instance.FactsKey]
	instance.NoteGoodFacts(facts)
	w := &diskWorld{&world{to: to.State, head: spec.NewID(), id: spec.NewID()}, nil, written{}}
	owner := spec.NewID()
	for i, n := range blocks {
		w.layers = w.want.write(t, from.State, w.layers, owner+"-"+string(rune('1'+i)), size, n, uint64(i+1))
	}
	_, err = snapshot.Create(t.Context(), from.State.SnapshotDir(w.id), snapshot.Spec{
		ID: w.id, Sandbox: like.Sandbox, VCPUs: like.VCPUs, Kernel: like.Kernel, Image: like.Image, Host: like.Host, Labels: like.Labels,
		Disks: []snapshot.Disk{{Name: instance.DeviceDisk, Size: uint64(size), Layers: w.layers}}, Memory: state.NoMemory{},
	})
	must(t, err)
	w.root = t.TempDir()
	store, err := blob.OpenDir(w.root)
	must(t, err)
	w.store = &far{Store: store}
	w.a = archive.Open(w.store)
	w.stored = pushHead(t, w.a, from.State, archive.Info{ID: w.head, Name: "traveller", Image: like.Image}, w.id).Stored
	return w
}

// open opens the disk as far as it is there, as the process of a VM does.
func (w *diskWorld) open(t testing.TB, a *archive.Arrival) *disk.Disk {
	t.Helper()
	m, err := w.to.ComingManifest(w.id)
	must(t, err)
	st, err := w.to.Absolute(state.SnapshotStack(m))
	must(t, err)
	var d *disk.Disk
	must(t, w.to.WithLayers(w.id, st, func(at disk.Stack) (err error) {
		d, err = disk.Open(at, disk.Options{ReadOnly: true, Coming: func(path string) func(off, n int64) error {
			if filepath.Dir(path) != w.to.ArrivingDir(w.id) {
				return nil
			}
			return func(off, n int64) error { return a.Ensure(context.Background(), filepath.Base(path), off, n) }
		}})
		return err
	}))
	t.Cleanup(func() { must(t, d.Close()) })
	return d
}

// isWhole checks that the snapshot is there, and its disk has all that was written.
func (w *diskWorld) isWhole(t testing.TB, s *state.Store) {
	t.Helper()
	must(t, s.VerifySnapshot(t.Context(), w.id))
	st, err := s.SnapshotDisk(w.id)
	must(t, err)
	d, err := disk.Open(st, disk.Options{ReadOnly: true})
	must(t, err)
	defer d.Close()
	w.want.checkAll(t, d)
}

// onlyWhole checks that what has the name of a layer has all that this layer had.
func (w *diskWorld) onlyWhole(t testing.TB, s *state.Store) {
	t.Helper()
	entries, err := os.ReadDir(s.LayerDir())
	must(t, err)
	h, err := w.a.Head(t.Context(), w.head)
	must(t, err)
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "sha256-") {
			must(t, archive.CheckLayer(t.Context(), h, filepath.Join(s.LayerDir(), e.Name())))
		}
	}
}

// unsteady is a store that is busy for now and then, is slow, and says each thing wrong once.
type unsteady struct {
	blob.Store
	mu   sync.Mutex // guards what follows
	r    *rand.Rand
	seen map[string]bool
}

var errBusy = errors.New("503: slow down")

func (u *unsteady) ReadAt(ctx context.Context, key string, p []byte, off int64) error {
	u.mu.Lock()
	dice, first := u.r.IntN(10), !u.seen[key]
	u.seen[key] = true
	u.mu.Unlock()
	switch {
	case dice == 0:
		return errBusy
	case dice == 1:
		time.Sleep(50 * time.Millisecond)
	}
	err := u.Store.ReadAt(ctx, key, p, off)
	if first && err == nil && len(p) > 0 {
		p[len(p)/2] ^= 1
	}
	return err
}

const mib = 1 << 20

// A guest waits for what it reads of its disk, not for the disk.
func TestArrival_opens_a_disk_with_a_small_part_of_it_and_reads_what_was_written(t *testing.T) {
	w := newDiskWorld(t, 256*mib, 40*mib/disk.BlockSize, 24*mib/disk.BlockSize, 8)
	w.store.rtt = time.Millisecond
	w.store.bytes.Store(0)
	a := w.begin(t)
	d := w.open(t, a)
	var some int64
	for some = range w.want {
		break
	}
	must(t, w.want.check(d, some))
	read := w.store.bytes.Load()
	t.Logf("%d of %d bytes: %.1f %%", read, w.stored, 100*float64(read)/float64(w.stored))
	if read*100 > w.stored*15 {
		t.Errorf("a disk with its first block are %d of %d bytes", read, w.stored)
	}
	// Nobody takes its layers for whole ones.
	m, err := w.to.ComingManifest(w.id)
	must(t, err)
	if have := glob(t, w.to, "sha256-*"); len(have) != 1 || filepath.Base(have[0]) != state.SnapshotStack(m).Top() {
		t.Errorf("the store has the layers %q, want the small one alone", have)
	}
	must(t, a.Close())
	// From here on by a store that fails, while several read and the rest comes.
	h, err := archive.Open(&readsOfLayers{w.store, &unsteady{Store: w.store, r: rand.New(rand.NewPCG(7, 7)), seen: map[string]bool{}}}).Head(t.Context(), w.head)
	must(t, err)
	for a = nil; a == nil; { // as the node does
		if a, err = h.Resume(t.Context(), w.to, archive.NewLine(), w.id); !errors.Is(err, errBusy) {
			must(t, err)
		}
	}
	d = w.open(t, a)
	errs := make(chan error, 8)
	for i := range uint64(8) {
		go func() {
			r := rand.New(rand.NewPCG(i, 3))
			for range 1000 {
				if err := w.want.check(d, r.Int64N(d.Size()/disk.BlockSize)); err != nil {
					errs <- err
					return
				}
			}
			errs <- nil
		}()
	}
	must(t, a.Run(t.Context()))
	for range 8 {
		must(t, <-errs)
	}
	w.want.checkAll(t, d)
	must(t, a.Close())
	must(t, w.to.Arrived(t.Context(), w.id))
	w.want.checkAll(t, d) // by the descriptors that a VM has
	w.isWhole(t, w.to)
	w.onlyWhole(t, w.to)
}

// layersRE matches packs of layers: behind the document, the manifest and the memory.
var layersRE = regexp.MustCompile(`^data/heads-[^/]+/[3-9]/[0-9]+$`)

// readsOfLayers is a store whose packs of layers another one reads.
type readsOfLayers struct {
	blob.Store
	packs blob.Store
}

func (r *readsOfLayers) ReadAt(ctx context.Context, key string, p []byte, off int64) error {
	if layersRE.MatchString(key) {
		return r.packs.ReadAt(ctx, key, p, off)
	}
	return r.Store.ReadAt(ctx, key, p, off)
}

// What a host has of a disk is not had again, also what came with another snapshot.
func TestArrival_gets_no_layer_twice(t *testing.T) {
	w := newDiskWorld(t, 64*mib, 6*mib/disk.BlockSize, 3*mib/disk.BlockSize)
	first := w.begin(t)
	must(t, first.Run(t.Context()))
	must(t, first.Close())
	must(t, w.to.Arrived(t.Context(), w.id))
	w.isWhole(t, w.to)
	must(t, snapshot.Remove(w.to.SnapshotDir(w.id))) // its layers stay until a sweep
	w.store.bytes.Store(0)
	again := w.begin(t)
	if n := again.Missing(); n > 1 {
		t.Errorf("%d frames are missing of what the host has", n)
	}
	must(t, again.Run(t.Context()))
	must(t, again.Close())
	must(t, w.to.Arrived(t.Context(), w.id))
	w.isWhole(t, w.to)
	if read := w.store.bytes.Load(); read*10 > w.stored {
		t.Errorf("%d of %d bytes were read again", read, w.stored)
	}
	// Two that come at once have it twice, and one of them stays.
	must(t, snapshot.Remove(w.to.SnapshotDir(w.id)))
	for _, f := range glob(t, w.to, "sha256-*") {
		must(t, os.Remove(f))
	}
	one := w.begin(t)
	must(t, os.Rename(one.Dir, one.Dir+"x"))
	two := w.begin(t)
	must(t, two.Run(t.Context()))
	d := w.open(t, two)
	must(t, one.Run(t.Context()))
	must(t, one.Close())
	must(t, two.Close())
	must(t, w.to.Arrived(t.Context(), w.id))
	must(t, snapshot.Remove(w.to.SnapshotDir(w.id)))
	must(t, os.Rename(one.Dir+"x", one.Dir))
	must(t, w.to.Arrived(t.Context(), w.id))
	w.want.checkAll(t, d)
	w.isWhole(t, w.to)
	w.onlyWhole(t, w.to)
}

// A host that has a layer of the same name and size with other content does not take that.
func TestAttack_layer_of_another_VM_has_the_name_of_one_that_comes(t *testing.T) {
	w := newDiskWorld(t, 64*mib, 6*mib/disk.BlockSize)
	written{}.write(t, w.to, nil, w.layers[0], 64*mib, 6*mib/disk.BlockSize, 1) // the same blocks
	other, err := os.OpenFile(filepath.Join(w.to.LayerDir(), w.layers[0]), os.O_RDWR, 0)
	must(t, err)
	_, err = other.WriteAt([]byte("theirs"), 40*mib)
	must(t, errors.Join(err, other.Close()))
	a := w.begin(t)
	must(t, a.Run(t.Context()))
	must(t, a.Close())
	must(t, w.to.Arrived(t.Context(), w.id))
	w.isWhole(t, w.to)
}

// A part of a layer that no head has, as of another version, never gets a name.
func TestAttack_part_of_a_layer_that_nothing_completes(t *testing.T) {
	w := newDiskWorld(t, 16*mib, 3*mib/disk.BlockSize)
	a := w.begin(t)
	must(t, a.Close())
	stray := "sha256-" + strings.Repeat("0", 64)
	must(t, os.WriteFile(filepath.Join(a.Dir, stray), []byte("a part"), 0o600))
	h, err := w.a.Head(t.Context(), w.head)
	must(t, err)
	if a, err := h.Resume(t.Context(), w.to, archive.NewLine(), w.id); !errors.Is(err, archive.ErrCorrupt) {
		t.Errorf("it goes on, %v", errors.Join(err, a.Close()))
	}
	must(t, os.Remove(filepath.Join(a.Dir, stray)))
	a, err = h.Resume(t.Context(), w.to, archive.NewLine(), w.id)
	must(t, err)
	must(t, errors.Join(a.Run(t.Context()), a.Close(), w.to.Arrived(t.Context(), w.id)))
	w.isWhole(t, w.to)
}

// Whoever waits for a layer learns that it is lost, and nobody reads other bytes.
func TestArrival_of_a_layer_that_is_damaged_or_gone_is_lost(t *testing.T) {
	for _, gone := range []bool{false, true} {
		w := newDiskWorld(t, 64*mib, 40*mib/disk.BlockSize)
		a := w.begin(t)
		d := w.open(t, a)
		var key string
		must(t, w.store.List(t.Context(), "data/heads-"+w.head, func(i blob.Info) error {
			if strings.HasSuffix(i.Key, "/1") && i.Size > mib { // the second pack of a file
				key = i.Key
			}
			return nil
		}))
		body, v, err := w.store.Store.Load(t.Context(), key, blob.MaxObject)
		must(t, err)
		if body[len(body)/2] ^= 1; gone {
			must(t, w.store.Delete(t.Context(), key))
		} else {
			_, err = w.store.Swap(t.Context(), key, v, body)
			must(t, err)
		}
		want := map[bool]error{true: archive.ErrNotFound, false: archive.ErrCorrupt}[gone]
		if err := a.Run(t.Context()); !errors.Is(err, want) || !errors.Is(a.Err(), want) {
			t.Errorf("it ended with %v, want %v", err, want)
		}
		lost := 0
		for b := range d.Size() / disk.BlockSize {
			switch err := w.want.check(d, b); {
			case errors.Is(err, want):
				lost++
			case err != nil:
				t.Fatalf("block %d: %v", b, err)
			}
		}
		if lost == 0 {
			t.Error("no block is lost")
		}
		if w.to.IsThere(w.id) {
			t.Error("it is there")
		}
	}
}

func glob(t testing.TB, s *state.Store, pattern string) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(s.LayerDir(), pattern))
	must(t, err)
	return files
}

// After a power cut at any write, sync or rename, what has a name is whole, and the rest is had again.
func TestArrival_survives_a_power_cut_at_any_call(t *testing.T) {
	w := newDiskWorld(t, 16*mib, 3*mib/disk.BlockSize, 2*mib/disk.BlockSize)
	must(t, w.begin(t).Close())
	// arrive goes on with the arrival in a copy of the host's state, until the power is cut at a call.
	arrive := func(s *state.Store, sim *faultfs.Sim, cutAt int) error {
		h, err := w.a.Head(t.Context(), w.head)
		if err != nil {
			return err
		}
		a, err := h.Resume(t.Context(), s, archive.NewLine(), w.id)
		if err != nil {
			return err
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		if cutAt > 0 {
			go func() { // what cannot be written is tried again
				for ctx.Err() == nil && sim.Calls() < cutAt {
					time.Sleep(time.Millisecond)
				}
				cancel()
			}()
		}
		if err := errors.Join(a.Run(ctx), a.Close()); err != nil {
			return err
		}
		return s.Arrived(t.Context(), w.id)
	}
	begin := func() (*state.Store, *faultfs.Sim) {
		dir := t.TempDir()
		must(t, os.CopyFS(dir, os.DirFS(w.to.Dir())))
		sim, err := faultfs.NewSim(dir)
		must(t, err)
		s, err := state.OpenStore(dir)
		must(t, err)
		s.FS = sim
		return s, sim
	}
	s, sim := begin()
	must(t, arrive(s, sim, 0))
	calls := sim.Calls()
	there, torn := 0, 0
	for seed := range uint64(40) {
		cutAt := calls - int(seed) // the last calls make it durable and give names
		if seed >= 20 {
			cutAt = 1 + int(seed-20)*calls/20
		}
		s, sim := begin()
		sim.CutAfter(cutAt)
		_ = arrive(s, sim, cutAt)
		after := t.TempDir()
		must(t, sim.Crash(seed, after))
		s, err := state.OpenStore(after)
		must(t, err)
		w.onlyWhole(t, s)
		if s.IsThere(w.id) {
			there++
		} else {
			torn++
			must(t, arrive(s, nil, 0))
		}
		w.isWhole(t, s)
		w.onlyWhole(t, s)
	}
	t.Logf("%d calls; %d times there, %d times torn", calls, there, torn)
	if there == 0 || torn == 0 {
		t.Error("the cuts are not where they should be")
	}
}

// What a killed process has begun to get of a disk, the next one goes on with. Nothing is ever a layer that is not
// whole.
func TestArrival_of_layers_survives_kills_at_any_moment(t *testing.T) {
	w := newDiskWorld(t, 64*mib, 20*mib/disk.BlockSize, 8*mib/disk.BlockSize)
	r := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 1))
	kills, arrived, resumed := 0, 0, 0
	for kills < 25 {
		if w.killed(t, r) {
			kills++
		}
		w.onlyWhole(t, w.to)
		if w.to.IsArriving(w.id) {
			resumed++
		}
		if !w.to.IsThere(w.id) {
			continue
		}
		w.isWhole(t, w.to)
		arrived++
		must(t, snapshot.Remove(w.to.SnapshotDir(w.id)))
		for _, f := range glob(t, w.to, "sha256-*") {
			must(t, os.Remove(f))
		}
	}
	t.Logf("%d kills, %d times there, %d times begun", kills, arrived, resumed)
	must(t, arriveFully(t.Context(), w.a, w.to, w.head, w.id))
	w.isWhole(t, w.to)
}
