package archive_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/drowse-vm/drowse/sandbox/archive"
	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

func TestMain(m *testing.M) {
	if text := os.Getenv(arrivalEnv); text != "" {
		if err := arrivalChild(text); err != nil {
			fmt.Fprintln(os.Stderr, "the child:", err)
			os.Exit(1)
		}
		return
	}
	goleak.VerifyTestMain(m)
}

// far is a store behind a network, which counts what is read.
type far struct {
	blob.Store
	rtt         time.Duration
	gets, bytes atomic.Int64
	down        atomic.Bool

	mu   sync.Mutex
	read map[string]int // bytes of each object
}

var errDown = errors.New("the network is down")

func (s *far) ReadAt(ctx context.Context, key string, p []byte, off int64) error {
	if s.down.Load() {
		return errDown
	}
	s.gets.Add(1)
	s.bytes.Add(int64(len(p)))
	s.mu.Lock()
	if s.read == nil {
		s.read = map[string]int{}
	}
	s.read[key] += len(p)
	s.mu.Unlock()
	select {
	case <-time.After(s.rtt):
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return s.Store.ReadAt(ctx, key, p, off)
}

func (s *far) Load(ctx context.Context, key string, limit int64) ([]byte, blob.Version, error) {
	if s.down.Load() {
		return nil, "", errDown
	}
	b, v, err := s.Store.Load(ctx, key, limit)
	s.gets.Add(1)
	s.bytes.Add(int64(len(b)))
	time.Sleep(s.rtt)
	return b, v, err
}

// ram has pages of which every third is zeros, and others that do not compress.
type ram struct{ pages uint64 }

const ramPages = 16384 // 64 MiB

func (r ram) Slots() []snapshot.Slot { return []snapshot.Slot{{Size: r.pages * guestmem.PageSize}} }

func (r ram) NextData(page uint64) (first, end uint64, err error) { return page, r.pages, nil }

func (r ram) ReadPages(page uint64, p []byte) error {
	for ; len(p) > 0; p, page = p[guestmem.PageSize:], page+1 {
		copy(p, content(page))
	}
	return nil
}

func content(page uint64) []byte {
	b := make([]byte, guestmem.PageSize)
	if page%3 == 0 {
		return b
	}
	r := rand.New(rand.NewPCG(page, 1))
	for i := 0; i < len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], r.Uint64())
	}
	return b
}

// world is a head with memory in an archive, and a host that lacks it.
type world struct {
	store  *far
	root   string // the directory of the store
	a      *archive.Archive
	head   string
	id     string
	hot    []uint64
	stored int64
	to     *state.Store
}

// facts are those of the host's VMs, for a child.
var facts string

