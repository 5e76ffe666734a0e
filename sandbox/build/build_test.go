package build_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/oci"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/build"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// ownImages gives a test's store its own image directory, with links to the images that all tests share.
func ownImages(t *testing.T, e *guesttest.Env) *image.Store {
	t.Helper()
	dir := filepath.Join(e.Store.State.Dir(), "images")
	shared, err := os.Readlink(dir)
	if err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(shared)
	if err := errors.Join(err, os.Remove(dir), os.Mkdir(dir, 0o755)); err != nil {
		t.Fatal(err)
	}
	for _, i := range entries {
		if err := os.Symlink(filepath.Join(shared, i.Name()), filepath.Join(dir, i.Name())); err != nil {
			t.Fatal(err)
		}
	}
	s, err := image.OpenStore(e.Store.State.ImageDir())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// nothingLeft fails the test if a build has left a VM, files, or another number of images than want.
func nothingLeft(t *testing.T, e *guesttest.Env, images *image.Store, want int) {
	t.Helper()
	if vms, err := e.Store.State.List(); err != nil || len(vms) != 0 {
		t.Errorf("there are VMs: %v (%v)", vms, err)
	}
	if list, err := images.List(); err != nil || len(list) != want {
		t.Errorf("there are %d images, want %d (%v)", len(list), want, err)
	}
	for _, dir := range []string{"builds", "tmp"} {
		if entries, err := os.ReadDir(filepath.Join(e.Store.State.Dir(), dir)); err != nil || len(entries) != 0 {
			t.Errorf("in %s there is %v (%v)", dir, entries, err)
		}
	}
}

// endsAt cancels a context once a text was written to it.
type endsAt struct {
	text   string
	cancel context.CancelFunc
	mu     sync.Mutex
	strings.Builder
}

func (w *endsAt) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.Builder.Write(p)
	if strings.Contains(w.String(), w.text) {
		w.cancel()
	}
	return len(p), nil
}

