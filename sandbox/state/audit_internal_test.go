package state

import (
	"errors"
	"os"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest/audit"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

func auditOf(t *testing.T, s *Store, name string) (is audit.Trailer, all []audit.Entry) {
	t.Helper()
	is, err := s.Audit(t.Context(), name, audit.ReadOptions{}, func(e audit.Entry) error {
		all = append(all, e)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return is, all
}

func TestAudit_begins_empty_with_its_VM_and_names_what_it_was_made_of(t *testing.T) {
	s, err := OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	begin := func(r *Record) {
		t.Helper()
		r.Version, r.ID, r.Phase = RecordVersion, spec.NewID(), Asleep
		l, err := s.Create(r)
		if err != nil {
			t.Fatal(err)
		}
		l.Release()
	}
	do := func(name string) {
		t.Helper()
		p, err := audit.Open(s.AuditPath(name)).Begin(t.Context(), audit.Action{Kind: audit.KindExec})
		if err != nil || p == nil {
			t.Fatalf("not recorded: %v, %v", p, err)
		}
		p.End(audit.Outcome{})
	}
	parent := &Record{Spec: spec.VM{Name: "parent"}}
	begin(parent)
	do("parent")
	child := &Record{Spec: spec.VM{Name: "child"}, Parent: "5a5a", Fork: &Origin{Parent: "parent", ParentID: parent.ID, Generation: 1, Time: time.Now()}}
	begin(child)
	if is, all := auditOf(t, s, "parent"); is.VM != parent.ID || is.Name != "parent" || is.Parent != "" || len(all) != 1 {
		t.Errorf("the parent has %+v, %v", is, all)
	}
	if is, all := auditOf(t, s, "child"); is.VM != child.ID || is.Name != "child" || is.Parent != "parent" || is.ParentID != parent.ID || is.Snapshot != "5a5a" || len(all) != 0 {
		t.Errorf("the child has %+v, %v", is, all)
	}
	if _, err := s.Audit(t.Context(), "nobody", audit.ReadOptions{}, nil); !errors.Is(err, spec.ErrNotFound) {
		t.Errorf("a VM that is not there gives %v", err)
	}

	// A VM of a version without trails.
	if err := os.Remove(s.AuditPath("child")); err != nil {
		t.Fatal(err)
	}
	if is, all := auditOf(t, s, "child"); is.VM != child.ID || is.Parent != "parent" || len(all) != 0 {
		t.Errorf("without a trail it has %+v, %v", is, all)
	}
	for range 2 {
		if err := s.EnsureAudit("child"); err != nil {
			t.Fatal(err)
		}
		do("child")
	}
	if is, all := auditOf(t, s, "child"); is.Parent != "parent" || len(all) != 2 {
		t.Errorf("with a trail made later it has %+v, %v", is, all)
	}

	// A power cut may leave zeros in place of recent writes.
	if err := os.WriteFile(s.AuditPath("child"), make([]byte, 64), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Audit(t.Context(), "child", audit.ReadOptions{}, nil); !errors.Is(err, audit.ErrDamaged) {
		t.Errorf("a damaged trail gives %v", err)
	}
	if err := s.EnsureAudit("child"); err != nil {
		t.Fatal(err)
	}
	if is, all := auditOf(t, s, "child"); is.Parent != "parent" || len(all) != 0 {
		t.Errorf("after that it has %+v, %v", is, all)
	}

	// A new VM has nothing from an older one of the same name.
	if err := s.remove(t.Context(), "parent", true); err != nil {
		t.Fatal(err)
	}
	again := &Record{Spec: spec.VM{Name: "parent"}}
	begin(again)
	if is, all := auditOf(t, s, "parent"); is.VM != again.ID || len(all) != 0 {
		t.Errorf("the next one has %+v, %v", is, all)
	}
}
