package e2b

import (
	"context"
	"net/http"
	"slices"
	"strings"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/e2b/answers"
	"github.com/drowse-vm/drowse/sandbox/e2b/templates"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// snapshotSuffix ends a snapshot's id: E2B has tags of templates there.
const snapshotSuffix = ":default"

// snapshotBody is a snapshot as clients see it.
type snapshotBody struct {
	ID    string   `json:"snapshotID"`
	Names []string `json:"names"`
}

func snapshotOf(i spec.SnapshotInfo) snapshotBody {
	b := snapshotBody{ID: i.ID + snapshotSuffix, Names: []string{}}
	if name := templates.MarksOf(i).Name; name != "" {
		b.Names = append(b.Names, name)
	}
	return b
}

func (s *Server) snapshot(w http.ResponseWriter, r *http.Request, b *box) (int, any, error) {
	var body struct {
		Name string `json:"name"`
	}
	if err := answers.Read(w, r, &body); err != nil {
		return 0, nil, err
	}
	name := strings.TrimSuffix(body.Name, snapshotSuffix)
	if name != "" && !templates.ValidName(name) {
		return 0, nil, answers.Fail(http.StatusBadRequest, "name: use at most 54 lower-case letters, digits, hyphens and underscores")
	}
	if b.paused() {
		return 0, nil, answers.Fail(http.StatusConflict, "the sandbox is paused")
	}
	done, err := s.starting(b.meta.Owner)
	if err != nil {
		return 0, nil, err
	}
	defer done()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), controlTime)
	defer cancel()
	res, err := b.Snapshot(ctx, sandbox.SnapshotOptions{Note: "of E2B's wire"})
	if err != nil {
		return 0, nil, err
	}
	info, err := s.host.State.TagSnapshot(res.Snapshot, templates.SnapshotTags(b.meta.Owner, name))
	if err != nil {
		return 0, nil, err
	}
	s.log.Info("snapshot taken", "sandbox", b.Name(), "snapshot", info.ID)
	return http.StatusCreated, snapshotOf(info), nil
}

func (s *Server) snapshots(w http.ResponseWriter, r *http.Request) (int, any, error) {
	q := r.URL.Query()
	all, err := s.templates.Snapshots(keyOf(r.Context()).Owner)
	if err != nil {
		return 0, nil, err
	}
	all = slices.DeleteFunc(all, func(i spec.SnapshotInfo) bool {
		id, name := q.Get("sandboxID"), strings.TrimSuffix(q.Get("name"), snapshotSuffix)
		return templates.MarksOf(i).Template != "" || id != "" && i.VM != id || name != "" && templates.MarksOf(i).Name != name
	})
	rows, err := answers.Page(w, q, all, func(i spec.SnapshotInfo) string { return answers.Position(i.Created, i.ID) })
	out := []snapshotBody{}
	for _, i := range rows {
		out = append(out, snapshotOf(i))
	}
	return http.StatusOK, out, err
}
