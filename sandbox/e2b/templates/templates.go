package templates

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/drowse-vm/drowse/internal/lazyregexp"
	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/e2b/answers"
	"github.com/drowse-vm/drowse/sandbox/e2b/bodies"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// A template that a client builds is a snapshot of the sandbox in which its steps ran. A snapshot without tagTemplate
// is one that a client took of a sandbox.
const (
	tagTemplate = "e2b-template=" // id of the template
	tagBuild    = "e2b-build="
	tagVersion  = "e2b-tag=" // E2B's tag of a build: at most one build of a template has it
)

// defaultTag is the tag that a name without one means.
const defaultTag = "default"

var versionRE = lazyregexp.New(`^[A-Za-z0-9][A-Za-z0-9._-]{0,53}$`)

// Bounds of builds and their uploads.
const (
	maxBuilds     = 256 // that are known, of all keys
	maxBuildsOf   = 32  // of them, of one owner
	maxBuilding   = 4   // at once
	maxBuildingOf = 2   // of them, of one owner
	maxSteps      = 1000
	maxVersions   = 8 // tags of a build
	maxTemplate   = 8 // vCPUs
	maxMemoryMiB  = 8 << 10
	maxLogEntries = 4096 // of a build
	maxLogLine    = 4 << 10
	maxUploads    = 256     // that are kept, of all keys
	maxUploadsOf  = 64      // of them, of one owner
	maxUpload     = 1 << 30 // bytes of one
	maxUploaded   = 4 << 30 // bytes of all; an owner's have half of them at most
	buildTime     = time.Hour
	keptTime      = time.Hour // of a build that has ended, and of an upload
)

// Marks are what the tags of a snapshot say.
type Marks struct {
	Template, Build, Name string
	Versions              []string
}

// MarksOf returns the marks of a snapshot.
func MarksOf(i spec.SnapshotInfo) (out Marks) {
	for _, t := range i.Tags {
		for prefix, to := range map[string]*string{tagTemplate: &out.Template, tagBuild: &out.Build, tagName: &out.Name} {
			if v, ok := strings.CutPrefix(t, prefix); ok {
				*to = v
			}
		}
		if v, ok := strings.CutPrefix(t, tagVersion); ok {
			out.Versions = append(out.Versions, v)
		}
	}
	return out
}

// tags are the tags of the snapshot of a build.
func (w Marks) tags(owner string) []string {
	out := []string{tagSnapshot, tagTemplate + w.Template, tagBuild + w.Build, tagName + w.Name}
	if owner != "" {
		out = append(out, ownerTag(owner))
	}
	return append(out, prefixed(tagVersion, w.Versions)...)
}

func prefixed(prefix string, words []string) (out []string) {
	for _, w := range words {
		out = append(out, prefix+w)
	}
	return out
}

// builds are the snapshots of templates by id or name, the newest first.
func (t *Templates) builds(owner, template string) ([]spec.SnapshotInfo, error) {
	all, err := t.Snapshots(owner)
	return slices.DeleteFunc(all, func(i spec.SnapshotInfo) bool {
		w := MarksOf(i)
		return w.Template == "" || template != "" && w.Template != template && w.Name != template
	}), err
}