func newWorld(t testing.TB) *world {
	t.Helper()
	from, to := newHost(t), newHost(t)
	like, err := from.State.Manifest(asleep(t, from))
	must(t, err)
	facts = like.Host[instance.FactsKey]
	instance.NoteGoodFacts(facts)
	w := &world{to: to.State, head: spec.NewID(), id: spec.NewID()}
	hot := binary.LittleEndian.AppendUint32(nil, 0)
	for page := uint64(50); page < ramPages; page += 83 {
		w.hot = append(w.hot, page)
		hot = binary.LittleEndian.AppendUint32(hot, uint32(page))
	}
	binary.LittleEndian.PutUint32(hot, uint32(len(w.hot)))
	_, err = snapshot.Create(t.Context(), from.State.SnapshotDir(w.id), snapshot.Spec{
		ID: w.id, Sandbox: like.Sandbox, VCPUs: like.VCPUs, Kernel: like.Kernel, Image: like.Image, Disks: like.Disks, Host: like.Host,
		Labels: like.Labels, Memory: ram{ramPages}, Hot: w.hot,
		Payloads: []snapshot.Payload{{Name: "working-set", Kind: "drowse-working-set", Version: 2, Data: hot}},
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

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// begin begins an arrival.
func (w *world) begin(t testing.TB) *archive.Arrival {
	t.Helper()
	h, err := w.a.Head(t.Context(), w.head)
	must(t, err)
	a, err := h.PullLater(t.Context(), w.to, archive.NewLine())
	must(t, err)
	t.Cleanup(func() { must(t, a.Close()) })
	return a
}

// isWhole checks that a snapshot is there and has all that it had.
func (w *world) isWhole(t testing.TB) {
	t.Helper()
	must(t, w.to.VerifySnapshot(t.Context(), w.id))
	s, err := snapshot.Open(w.to.SnapshotDir(w.id))
	must(t, err)
	defer s.Close()
	reads(t, s.Memory(), 0, ramPages)
}

// reads reads pages and compares them.
func reads(t testing.TB, m *snapshot.Memory, first, end uint64) {
	t.Helper()
	d, err := snapshot.NewDecoder()
	must(t, err)
	defer d.Release()
	p := make([]byte, guestmem.PageSize)
	for page := first; page < end; page++ {
		if err := m.ReadPage(page, p, d); err != nil || !bytes.Equal(p, content(page)) {
			t.Fatalf("page %d: it differs, %v", page, err)
		}
	}
}

func TestArrival_has_what_a_guest_needs_first_with_a_small_part_and_all_in_the_end(t *testing.T) {
	w := newWorld(t)
	w.store.rtt = 5 * time.Millisecond
	w.store.gets.Store(0)
	w.store.bytes.Store(0)
	a := w.begin(t)
	s, err := a.Open(t.Context())
	must(t, err)
	hot, _, err := state.HotPages(s)
	must(t, err)
	if !slices.Equal(hot, w.hot) {
		t.Fatalf("%d hot pages, want %d", len(hot), len(w.hot))
	}
	must(t, a.Load(t.Context(), s.Memory(), hot, true))
	gets, read := w.store.gets.Load(), w.store.bytes.Load()
	t.Logf("%d GETs, %d of %d bytes: %.1f %%", gets, read, w.stored, 100*float64(read)/float64(w.stored))
	if read*100 > w.stored*7 {
		t.Errorf("what a guest needs first are %d of %d bytes", read, w.stored)
	}
	for _, page := range hot {
		reads(t, s.Memory(), page, page+1)
	}
	if w.store.gets.Load() != gets {
		t.Errorf("its pages needed %d more GETs", w.store.gets.Load()-gets)
	}
	// Nobody takes it for a snapshot.
	if list, err := w.to.Snapshots(); err != nil || len(list) != 0 || w.to.IsThere(w.id) {
		t.Errorf("the store has %v, %v", list, err)
	}
	if _, err := w.to.FindSnapshot(w.id); !errors.Is(err, spec.ErrArriving) {
		t.Errorf("looking for it: %v", err)
	}
	w.to.Grace = 0
	if freed, err := w.to.Sweep(t.Context()); err != nil || freed.Layers != 0 {
		t.Errorf("a sweep frees %+v, %v", freed, err)
	}
	// Faults, of several threads in the same places, while the rest comes.
	var wg sync.WaitGroup
	for i := range uint64(4) {
		wg.Go(func() {
			for page := ramPages - 1 - i; page > 300; page -= 211 {
				reads(t, s.Memory(), page, page+1)
			}
		})
	}
	must(t, a.Run(t.Context()))
	wg.Wait()
	must(t, s.Close())
	must(t, a.Close())
	must(t, w.to.Arrived(t.Context(), w.id))
	w.isWhole(t)
	if ids, err := w.to.Arriving(); err != nil || len(ids) != 0 {
		t.Errorf("on their way are %q, %v", ids, err)
	}
	w.store.mu.Lock()
	defer w.store.mu.Unlock()
	for key, n := range w.store.read {
		body, _, err := w.store.Store.Load(t.Context(), key, blob.MaxObject)
		must(t, err)
		if n > len(body) {
			t.Errorf("%s has %d bytes, and %d were read: some were read twice", key, len(body), n)
		}
	}
}

func TestArrival_waits_for_a_store_that_is_down_and_goes_on(t *testing.T) {
	w := newWorld(t)
	a := w.begin(t)
	s, err := a.Open(t.Context())
	must(t, err)
	must(t, s.Close())
	w.store.down.Store(true)
	ctx, cancel := context.WithCancelCause(t.Context())
	patience := errors.New("the guest has waited for long enough")
	s, err = a.Open(ctx) // the root is there
	must(t, err)
	defer s.Close()
	d, err := snapshot.NewDecoder()
	must(t, err)
	defer d.Release()
	p := bytes.Repeat([]byte{1}, guestmem.PageSize)
	time.AfterFunc(50*time.Millisecond, func() { cancel(patience) })
	if err := s.Memory().ReadPage(301, p, d); !errors.Is(err, patience) {
		t.Errorf("a page that is not there is %x, %v", p[:8], err)
	}
	done := make(chan error, 1)
	go func() { done <- a.Run(t.Context()) }()
	time.Sleep(20 * time.Millisecond)
	if w.to.IsThere(w.id) || a.Missing() == 0 {
		t.Error("it is there")
	}
	w.store.down.Store(false)
	must(t, <-done)
	must(t, a.Close())
	must(t, w.to.Arrived(t.Context(), w.id))
	w.isWhole(t)
}

// Whoever waits learns that memory is lost, and nobody gets other bytes.
func TestArrival_of_what_is_damaged_or_gone_is_lost(t *testing.T) {
	for name, harm := range map[string]func(w *world, key string) error{
		"gone": func(w *world, key string) error { return w.store.Delete(t.Context(), key) },
		"damaged": func(w *world, key string) error {
			body, v, err := w.store.Store.Load(t.Context(), key, blob.MaxObject)
			if err != nil {
				return err
			}
			body[len(body)/2] ^= 1
			_, err = w.store.Swap(t.Context(), key, v, body)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			a := w.begin(t)
			s, err := a.Open(t.Context())
			must(t, err)
			defer s.Close()
			must(t, harm(w, w.pack(t, 1)))
			waits := make(chan error, 1)
			go func() { <-a.Lost(); waits <- a.Err() }()
			err = a.Run(t.Context())
			if want := map[string]error{"gone": archive.ErrNotFound, "damaged": archive.ErrCorrupt}[name]; !errors.Is(err, want) || !errors.Is(<-waits, want) {
				t.Errorf("it ended with %v, want %v", err, want)
			}
			d, err := snapshot.NewDecoder()
			must(t, err)
			defer d.Release()
			p, lost := make([]byte, guestmem.PageSize), 0
			for page := uint64(1); page < ramPages; page += 50 {
				if err := s.Memory().ReadPage(page, p, d); err != nil {
					lost++
				} else if !bytes.Equal(p, content(page)) {
					t.Fatalf("page %d has other bytes", page)
				}
			}
			if lost == 0 {
				t.Error("no page is lost")
			}
		})
	}
}

// flaky says of the first reads of memory, a few times, that what is there is not, or something else.
type flaky struct {
	blob.Store
	gone bool
	mu   sync.Mutex // guards seen
	seen map[string]int
}

func (f *flaky) ReadAt(ctx context.Context, key string, p []byte, off int64) error {
	f.mu.Lock()
	at := fmt.Sprint(key, " ", off)
	f.seen[at]++
	bad := f.seen[at] < archive.LostTries && len(f.seen) <= 4
	f.mu.Unlock()
	if bad && f.gone {
		return blob.ErrNotFound
	}
	err := f.Store.ReadAt(ctx, key, p, off)
	if bad && err == nil {
		p[len(p)/2] ^= 1
	}
	return err
}

func TestAttack_answer_that_is_wrong_for_once_loses_all_memory(t *testing.T) {
	for _, gone := range []bool{false, true} {
		w := newWorld(t)
		h, err := w.a.Head(t.Context(), w.head)
		must(t, err)
		began, err := h.PullLater(t.Context(), w.to, archive.NewLine())
		must(t, err)
		must(t, began.Close())
		h, err = archive.Open(&readsOf{w.store, &flaky{Store: w.store, gone: gone, seen: map[string]int{}}}).Head(t.Context(), w.head)
		must(t, err)
		a, err := h.Resume(t.Context(), w.to, archive.NewLine(), w.id)
		must(t, err)
		must(t, a.Run(t.Context()))
		must(t, a.Close())
		must(t, w.to.Arrived(t.Context(), w.id))
		w.isWhole(t)
	}
}

// readsOf is a store whose packs of memory another one reads.
type readsOf struct {
	blob.Store
	memory blob.Store
}

func (r *readsOf) ReadAt(ctx context.Context, key string, p []byte, off int64) error {
	if strings.Contains(key, "/2/") { // behind the document and the manifest
		return r.memory.ReadAt(ctx, key, p, off)
	}
	return r.Store.ReadAt(ctx, key, p, off)
}

// pack returns the key of a pack of the memory.
func (w *world) pack(t testing.TB, n int) (key string) {
	t.Helper()
	must(t, w.store.List(t.Context(), "data/heads-"+w.head, func(i blob.Info) error {
		if strings.HasSuffix(i.Key, fmt.Sprintf("/2/%d", n)) { // behind the document and the manifest
			key = i.Key
		}
		return nil
	}))
	return key
}

func TestArrival_refuses_what_no_file_has(t *testing.T) {
	w := newWorld(t)
	a := w.begin(t)
	const size = 1 << 40
	for _, r := range []snapshot.Place{
		{File: "memory", Off: -1, Len: 1}, {File: "memory", Off: size, Len: 1}, {File: "memory", Off: 0, Len: size}, {File: "memory", Off: 1 << 62, Len: 1 << 62},
		{File: "memory", Off: 0, Len: -1}, {File: "manifest", Off: 0, Len: 1}, {File: "../memory", Off: 0, Len: 1}, {File: "", Off: 0, Len: 1},
	} {
		if err := a.Ensure(t.Context(), r.File, r.Off, r.Len); !errors.Is(err, fs.ErrInvalid) {
			t.Errorf("%+v: %v", r, err)
		}
	}
	must(t, a.Close())
	if err := a.Ensure(t.Context(), "memory", 1<<20, 1); err == nil {
		t.Error("a closed arrival goes on")
	}
}

// What a killed process has begun, the next one goes on with. Nothing is ever a snapshot that is not whole.
func TestArrival_survives_kills_at_any_moment(t *testing.T) {
	w := newWorld(t)
	r := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 1))
	kills, arrived, resumed := 0, 0, 0
	for kills < 25 {
		if w.killed(t, r) {
			kills++
		}
		if w.to.IsArriving(w.id) {
			resumed++
		}
		if !w.to.IsThere(w.id) {
			continue
		}
		w.isWhole(t)
		arrived++
		must(t, snapshot.Remove(w.to.SnapshotDir(w.id)))
	}
	t.Logf("%d kills, %d times there, %d times begun", kills, arrived, resumed)
	// And without kills it arrives.
	must(t, arriveFully(t.Context(), w.a, w.to, w.head, w.id))
	w.isWhole(t)
}

