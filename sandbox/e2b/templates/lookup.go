// Package templates has the templates of E2B's wire: images of the host, snapshots that clients take, and what clients
// build of steps. A build runs its steps in a sandbox of its own, whose snapshot is the template: so sandboxes of it
// begin with its start command running. All that clients can hold here is bounded: builds, their logs and uploads.
package templates

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"

	"github.com/drowse-vm/drowse/internal/lazyregexp"
	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/e2b/answers"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Options configure New. All but Pull are required.
type Options struct {
	Host *sandbox.Host
	// Names are images, and snapshots after SnapshotPrefix, by the names of templates of the host.
	Names map[string]string
	// Size is the default of sandboxes.
	Size sandbox.Spec
	// Pull makes an image of a registry's, for keys that may do so; nil refuses.
	Pull func(ctx context.Context, ref string) error
	// Make makes a sandbox of a snapshot, or of an image in a size. It waits while too many are made.
	Make func(ctx context.Context, snapshot, img string, size sandbox.Spec, m *spec.Metadata) (*sandbox.Sandbox, error)
	// Process returns the id of a process with a tag.
	Process func(tag *string) (string, error)
	// Key returns the key of a request, and MayAct whether it may do more than look.
	Key    func(context.Context) tokens.Token
	MayAct func(tokens.Token) bool
	// ErrorOf returns an error as clients see it; Report logs one of the host.
	ErrorOf     func(error) *answers.Error
	Report      func(what, name string, err error)
	Log         *slog.Logger
	EnvdVersion string
}

// Templates are the templates of a host. Its methods may be called at once.
type Templates struct {
	o       Options
	life    context.Context // ends with Close
	end     context.CancelFunc
	all     sync.WaitGroup // builds
	tagging sync.Mutex     // held by who changes the tags of templates

	mu       sync.Mutex // guards what follows
	closed   bool
	building map[string]*build  // by id
	uploads  map[string]*upload // by token
	uploaded int64              // bytes of uploads
	// uploadedOf are those of an owner.
	uploadedOf map[string]int64
}

// New returns the templates of a host. Close ends what builds.
func New(o Options) *Templates {
	t := &Templates{o: o, building: map[string]*build{}, uploads: map[string]*upload{}, uploadedOf: map[string]int64{}}
	t.life, t.end = context.WithCancel(context.Background())
	return t
}

// Close ends all builds, and returns when none runs any more.
func (t *Templates) Close() {
	t.mu.Lock()
	t.closed = true
	t.mu.Unlock()
	t.end()
	t.all.Wait()
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, u := range t.uploads {
		t.drop(u)
	}
}

// Handler answers a request of the control plane. A nil body is no content.
type Handler = func(w http.ResponseWriter, r *http.Request) (status int, body any, err error)

// Routes are those of templates, by the patterns of a ServeMux. UploadPath is served by Put.
func (t *Templates) Routes() map[string]Handler {
	return map[string]Handler{
		"GET /templates":                        t.list,
		"GET /v2/templates":                     t.list,
		"GET /templates/{id}/{part}":            t.part,
		"POST /v3/templates":                    t.request,
		"POST /v2/templates":                    t.request,
		"POST /templates":                       noDockerfiles,
		"POST /templates/{id}":                  noDockerfiles,
		"GET /templates/{id}/files/{hash}":      t.link,
		"POST /v2/templates/{id}/builds/{b}":    t.begin,
		"GET /templates/{id}/builds/{b}/status": t.status,
		"POST /templates/tags":                  t.assign,
		"DELETE /templates/tags":                t.removeTags,
		"DELETE /templates/{id}":                t.remove,
		"PATCH /templates/{id}":                 notPublic,
		"PATCH /v2/templates/{id}":              notPublic,
	}
}

func notPublic(http.ResponseWriter, *http.Request) (int, any, error) {
	return 0, nil, answers.Fail(http.StatusNotImplemented, "a template is its owner's: one for all keys is named on the host with `drowse serve --e2b-template`")
}

func noDockerfiles(http.ResponseWriter, *http.Request) (int, any, error) {
	return 0, nil, answers.Fail(http.StatusNotImplemented, "templates are built of steps: use Template().fromDockerfile of the SDK, or `drowse image build` on the host")
}