// An interrupted build and a failing one boot one VM each. A build with all steps cached boots none.
func TestBuild_of_steps(t *testing.T) {
	guesttest.Long(t)
	t.Parallel()
	e := guesttest.New(t)
	images := ownImages(t, e)
	list, err := images.List()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "hello"), []byte("from the context\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	const begin = "ARG WHO\nFROM " + guesttest.ImageTag + `
ARG WHO
ENV GREETING="hello $WHO"
WORKDIR /srv/app
RUN echo "$GREETING by $(id -un) in $PWD" > said; ln said also; rm /etc/debian_version; touch /run/kept; (sleep 1000 &)
`
	opts := func(steps string) build.Options {
		vm := sandbox.Spec{MemoryMiB: 256, DiskMiB: 256}
		return build.Options{File: begin + steps, Context: dir, Tag: "built", Args: map[string]string{"WHO": "guest"}, VM: vm}
	}
	e.Template(opts("").VM)

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	o := opts("RUN echo begun; sleep 1000")
	said := &endsAt{text: "begun", cancel: cancel}
	o.Stdout = said
	res, err := build.Image(ctx, e.Store.With(e.Launcher), o)
	if !errors.Is(err, context.Canceled) || res.Boots != 1 || len(res.Steps) != 2 {
		t.Fatalf("interrupted: %+v, %v", res, err)
	}
	nothingLeft(t, e, images, len(list))

	// The files of the first command are cached. Everything else that it left is gone.
	const second = "RUN test ! -e /run/kept && test ! -e /etc/debian_version && test said -ef also && rm also && mkdir -m 700 made && chown nobody made\n"
	var stderr bytes.Buffer
	o = opts(second + "USER nobody\nRUN echo wrong >&2; id -un >&2; exit 7")
	o.Stderr = &stderr
	res, err = build.Image(t.Context(), e.Store.With(e.Launcher), o)
	var failed *build.StepError
	if !errors.As(err, &failed) || failed.Status.Code != 7 || failed.Line != 9 || stderr.String() != "wrong\nnobody\n" {
		t.Fatalf("failing: %+v, %v, it said %q", res, err, stderr.String())
	}
	if res.Boots != 1 || len(res.Steps) != 3 || !res.Steps[1].Cached || res.Steps[2].Cached {
		t.Errorf("failing: %+v", res)
	}
	nothingLeft(t, e, images, len(list))

	res, err = build.Image(t.Context(), e.Store.With(e.Launcher), opts(second+"COPY --chown=nobody hello .\nCMD [\"/srv/app/x\"]"))
	if err != nil {
		t.Fatal(err)
	}
	if res.Boots != 0 || len(res.Steps) != 4 || !res.Steps[2].Cached || res.Steps[3].Cached {
		t.Errorf("with everything known: %+v", res)
	}
	nothingLeft(t, e, images, len(list)+1)
	again, err := build.Image(t.Context(), e.Store.With(e.Launcher), opts(second+"COPY --chown=nobody hello .\nCMD [\"/srv/app/x\"]"))
	if err != nil || again.Image.ID != res.Image.ID || !again.Image.Cached {
		t.Errorf("the same again: %+v (%v)", again, err)
	}
	img := res.Image
	if img.Workdir != "/srv/app" || len(img.Cmd) != 1 || len(img.Env) != 1 || img.Env[0] != "GREETING=hello guest" || img.Base == "" {
		t.Errorf("the image says %+v", img.RunConfig)
	}
	files := filesOf(t, images, img)
	for name, want := range map[string]string{
		"srv/app/said": "hello guest by root in /srv/app\n", "srv/app/hello": "from the context\n", "srv/app/made/": "",
		"srv/app/also": "-", "etc/debian_version": "-", "run/kept": "-", "etc/resolv.conf": "",
	} {
		f, ok := files[name]
		if ok != (want != "-") || ok && f.text != want {
			t.Errorf("%s is %+v (there: %v), want %q", name, f, ok, want)
		}
	}
	if f := files["srv/app/made/"]; f.Mode != 0o700 || f.Uid != 65534 {
		t.Errorf("the directory is %o %d", f.Mode, f.Uid)
	}
	if f := files["srv/app/hello"]; f.Uid != 65534 {
		t.Errorf("what was copied belongs to %d", f.Uid)
	}
}

type fileOf struct {
	*tar.Header
	text string
}

func filesOf(t *testing.T, images *image.Store, img *image.Image) map[string]fileOf {
	t.Helper()
	r, w := io.Pipe()
	go func() { w.CloseWithError(oci.Export(t.Context(), images, img, oci.FormatTar, w, nil)) }()
	out := map[string]fileOf{}
	for tr := tar.NewReader(r); ; {
		h, err := tr.Next()
		if err == io.EOF {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		var text []byte
		if h.Size < 1000 {
			if text, err = io.ReadAll(tr); err != nil {
				t.Fatal(err)
			}
		}
		out[h.Name] = fileOf{h, string(text)}
	}
}

// Errors in a build are found before a VM boots.
func TestBuild_that_cannot_be_is_refused_before_it_begins(t *testing.T) {
	s, err := sandbox.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		o    build.Options
		want string
	}{
		"no tag":              {build.Options{File: "FROM scratch"}, "is not a tag"},
		"bad file":            {build.Options{File: "FROM scratch\nVOLUME /x", Tag: "t"}, "line 2: VOLUME"},
		"base that is none":   {build.Options{File: "FROM python:3", Tag: "t"}, "docker://python:3"},
		"argument of nothing": {build.Options{File: "FROM scratch", Tag: "t", Args: map[string]string{"X": "1"}}, `argument "X"`},
		"no context":          {build.Options{File: "FROM scratch\nCOPY a b", Tag: "t"}, "--context"},
		"bad VM":              {build.Options{File: "FROM scratch", Tag: "t", VM: sandbox.Spec{VCPUs: 99}}, "invalid VM"},
		"volumes":             {build.Options{File: "FROM scratch", Tag: "t", VM: sandbox.Spec{Volumes: []spec.VolumeMount{{}}}}, "no volumes"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := build.Image(t.Context(), s, c.o); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, it should say %q", err, c.want)
			}
		})
	}
	// A build without commands needs no VM.
	res, err := build.Image(t.Context(), s, build.Options{File: "FROM scratch\nCOPY <<E /etc/motd\nhi\nE\n", Tag: "t"})
	if err != nil || res.Boots != 0 || res.Image.Source != "steps:scratch" {
		t.Errorf("%+v (%v)", res, err)
	}
}

// A sweep removes the VM of a killed build, but not that of a running one.
func TestSweep_builds_leaves_those_under_way(t *testing.T) {
	s, err := sandbox.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := build.Sweep(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(s.State.Dir(), "builds")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"build-dead", "other"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	held := build.Hold(t, s)
	if err := build.Sweep(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 2 || entries[0].Name() != held || entries[1].Name() != "other" {
		t.Errorf("left are %v (%v), under way is %s", entries, err, held)
	}
}