// killed begins an arrival or goes on with it in another process, and kills that. It reports whether it was not faster.
func (w *world) killed(t *testing.T, r *rand.Rand) bool {
	t.Helper()
	cmd := exec.Command(os.Args[0]) //nolint:gosec // this program
	cmd.Env = append(os.Environ(), arrivalEnv+"="+strings.Join([]string{w.root, w.to.Dir(), w.head, w.id, facts}, "\x1f"))
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	must(t, cmd.Start())
	time.Sleep(time.Duration(r.IntN(700)) * time.Millisecond)
	err := cmd.Process.Kill()
	_ = cmd.Wait()
	return err == nil
}

// arrivalEnv makes this program a process that gets a head, until it is killed.
const arrivalEnv = "DROWSE_TEST_ARRIVAL"

func arrivalChild(text string) error {
	args := strings.Split(text, "\x1f")
	d, err := blob.OpenDir(args[0])
	if err != nil {
		return err
	}
	s, err := state.OpenStore(args[1])
	if err != nil {
		return err
	}
	instance.NoteGoodFacts(args[4])
	return arriveFully(context.Background(), archive.Open(&far{Store: d, rtt: 5 * time.Millisecond}), s, args[2], args[3])
}

// arriveFully begins an arrival or goes on with it.
func arriveFully(ctx context.Context, a *archive.Archive, s *state.Store, head, id string) error {
	if err := s.CleanArriving(); err != nil {
		return err
	}
	h, err := a.Head(ctx, head)
	if err != nil {
		return err
	}
	var at *archive.Arrival
	if s.IsArriving(id) {
		at, err = h.Resume(ctx, s, archive.NewLine(), id)
	} else {
		at, err = h.PullLater(ctx, s, archive.NewLine())
	}
	if err != nil {
		return err
	}
	if err := errors.Join(at.Run(ctx), at.Close()); err != nil {
		return err
	}
	return s.Arrived(ctx, id)
}