// move gives tags to one build of a template, and takes them from the others. A build without a tag is removed, once
// nothing comes back from it. The caller holds t.tagging.
func (t *Templates) move(ctx context.Context, owner, template, to string, versions []string) error {
	all, err := t.builds(owner, template)
	if err != nil {
		return err
	}
	without := func(w Marks) []string {
		return slices.DeleteFunc(slices.Clone(w.Versions), func(v string) bool { return slices.Contains(versions, v) })
	}
	for _, i := range all {
		if w := MarksOf(i); w.Build == to && len(without(w))+len(versions) > maxVersions {
			return answers.Fail(http.StatusBadRequest, "a build has at most %d tags", maxVersions)
		}
	}
	// The new one comes first: a name always means a build.
	slices.SortStableFunc(all, func(a, b spec.SnapshotInfo) int {
		return cmp.Compare(order(MarksOf(a).Build == to), order(MarksOf(b).Build == to))
	})
	for _, i := range all {
		w := MarksOf(i)
		had := len(w.Versions)
		w.Versions = without(w)
		if w.Build == to {
			w.Versions = append(w.Versions, versions...)
		} else if had == len(w.Versions) {
			continue
		}
		if len(w.Versions) == 0 {
			if _, err = t.o.Host.State.TagSnapshot(i.ID, nil); err == nil {
				err = t.o.Host.State.RemoveSnapshot(ctx, i.ID)
			}
			if errors.Is(err, spec.ErrSnapshotInUse) {
				err = nil // a sweep removes it later
			}
		} else {
			tags := slices.DeleteFunc(slices.Clone(i.Tags), func(t string) bool { return strings.HasPrefix(t, tagVersion) })
			_, err = t.o.Host.State.TagSnapshot(i.ID, append(tags, prefixed(tagVersion, w.Versions)...))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func order(first bool) int {
	if first {
		return 0
	}
	return 1
}

// isOf reports whether a snapshot is of an owner's sandboxes, or of nobody's if owner is "".
func isOf(i spec.SnapshotInfo, owner string) bool {
	if owner != "" {
		return slices.Contains(i.Tags, ownerTag(owner))
	}
	return !slices.ContainsFunc(i.Tags, func(t string) bool { return strings.HasPrefix(t, tagOwner) })
}

// build is a build of a template, from the request for it until keptTime after its end.
type build struct {
	Marks
	owner string
	size  sandbox.Spec // of its sandboxes: VCPUs and MemoryMiB
	made  time.Time
	runs  bool // guarded by that of Templates

	mu     sync.Mutex // guards what follows
	begun  bool
	status string
	logs   []buildLog
	reason *buildReason
	ended  time.Time
}

// buildLog is a line of a build's log.
type buildLog struct {
	Timestamp time.Time `json:"timestamp"`
	Level     string    `json:"level"`
	Message   string    `json:"message"`
	Step      string    `json:"step,omitempty"`
}

// buildReason says why a build has failed. Step counts from 1; the base is "base", the start command "finalize".
type buildReason struct {
	Message string     `json:"message"`
	Step    string     `json:"step,omitempty"`
	Logs    []buildLog `json:"logEntries"`
}

// Error implements error.
func (r *buildReason) Error() string { return r.Message }

// States of a build.
const (
	buildWaiting = "waiting"
	buildRunning = "building"
	buildReady   = "ready"
	buildError   = "error"
)

func (b *build) say(level, step, format string, args ...any) {
	line := strings.ToValidUTF8(fmt.Sprintf(format, args...), "\uFFFD")
	line = strings.ToValidUTF8(line[:min(len(line), maxLogLine)], "")
	b.mu.Lock()
	defer b.mu.Unlock()
	switch n := len(b.logs); {
	case n == maxLogEntries:
		return
	case n == maxLogEntries-1:
		level, line = "warn", "the log is full: more lines are not kept"
	}
	b.logs = append(b.logs, buildLog{time.Now().UTC(), level, line, step})
}

func (b *build) set(status string, reason *buildReason) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.status, b.reason = status, reason
	if status == buildReady || status == buildError {
		b.ended = time.Now()
	}
}

// old reports whether nobody asks for the build any more.
func (b *build) old(now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return !b.ended.IsZero() && now.Sub(b.ended) > keptTime || !b.begun && now.Sub(b.made) > keptTime
}

// templateRequest asks for a build. Older clients say alias.
type templateRequest struct {
	Name        string   `json:"name"`
	Alias       string   `json:"alias"`
	Tags        []string `json:"tags"`
	CPUs        int      `json:"cpuCount"`
	MemoryMiB   int      `json:"memoryMB"`
	MinFreeDisk int64    `json:"minFreeDiskMb"`
	Team        string   `json:"teamID"` // a key is of one
}

func (t *Templates) request(w http.ResponseWriter, r *http.Request) (int, any, error) {
	var body templateRequest
	if err := answers.Read(w, r, &body); err != nil {
		return 0, nil, err
	}
	name, version, tagged := strings.Cut(strings.ToLower(cmp.Or(body.Name, body.Alias)), ":")
	versions := slices.Clone(body.Tags)
	if tagged {
		versions = append(versions, version)
	}
	if len(versions) == 0 {
		versions = []string{defaultTag}
	}
	slices.Sort(versions)
	versions = slices.Compact(versions)
	disk := cmp.Or(t.o.Size.DiskMiB, spec.DefaultDiskMiB)
	switch {
	case !snapshotNameRE.MatchString(name):
		return 0, nil, answers.Fail(http.StatusBadRequest, "name: use at most 54 letters, digits, hyphens and underscores, and :TAG if need be")
	case len(versions) > maxVersions || slices.ContainsFunc(versions, func(v string) bool { return !versionRE.MatchString(v) }):
		return 0, nil, answers.Fail(http.StatusBadRequest, "tags: use at most %d of 54 letters, digits, hyphens, dots and underscores", maxVersions)
	case body.CPUs < 0 || body.CPUs > maxTemplate:
		return 0, nil, answers.Fail(http.StatusBadRequest, "cpuCount: use 1 to %d", maxTemplate)
	case body.MemoryMiB < 0 || body.MemoryMiB > maxMemoryMiB:
		return 0, nil, answers.Fail(http.StatusBadRequest, "memoryMB: use at most %d", maxMemoryMiB)
	case body.MinFreeDisk > int64(disk):
		return 0, nil, answers.Refused("minFreeDiskMb", fmt.Sprintf("disks of this host have %d MiB", disk))
	}
	if _, shared := t.o.Names[name]; shared {
		return 0, nil, answers.Fail(http.StatusConflict, "the name is that of a template of the host")
	}
	owner := t.o.Key(r.Context()).Owner
	known, err := t.builds(owner, name)
	if err != nil {
		return 0, nil, err
	}
	// A key without an owner reaches those of all, and builds its own.
	known = slices.DeleteFunc(known, func(i spec.SnapshotInfo) bool { return MarksOf(i).Name != name || !isOf(i, owner) })
	b := &build{
		Marks: Marks{Template: answers.NewID(), Build: spec.NewID(), Name: name, Versions: versions}, owner: owner, made: time.Now(), status: buildWaiting,
		size: sandbox.Spec{VCPUs: cmp.Or(body.CPUs, t.o.Size.VCPUs), MemoryMiB: cmp.Or(body.MemoryMiB, t.o.Size.MemoryMiB)},
	}
	if len(known) > 0 {
		b.Template = MarksOf(known[0]).Template
	}
	t.mu.Lock()
	full := t.closed || len(t.building) >= maxBuilds
	of := 0
	for _, other := range t.building {
		if other.owner != owner {
			continue
		}
		of++
		if other.Name == name {
			b.Template = other.Template // whose first build has not ended
		}
	}
	full = full || owner != "" && of >= maxBuildsOf
	if !full {
		t.building[b.Build] = b
	}
	t.mu.Unlock()
	if full {
		return 0, nil, answers.Fail(http.StatusTooManyRequests, "too many builds are known: the server forgets one an hour after its end")
	}
	return http.StatusAccepted, map[string]any{
		"templateID": b.Template, "buildID": b.Build, "public": false, "names": []string{name}, "tags": versions, "aliases": []string{name},
	}, nil
}

// buildOf returns the build of a path, if it is of the key's owner.
func (t *Templates) buildOf(r *http.Request) (*build, error) {
	key := t.o.Key(r.Context())
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.building[r.PathValue("b")]
	if b == nil || b.Template != r.PathValue("id") || key.Owner != "" && b.owner != key.Owner {
		return nil, answers.Fail(http.StatusNotFound, "there is no such build: the server knows one until an hour after its end")
	}
	return b, nil
}

func (t *Templates) begin(w http.ResponseWriter, r *http.Request) (int, any, error) {
	b, err := t.buildOf(r)
	if err != nil {
		return 0, nil, err
	}
	var body buildBody
	if err := answers.Read(w, r, &body); err != nil {
		return 0, nil, err
	}
	if err := body.check(); err != nil {
		return 0, nil, err
	}
	b.mu.Lock()
	begun := b.begun
	b.begun = true
	b.mu.Unlock()
	if begun {
		return 0, nil, answers.Fail(http.StatusConflict, "the build has begun already")
	}
	key := t.o.Key(r.Context())
	t.mu.Lock()
	closed := t.closed
	if !closed {
		t.all.Go(func() { t.runBuild(b, key, body) })
	}
	t.mu.Unlock()
	if closed {
		return 0, nil, answers.Fail(http.StatusServiceUnavailable, "the server ends")
	}
	return http.StatusAccepted, nil, nil
}

// maxStatusLogs bounds the log of one answer.
const maxStatusLogs = 1000

func (t *Templates) status(_ http.ResponseWriter, r *http.Request) (int, any, error) {
	b, err := t.buildOf(r)
	if err != nil {
		return 0, nil, err
	}
	offset, limit := 0, maxStatusLogs
	for k, to := range map[string]*int{"logsOffset": &offset, "limit": &limit} {
		if t := r.URL.Query().Get(k); t != "" {
			if *to, err = strconv.Atoi(t); err != nil || *to < 0 {
				return 0, nil, answers.Fail(http.StatusBadRequest, "%s: use 0 or more", k)
			}
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	entries := b.logs[min(offset, len(b.logs)):]
	entries = append([]buildLog{}, entries[:min(limit, maxStatusLogs, len(entries))]...)
	lines := []string{}
	for _, e := range entries {
		lines = append(lines, e.Message)
	}
	out := map[string]any{"templateID": b.Template, "buildID": b.Build, "status": b.status, "logs": lines, "logEntries": entries}
	if b.reason != nil {
		out["reason"] = b.reason
	}
	return http.StatusOK, out, nil
}

// upload is a tar stream with the files of a step. It has no name on the disk, and is gone with the server.
type upload struct {
	token, template, hash string
	owner                 string // of the template
	made                  time.Time
	file                  *os.File // nil until it has come
	size                  int64
}

// UploadPath begins the paths that files of a build are put to, which no key is sent to: the rest is a secret.
const UploadPath = "/templates/uploads/"

func (t *Templates) uploadOf(template, hash string) *upload {
	for _, u := range t.uploads {
		if u.template == template && u.hash == hash {
			return u
		}
	}
	return nil
}

// link says where to put the files of a step.
func (t *Templates) link(_ http.ResponseWriter, r *http.Request) (int, any, error) {
	template, hash, key := r.PathValue("id"), r.PathValue("hash"), t.o.Key(r.Context())
	if len(hash) > 128 {
		return 0, nil, answers.Fail(http.StatusBadRequest, "the hash is too long")
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	known, owner := false, ""
	for _, b := range t.building {
		if b.Template == template && (key.Owner == "" || b.owner == key.Owner) {
			known, owner = true, b.owner
		}
	}
	if !known {
		return 0, nil, answers.Fail(http.StatusNotFound, "no build of the template was asked for")
	}
	if !t.o.MayAct(key) {
		return 0, nil, answers.Fail(http.StatusForbidden, "the key does not allow it")
	}
	u := t.uploadOf(template, hash)
	if u == nil {
		of := 0
		for _, other := range t.uploads {
			if other.owner == owner {
				of++
			}
		}
		if len(t.uploads) >= maxUploads || owner != "" && of >= maxUploadsOf {
			return 0, nil, answers.Fail(http.StatusTooManyRequests, "too many uploads are kept: the server forgets one after an hour")
		}
		u = &upload{owner: owner, token: strings.ToLower(rand.Text()), template: template, hash: hash}
		t.uploads[u.token] = u
	}
	u.made = time.Now()
	scheme := "http"
	if r.TLS != nil || r.Header.Get("X-Forwarded-Proto") == "https" {
		scheme = "https"
	}
	return http.StatusCreated, map[string]any{"present": u.file != nil, "url": scheme + "://" + r.Host + UploadPath + u.token}, nil
}

// Put takes the files of a step.
func (t *Templates) Put(w http.ResponseWriter, r *http.Request) error {
	token := strings.TrimPrefix(r.URL.Path, UploadPath)
	size := r.ContentLength
	if size < 0 {
		return answers.Fail(http.StatusLengthRequired, "say how long the files are: Content-Length")
	}
	t.mu.Lock()
	u := t.uploads[token]
	room := u != nil && !t.closed && t.uploaded+size <= maxUploaded && (u.owner == "" || t.uploadedOf[u.owner]+size <= maxUploaded/2)
	if room && size <= maxUpload {
		t.count(u.owner, size)
	}
	t.mu.Unlock()
	switch {
	case u == nil:
		return answers.Fail(http.StatusNotFound, "there is no such upload")
	case size > maxUpload:
		return answers.Fail(http.StatusRequestEntityTooLarge, "files of a step: use at most %d bytes", maxUpload)
	case !room:
		return answers.Fail(http.StatusTooManyRequests, "uploads have %d bytes, and half of that for an owner: try again later", maxUploaded)
	}
	f, err := t.keep(w, r, size)
	t.mu.Lock()
	defer t.mu.Unlock()
	if err == nil && (t.closed || t.uploads[token] != u) {
		err = errors.Join(f.Close(), answers.Fail(http.StatusNotFound, "there is no such upload any more"))
	}
	if err != nil {
		t.count(u.owner, -size)
		return err
	}
	t.drop(u)
	u.file, u.size, u.made = f, size, time.Now()
	return nil
}

// drop forgets the bytes of an upload. The caller holds t.mu.
func (t *Templates) drop(u *upload) {
	if u.file != nil {
		_ = u.file.Close()
		t.count(u.owner, -u.size)
		u.file, u.size = nil, 0
	}
}

// count counts bytes of an owner's uploads. The caller holds t.mu.
func (t *Templates) count(owner string, bytes int64) {
	t.uploaded += bytes
	if t.uploadedOf[owner] += bytes; t.uploadedOf[owner] == 0 {
		delete(t.uploadedOf, owner)
	}
}

func (t *Templates) keep(w http.ResponseWriter, r *http.Request, size int64) (*os.File, error) {
	f, err := os.CreateTemp(t.o.Host.State.Dir(), ".e2b-upload-")
	if err != nil {
		return nil, fmt.Errorf("keeping an upload: %w", err)
	}
	err = os.Remove(f.Name())
	if err == nil {
		_, err = io.CopyN(f, bodies.Reader{Reader: r.Body, S: bodies.Stalling{ResponseController: http.NewResponseController(w)}}, size)
	}
	switch {
	case errors.Is(err, syscall.ENOSPC):
		err = answers.Fail(http.StatusInsufficientStorage, "the host has no space for the files")
	case err != nil:
		err = answers.Fail(http.StatusBadRequest, "the upload ended before its end")
	default:
		return f, nil
	}
	return nil, errors.Join(err, f.Close())
}

// Tidy forgets builds and uploads that are old.
func (t *Templates) Tidy(now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for id, b := range t.building {
		if b.old(now) {
			delete(t.building, id)
		}
	}
	for token, u := range t.uploads {
		if now.Sub(u.made) > keptTime {
			t.drop(u)
			delete(t.uploads, token)
		}
	}
}

// tagBody has tags of a template. A tag may be written with the name before it.
type tagBody struct {
	Target string   `json:"target"`
	Name   string   `json:"name"`
	Tags   []string `json:"tags"`
}

func (b *tagBody) versions(name string) ([]string, error) {
	var out []string
	for _, t := range b.Tags {
		t = strings.TrimPrefix(t, name+":")
		if !versionRE.MatchString(t) {
			return nil, answers.Fail(http.StatusBadRequest, "tags: use 54 letters, digits, hyphens, dots and underscores")
		}
		out = append(out, t)
	}
	if len(out) == 0 || len(out) > maxVersions {
		return nil, answers.Fail(http.StatusBadRequest, "tags: use 1 to %d", maxVersions)
	}
	return out, nil
}

// tagged returns the build with a tag.
func (t *Templates) tagged(owner, name string) (Marks, error) {
	id, err := t.FindSnapshot(owner, name)
	if err != nil {
		return Marks{}, err
	}
	all, err := t.builds(owner, "")
	for _, i := range all {
		if i.ID == id {
			return MarksOf(i), nil
		}
	}
	return Marks{}, cmp.Or[error](err, answers.Fail(http.StatusNotFound, "the template was not found"))
}

func (t *Templates) assign(w http.ResponseWriter, r *http.Request) (int, any, error) {
	var body tagBody
	if err := answers.Read(w, r, &body); err != nil {
		return 0, nil, err
	}
	owner := t.o.Key(r.Context()).Owner
	t.tagging.Lock()
	defer t.tagging.Unlock()
	is, err := t.tagged(owner, body.Target)
	if err != nil {
		return 0, nil, err
	}
	versions, err := body.versions(is.Name)
	if err != nil {
		return 0, nil, err
	}
	if err := t.move(r.Context(), owner, is.Template, is.Build, versions); err != nil {
		return 0, nil, err
	}
	return http.StatusCreated, map[string]any{"buildID": is.Build, "tags": body.Tags}, nil
}

func (t *Templates) removeTags(w http.ResponseWriter, r *http.Request) (int, any, error) {
	var body tagBody
	if err := answers.Read(w, r, &body); err != nil {
		return 0, nil, err
	}
	owner := t.o.Key(r.Context()).Owner
	name, _, _ := strings.Cut(body.Name, ":")
	versions, err := body.versions(name)
	if err != nil {
		return 0, nil, err
	}
	t.tagging.Lock()
	defer t.tagging.Unlock()
	var is Marks
	for _, v := range versions {
		if is, err = t.tagged(owner, name+":"+v); err != nil {
			return 0, nil, err
		}
	}
	return http.StatusNoContent, nil, t.move(r.Context(), owner, is.Template, "", versions)
}

func (t *Templates) templateTags(_ http.ResponseWriter, r *http.Request) (int, any, error) {
	all, err := t.builds(t.o.Key(r.Context()).Owner, r.PathValue("id"))
	if err != nil {
		return 0, nil, err
	}
	out := []map[string]any{}
	for _, i := range all {
		w := MarksOf(i)
		for _, v := range w.Versions {
			out = append(out, map[string]any{"tag": v, "buildID": w.Build, "createdAt": i.Created})
		}
	}
	if len(out) == 0 {
		return 0, nil, answers.Fail(http.StatusNotFound, "the template was not found")
	}
	return http.StatusOK, out, nil
}

// remove removes a template with all its builds, or a snapshot. Images are the host's.
func (t *Templates) remove(_ http.ResponseWriter, r *http.Request) (int, any, error) {
	owner := t.o.Key(r.Context()).Owner
	t.tagging.Lock()
	defer t.tagging.Unlock()
	all, err := t.builds(owner, r.PathValue("id"))
	if err != nil {
		return 0, nil, err
	}
	var ids []string
	for _, i := range all {
		ids = append(ids, i.ID)
	}
	if len(ids) == 0 {
		id, err := t.FindSnapshot(owner, r.PathValue("id"))
		if err != nil {
			return 0, nil, err
		}
		if id == "" {
			return 0, nil, answers.Fail(http.StatusNotFound, "there is no such snapshot")
		}
		ids = append(ids, id)
	}
	for _, id := range ids {
		if err := t.o.Host.State.RemoveSnapshot(r.Context(), id); err != nil {
			return 0, nil, err
		}
	}
	return http.StatusNoContent, nil, nil
}

// templateBody is a template as clients see it.
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
	Status  string    `json:"status"`
	Created time.Time `json:"createdAt"`
	Updated time.Time `json:"updatedAt"`
	// Clients insist on what follows, which is not counted here.
	Builds  int     `json:"buildCount"`
	Spawns  int     `json:"spawnCount"`
	Spawned *string `json:"lastSpawnedAt"`
	Creator *string `json:"createdBy"`
}

// list returns the templates that were built, and the images of the host.
func (t *Templates) list(w http.ResponseWriter, r *http.Request) (int, any, error) {
	built, err := t.builds(t.o.Key(r.Context()).Owner, "")
	if err != nil {
		return 0, nil, err
	}
	out := []templateBody{}
	there := map[string]int{} // builds
	disk := cmp.Or(t.o.Size.DiskMiB, spec.DefaultDiskMiB)
	for _, i := range built {
		if is := MarksOf(i); there[is.Template] > 0 {
			there[is.Template]++
		} else {
			there[is.Template] = 1
			b := templateBody{
				ID: is.Template, BuildID: is.Build, Aliases: []string{is.Name}, Names: []string{is.Name}, Memory: int(i.RAM >> 20), Disk: disk,
				Envd: t.o.EnvdVersion, Status: buildReady, Created: i.Created, Updated: i.Created,
			}
			if m, err := t.o.Host.State.Manifest(i.ID); err == nil {
				b.CPUs = m.VCPUs
			}
			out = append(out, b)
		}
	}
	for i := range out {
		out[i].Builds = there[out[i].ID]
	}
	images, err := image.OpenStore(t.o.Host.State.ImageDir())
	if err != nil {
		return 0, nil, err
	}
	all, err := images.List()
	if len(all) == 0 && err != nil {
		return 0, nil, err
	}
	for _, i := range all {
		for _, tag := range i.Tags {
			names := []string{tag}
			for alias, of := range t.o.Names {
				if of == tag {
					names = append(names, alias)
				}
			}
			slices.Sort(names[1:])
			out = append(out, templateBody{
				ID: tag, BuildID: i.ID, Public: true, Aliases: names, Names: names, CPUs: t.o.Size.VCPUs, Memory: t.o.Size.MemoryMiB,
				Disk: disk, Envd: t.o.EnvdVersion, Status: buildReady, Created: i.Created, Updated: i.Created, Builds: 1,
			})
		}
	}
	if !strings.HasPrefix(r.URL.Path, "/v2/") {
		return http.StatusOK, out, nil
	}
	at := func(t templateBody) string { return answers.Position(t.Created, t.ID) }
	slices.SortFunc(out, func(a, b templateBody) int { return cmp.Compare(at(a), at(b)) })
	rows, err := answers.Page(w, r.URL.Query(), out, at)
	return http.StatusOK, rows, err
}

// part serves two routes that a ServeMux does not tell apart: /templates/aliases/NAME and /templates/ID/tags.
func (t *Templates) part(w http.ResponseWriter, r *http.Request) (int, any, error) {
	switch id, part := r.PathValue("id"), r.PathValue("part"); {
	case id == "aliases":
		return t.alias(r, part)
	case part == "tags":
		return t.templateTags(w, r)
	}
	return 0, nil, answers.Fail(http.StatusNotFound, "there is no such route")
}

// alias says whether there is a template of a name.
func (t *Templates) alias(r *http.Request, name string) (int, any, error) {
	owner := t.o.Key(r.Context()).Owner
	id, err := t.Lookup(owner, name)
	if err != nil {
		return 0, nil, err
	}
	if id == "" {
		if _, err := t.Image(name); err != nil {
			return 0, nil, err
		}
		return http.StatusOK, map[string]any{"templateID": name, "public": true}, nil
	}
	if is, err := t.tagged(owner, name); err == nil {
		return http.StatusOK, map[string]any{"templateID": is.Template, "public": false}, nil
	}
	return http.StatusOK, map[string]any{"templateID": name, "public": true}, nil
}

// mayPull reports whether a key may have the host fetch an image.
func mayPull(key tokens.Token) bool { return key.Scopes.Has(tokens.ScopeAdmin) }