// GuestDir is the directory of a guest in whose memory it has what it is told of itself.
const GuestDir = "/run/e2b"

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

// SnapshotTags are the tags of a snapshot that a client takes, by a name or "", of a sandbox of an owner, or "".
func SnapshotTags(owner, name string) []string {
	tags := []string{tagSnapshot}
	if owner != "" {
		tags = append(tags, ownerTag(owner))
	}
	if name != "" {
		tags = append(tags, tagName+name)
	}
	return tags
}

// ValidName reports whether a snapshot may have a name.
func ValidName(name string) bool { return snapshotNameRE.MatchString(name) }

var (
	snapshotRE     = lazyregexp.New(`^[0-9a-f-]{16,64}$`)
	snapshotNameRE = lazyregexp.New(`^[a-z0-9][a-z0-9_-]{0,53}$`)
)

// Snapshots returns the snapshots of this wire that a key of an owner reaches, the newest first.
func (t *Templates) Snapshots(owner string) ([]spec.SnapshotInfo, error) {
	all, err := t.o.Host.State.Snapshots()
	if len(all) == 0 && err != nil {
		return nil, err
	}
	all = slices.DeleteFunc(all, func(i spec.SnapshotInfo) bool {
		return !slices.Contains(i.Tags, tagSnapshot) || owner != "" && !slices.Contains(i.Tags, ownerTag(owner))
	})
	slices.SortFunc(all, func(a, b spec.SnapshotInfo) int {
		return cmp.Compare(answers.Position(a.Created, a.ID), answers.Position(b.Created, b.ID))
	})
	return all, nil
}

// FindSnapshot returns the id of the owner's snapshot that a template's name means, or "".
func (t *Templates) FindSnapshot(owner, template string) (string, error) {
	name, version, tagged := strings.Cut(template, ":")
	if !tagged {
		version = defaultTag
	}
	if !snapshotRE.MatchString(name) && !snapshotNameRE.MatchString(name) || !versionRE.MatchString(version) {
		return "", nil
	}
	all, err := t.Snapshots(owner)
	if err != nil {
		return "", err
	}
	for _, i := range all { // the newest of a name
		is := MarksOf(i)
		// A key without an owner reaches the snapshots of all, and by names its own: owners choose those of theirs.
		named := i.ID == name || is.Template != "" && is.Template == name || is.Name == name && isOf(i, owner)
		if named && (is.Template == "" && version == defaultTag || slices.Contains(is.Versions, version)) {
			return i.ID, nil
		}
	}
	return "", nil
}

// SnapshotPrefix begins the name of a snapshot in Options.Templates.
const SnapshotPrefix = "snapshot:"

// Lookup returns the id of the snapshot that a key of an owner makes sandboxes of by a template's name, or "". The
// host's own templates are everybody's, and no one's own snapshot takes the name of one.
func (t *Templates) Lookup(owner, name string) (string, error) {
	shared, ok := t.o.Names[name]
	if !ok {
		return t.FindSnapshot(owner, name)
	}
	ref, ok := strings.CutPrefix(shared, SnapshotPrefix)
	if !ok {
		return "", nil // an image
	}
	id, err := t.o.Host.State.FindSnapshot(ref)
	if err != nil {
		return "", &answers.Error{Code: http.StatusNotFound, Message: "the template was not found: its snapshot is not on the host", Cause: err}
	}
	return id, nil
}

// Image returns the image of a template.
func (t *Templates) Image(template string) (string, error) {
	name := cmp.Or(t.o.Names[template], template)
	images, err := image.OpenStore(t.o.Host.State.ImageDir())
	if err != nil {
		return "", err
	}
	if _, err := images.Find(name); err != nil {
		if errors.Is(err, image.ErrNotFound) || errors.Is(err, image.ErrAmbiguous) {
			return "", &answers.Error{Code: http.StatusNotFound, Message: "the template was not found: it is neither an image of the host nor a snapshot", Cause: err}
		}
		return "", answers.Fail(http.StatusBadRequest, "the template's name is not that of an image")
	}
	return name, nil
}
