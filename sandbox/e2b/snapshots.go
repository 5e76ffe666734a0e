package e2b

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/internal/lazyregexp"
	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Tags of snapshots of this wire. Others do not exist for its clients.
const (
	tagSnapshot = "e2b"
	tagName     = "e2b-name="
	tagOwner    = "e2b-owner="
)

// ownerTag is the tag of snapshots of an owner's sandboxes: tags do not have all characters that owners have.
func ownerTag(owner string) string {
	sum := sha256.Sum256([]byte(owner))
	return tagOwner + hex.EncodeToString(sum[:16])
}

// snapshotSuffix ends a snapshot's id: E2B has tags of templates there.
const snapshotSuffix = ":default"

var (
	snapshotRE     = lazyregexp.New(`^[0-9a-f-]{16,64}$`)
	snapshotNameRE = lazyregexp.New(`^[a-z0-9][a-z0-9_-]{0,53}$`)
)

// snapshotBody is a snapshot as clients see it.
type snapshotBody struct {
	ID    string   `json:"snapshotID"`
	Names []string `json:"names"`
}

func snapshotOf(i spec.SnapshotInfo) snapshotBody {
	b := snapshotBody{ID: i.ID + snapshotSuffix, Names: []string{}}
	for _, t := range i.Tags {
		if name, ok := strings.CutPrefix(t, tagName); ok {
			b.Names = append(b.Names, name)
		}
	}
	return b
}

// listSnapshots returns the snapshots of this wire that a key of an owner reaches, the newest first.
func (s *Server) listSnapshots(owner string) ([]spec.SnapshotInfo, error) {
	all, err := s.host.State.Snapshots()
	if len(all) == 0 && err != nil {
		return nil, err
	}
	all = slices.DeleteFunc(all, func(i spec.SnapshotInfo) bool {
		return !slices.Contains(i.Tags, tagSnapshot) || owner != "" && !slices.Contains(i.Tags, ownerTag(owner))
	})
	slices.SortFunc(all, func(a, b spec.SnapshotInfo) int {
		return cmp.Compare(position(a.Created, a.ID), position(b.Created, b.ID))
	})
	return all, nil
}

// findSnapshot returns the id of the owner's snapshot that a template's name means, or "".
func (s *Server) findSnapshot(owner, template string) (string, error) {
	name := strings.TrimSuffix(template, snapshotSuffix)
	if !snapshotRE.MatchString(name) && !snapshotNameRE.MatchString(name) {
		return "", nil
	}
	all, err := s.listSnapshots(owner)
	if err != nil {
		return "", err
	}
	for _, i := range all { // the newest of a name
		if i.ID == name || slices.Contains(i.Tags, tagName+name) {
			return i.ID, nil
		}
	}
	return "", nil
}

// SnapshotPrefix begins the name of a snapshot in Options.Templates.
const SnapshotPrefix = "snapshot:"

// template returns the id of the snapshot that a key of an owner makes sandboxes of by a template's name, or "". The
// host's own templates are everybody's, and no one's own snapshot takes the name of one.
func (s *Server) template(owner, name string) (string, error) {
	shared, ok := s.o.Templates[name]
	if !ok {
		return s.findSnapshot(owner, name)
	}
	ref, ok := strings.CutPrefix(shared, SnapshotPrefix)
	if !ok {
		return "", nil // an image
	}
	id, err := s.host.State.FindSnapshot(ref)
	if err != nil {
		return "", &apiError{Code: http.StatusNotFound, Message: "the template was not found: its snapshot is not on the host", cause: err}
	}
	return id, nil
}

