package archive_test

import (
	"errors"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/archive"
	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// changedPage is the page in which the second snapshot differs from the first.
const changedPage = 7

// changedRAM is ram in which a page has the content of another one.
type changedRAM struct{ ram }

func (c changedRAM) ReadPages(page uint64, p []byte) error {
	if err := c.ram.ReadPages(page, p); err != nil {
		return err
	}
	if end := page + uint64(len(p)/guestmem.PageSize); page <= changedPage && changedPage < end {
		copy(p[(changedPage-page)*guestmem.PageSize:], content(changedPage+1))
	}
	return nil
}

// twoSleeps makes snapshots of a sandbox on a host, the second of which builds upon the first.
func twoSleeps(t *testing.T, from *sandbox.Host) (like *snapshot.Manifest, first, second string) {
	t.Helper()
	like, err := from.State.Manifest(asleep(t, from))
	must(t, err)
	takeFacts(t, from, like.ID)
	create := func(memory snapshot.MemorySource, base *snapshot.Snapshot) string {
		t.Helper()
		s := snapshot.Spec{
			ID: spec.NewID(), Sandbox: like.Sandbox, VCPUs: like.VCPUs, Kernel: like.Kernel, Image: like.Image, Disks: like.Disks,
			Host: like.Host, Labels: like.Labels, Memory: memory, Base: base,
		}
		if base != nil {
			s.Changed = guestmem.NewPageSet(ramPages)
			s.Changed.Add(changedPage, changedPage+1)
		}
		_, err := snapshot.Create(t.Context(), from.State.SnapshotDir(s.ID), s)
		must(t, err)
		return s.ID
	}
	first = create(ram{ramPages}, nil)
	base, err := snapshot.Open(from.State.SnapshotDir(first))
	must(t, err)
	defer base.Close()
	second = create(changedRAM{ram{ramPages}}, base)
	return like, first, second
}

func TestAhead_puts_again_only_what_has_changed(t *testing.T) {
	from, to := newHost(t), newHost(t)
	like, first, second := twoSleeps(t, from)
	a, store := newArchive(t)
	head := spec.NewID()
	ahead, err := a.Ahead(head)
	must(t, err)
	before, err := ahead.Send(t.Context(), from.State, like.Image, first)
	must(t, err)
	if again, err := ahead.Send(t.Context(), from.State, like.Image, first); err != nil || again > before/10 {
		t.Errorf("the same once more are %d bytes of %d, %v", again, before, err)
	}
	if _, err := a.Head(t.Context(), head); !errors.Is(err, archive.ErrNotFound) {
		t.Error("before all of it is there:", err)
	}
	named, err := ahead.Objects(t.Context())
	must(t, err)
	for _, o := range named {
		if !archive.IsAhead(o.Key, head) || archive.IsAhead(o.Key, spec.NewID()) {
			t.Errorf("whose is %s?", o.Key)
		}
		must(t, store.ReadAt(t.Context(), o.Key, make([]byte, 1), o.Size-1))
	}
	info, after, _, err := ahead.PushHead(t.Context(), from.State, archive.Info{Name: "traveller", Image: like.Image}, second, []byte("{}"))
	must(t, err)
	if after > before/10 || info.Stored < before/2 || info.ID != head {
		t.Errorf("%d bytes were put ahead and %d later; %+v", before, after, info)
	}
	must(t, arriveFully(t.Context(), a, to.State, head, second))
	must(t, to.State.VerifySnapshot(t.Context(), second))
	readsChanged(t, to.State.SnapshotDir(second))
	// All of it goes with its head.
	must(t, a.RemoveHead(t.Context(), head))
	must(t, store.List(t.Context(), archive.AheadPrefix(head), func(i blob.Info) error { return errors.New(i.Key + " is left") }))
}

// readsChanged checks the memory of the second snapshot of twoSleeps.
func readsChanged(t *testing.T, dir string) {
	t.Helper()
	s, err := snapshot.Open(dir)
	must(t, err)
	defer s.Close()
	reads(t, s.Memory(), 0, changedPage)
	reads(t, s.Memory(), changedPage+1, ramPages)
	d, err := snapshot.NewDecoder()
	must(t, err)
	defer d.Release()
	p := make([]byte, guestmem.PageSize)
	if err := s.Memory().ReadPage(changedPage, p, d); err != nil || string(p) != string(content(changedPage+1)) {
		t.Error("the page that has changed is as it was:", err)
	}
}

// next puts a head that keeps what earlier ones have put.
func next(t *testing.T, a *archive.Archive, s *state.Store, snap string, kept []archive.Kept) (id string, keeps []string, stored int64, now []archive.Kept) {
	t.Helper()
	m, err := s.Manifest(snap)
	must(t, err)
	id = spec.NewID()
	up, err := a.Ahead(id)
	must(t, err)
	keeps, err = up.Keep(s, snap, kept)
	must(t, err)
	_, stored, now, err = up.PushHead(t.Context(), s, archive.Info{Name: "traveller", Image: m.Image}, snap, []byte("{}"))
	must(t, err)
	return id, keeps, stored, now
}

func TestKeep_names_what_earlier_heads_have_put_on_whatever_host(t *testing.T) {
	from, to, third := newHost(t), newHost(t), newHost(t)
	_, first, second := twoSleeps(t, from)
	a, _ := newArchive(t)
	one, keeps, whole, kept := next(t, a, from.State, first, nil)
	if len(keeps) != 0 {
		t.Errorf("the first one keeps %v", keeps)
	}
	two, keeps, more, kept := next(t, a, from.State, second, kept)
	if !slices.Equal(keeps, []string{one}) || more > whole/10 {
		t.Errorf("the second one keeps %v, want %s; it puts %d bytes after %d", keeps, one, more, whole)
	}
	three, keeps, more, _ := next(t, a, from.State, second, kept)
	if want := slices.Sorted(slices.Values([]string{one, two})); !slices.Equal(keeps, want) || more > whole/10 {
		t.Errorf("the third one keeps %v, want %v; it puts %d bytes", keeps, want, more)
	}
	// Another host gets all of it, and what it puts later keeps the same.
	h, err := a.Head(t.Context(), three)
	must(t, err)
	arrival, err := h.PullLater(t.Context(), to.State, archive.NewLine())
	must(t, err)
	must(t, arrival.Run(t.Context()))
	must(t, to.State.Arrived(t.Context(), second))
	kept, _, err = arrival.Kept(t.Context(), to.State)
	must(t, errors.Join(err, arrival.Close()))
	readsChanged(t, to.State.SnapshotDir(second))
	four, keeps, more, _ := next(t, a, to.State, second, kept)
	if !slices.Contains(keeps, one) || more > whole/10 {
		t.Errorf("of the other host it keeps %v, want %s among them; it puts %d bytes", keeps, one, more)
	}
	must(t, a.RemoveHead(t.Context(), three))
	must(t, arriveFully(t.Context(), a, third.State, four, second))
	must(t, third.State.VerifySnapshot(t.Context(), second))
	readsChanged(t, third.State.SnapshotDir(second))
}

func TestKeep_puts_again_what_is_the_lesser_part_of_a_head_or_is_gone(t *testing.T) {
	from, to := newHost(t), newHost(t)
	_, first, second := twoSleeps(t, from)
	a, _ := newArchive(t)
	one, _, whole, kept := next(t, a, from.State, first, nil)
	lesser := slices.Clone(kept)
	for i := range lesser {
		lesser[i].Of *= 3
	}
	if _, keeps, more, _ := next(t, a, from.State, second, lesser); len(keeps) != 0 || more < whole/2 {
		t.Errorf("of a head of which little is in use %v are kept, and %d bytes put after %d", keeps, more, whole)
	}
	up, err := a.Ahead(spec.NewID())
	must(t, err)
	if keeps, err := up.Keep(from.State, second, kept); err != nil || !slices.Equal(keeps, []string{one}) {
		t.Errorf("it keeps %v, %v", keeps, err)
	}
	up.Forget([]string{one})
	must(t, a.RemoveHead(t.Context(), one))
	m, err := from.State.Manifest(second)
	must(t, err)
	_, stored, _, err := up.PushHead(t.Context(), from.State, archive.Info{Name: "traveller", Image: m.Image}, second, []byte("{}"))
	must(t, err)
	if stored < whole/2 {
		t.Errorf("without a head that is gone %d bytes are put, and all are %d", stored, whole)
	}
	must(t, arriveFully(t.Context(), a, to.State, up.ID(), second))
	readsChanged(t, to.State.SnapshotDir(second))
}

// A head of an earlier version has its document and all indexes in objects of their own.
func TestHead_of_the_first_version_arrives(t *testing.T) {
	from, to := newHost(t), newHost(t)
	like, _, second := twoSleeps(t, from)
	a, _ := newArchive(t)
	// It puts the image.
	pushHead(t, a, from.State, archive.Info{ID: spec.NewID(), Name: "traveller", Image: like.Image}, second)
	i := archive.Info{ID: spec.NewID(), Name: "traveller", Image: like.Image}
	_, err := a.Put(t.Context(), archive.Heads, i, func(put func(snapshot.SentFile, io.Reader) error) error {
		if err := put(snapshot.SentFile{Name: "sandbox.json", Size: 2}, strings.NewReader("{}")); err != nil {
			return err
		}
		return from.State.SendSnapshot(t.Context(), second, put)
	})
	must(t, err)
	must(t, arriveFully(t.Context(), a, to.State, i.ID, second))
	readsChanged(t, to.State.SnapshotDir(second))
}

// pushHead puts a head at once.
func pushHead(t testing.TB, a *archive.Archive, s *state.Store, i archive.Info, snap string) archive.Info {
	t.Helper()
	up, err := a.Ahead(i.ID)
	must(t, err)
	out, _, _, err := up.PushHead(t.Context(), s, i, snap, []byte("{}"))
	must(t, err)
	return out
}
