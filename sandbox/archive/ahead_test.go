package archive_test

import (
	"errors"
	"testing"

	"github.com/drowse-vm/drowse/sandbox/archive"
	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/sandbox/spec"
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

func TestAhead_puts_again_only_what_has_changed(t *testing.T) {
	from, to := newHost(t), newHost(t)
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
	first := create(ram{ramPages}, nil)
	base, err := snapshot.Open(from.State.SnapshotDir(first))
	must(t, err)
	defer base.Close()
	second := create(changedRAM{ram{ramPages}}, base)

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
	info, after, err := ahead.PushHead(t.Context(), from.State, archive.Info{Name: "traveller", Image: like.Image}, second, []byte("{}"))
	must(t, err)
	if after > before/10 || info.Stored < before/2 || info.ID != head {
		t.Errorf("%d bytes were put ahead and %d later; %+v", before, after, info)
	}
	must(t, arriveFully(t.Context(), a, to.State, head, second))
	must(t, to.State.VerifySnapshot(t.Context(), second))
	s, err := snapshot.Open(to.State.SnapshotDir(second))
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
	// All of it goes with its head.
	must(t, a.RemoveHead(t.Context(), head))
	must(t, store.List(t.Context(), archive.AheadPrefix(head), func(i blob.Info) error { return errors.New(i.Key + " is left") }))
}