func (s *Server) snapshot(w http.ResponseWriter, r *http.Request, b *box) (int, any, error) {
	var body struct {
		Name string `json:"name"`
	}
	if err := read(w, r, &body); err != nil {
		return 0, nil, err
	}
	name := strings.TrimSuffix(body.Name, snapshotSuffix)
	if name != "" && !snapshotNameRE.MatchString(name) {
		return 0, nil, fail(http.StatusBadRequest, "name: use at most 54 lower-case letters, digits, hyphens and underscores")
	}
	if b.paused() {
		return 0, nil, fail(http.StatusConflict, "the sandbox is paused")
	}
	done, err := s.starting()
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
	tags := []string{tagSnapshot}
	if b.meta.Owner != "" {
		tags = append(tags, ownerTag(b.meta.Owner))
	}
	if name != "" {
		tags = append(tags, tagName+name)
	}
	info, err := s.host.State.TagSnapshot(res.Snapshot, tags)
	if err != nil {
		return 0, nil, err
	}
	s.log.Info("snapshot taken", "sandbox", b.Name(), "snapshot", info.ID)
	return http.StatusCreated, snapshotOf(info), nil
}

func (s *Server) snapshots(w http.ResponseWriter, r *http.Request) (int, any, error) {
	q := r.URL.Query()
	all, err := s.listSnapshots(keyOf(r.Context()).Owner)
	if err != nil {
		return 0, nil, err
	}
	all = slices.DeleteFunc(all, func(i spec.SnapshotInfo) bool {
		id, name := q.Get("sandboxID"), strings.TrimSuffix(q.Get("name"), snapshotSuffix)
		return id != "" && i.VM != id || name != "" && !slices.Contains(i.Tags, tagName+name)
	})
	rows, err := page(w, q, all, func(i spec.SnapshotInfo) string { return position(i.Created, i.ID) })
	out := []snapshotBody{}
	for _, i := range rows {
		out = append(out, snapshotOf(i))
	}
	return http.StatusOK, out, err
}

// removeTemplate removes a snapshot. Images are the host's.
func (s *Server) removeTemplate(_ http.ResponseWriter, r *http.Request) (int, any, error) {
	id, err := s.findSnapshot(keyOf(r.Context()).Owner, r.PathValue("id"))
	switch {
	case err != nil:
		return 0, nil, err
	case id == "":
		return 0, nil, fail(http.StatusNotFound, "there is no such snapshot")
	}
	return http.StatusNoContent, nil, s.host.State.RemoveSnapshot(r.Context(), id)
}

// templateBody is an image as clients see it.
type templateBody struct {
	ID      string    `json:"templateID"`
	BuildID string    `json:"buildID"`
	Public  bool      `json:"public"`
	Aliases []string  `json:"aliases"`
	Names   []string  `json:"names"`
	CPUs    int       `json:"cpuCount"`
	Memory  int       `json:"memoryMB"`
	Disk    int       `json:"diskSizeMB"`
	Envd    string    `json:"envdVersion"`
	Status  string    `json:"buildStatus"`
	Created time.Time `json:"createdAt"`
	Updated time.Time `json:"updatedAt"`
}

func (s *Server) templates(http.ResponseWriter, *http.Request) (int, any, error) {
	images, err := image.OpenStore(s.host.State.ImageDir())
	if err != nil {
		return 0, nil, err
	}
	all, err := images.List()
	if len(all) == 0 && err != nil {
		return 0, nil, err
	}
	out := []templateBody{}
	for _, i := range all {
		for _, tag := range i.Tags {
			names := []string{tag}
			for alias, of := range s.o.Templates {
				if of == tag {
					names = append(names, alias)
				}
			}
			slices.Sort(names[1:])
			out = append(out, templateBody{
				ID: tag, BuildID: i.ID, Public: true, Aliases: names, Names: names, CPUs: s.o.Spec.VCPUs, Memory: s.o.Spec.MemoryMiB,
				Disk: cmp.Or(s.o.Spec.DiskMiB, spec.DefaultDiskMiB), Envd: EnvdVersion, Status: "ready", Created: i.Created, Updated: i.Created,
			})
		}
	}
	return http.StatusOK, out, nil
}

// alias says whether there is a template of a name.
func (s *Server) alias(_ http.ResponseWriter, r *http.Request) (int, any, error) {
	name := r.PathValue("id")
	id, err := s.template(keyOf(r.Context()).Owner, name)
	if err != nil {
		return 0, nil, err
	}
	if id == "" {
		if _, err := s.image(name); err != nil {
			return 0, nil, err
		}
	}
	return http.StatusOK, map[string]any{"templateID": name, "public": true}, nil
}
