package builder

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/imagetest"
)

// fakeTool replaces the Debian tool by a shell script, and makes the tar stream that the script may copy to $TAR.
// The build then needs no network.
func fakeTool(t *testing.T, script string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("Debian images are built by root only")
	}
	for _, p := range []string{"unshare", "apt-config"} {
		if _, err := exec.LookPath(p); err != nil {
			t.Skipf("this host has no %s", p)
		}
	}
	dir := t.TempDir()
	name := filepath.Join(dir, "root.tar")
	stream := imagetest.TarOf(t, map[string][]byte{
		"./var/lib/dpkg/status": []byte("Package: git\nStatus: install ok installed\nVersion: 1\nArchitecture: amd64\n"),
		"./var/lib/dpkg/arch":   []byte("amd64\n"), "./etc/hostname": []byte("build-host\n"), "./big": make([]byte, 200000),
	}, tar.Header{Name: "./", Typeflag: tar.TypeDir, Mode: 0o755}, tar.Header{Name: "./var/lib/dpkg/status", Mode: 0o644},
		tar.Header{Name: "./var/lib/dpkg/arch", Mode: 0o644}, tar.Header{Name: "./etc/hostname", Mode: 0o755}, tar.Header{Name: "./big"})
	if err := os.WriteFile(name, stream, 0o644); err != nil {
		t.Fatal(err)
	}
	script = "#!/bin/sh\nTAR=" + name + "\nDIR=" + dir + "\n" + script
	if err := os.WriteFile(filepath.Join(dir, "mmdebstrap"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
}

func fakeOptions(s *image.Store) Options {
	return Options{Store: s, From: "debian:bookworm", Include: []string{"git"}, Mirrors: []string{"http://user:secret@m.example/debian"}}
}

func TestDebian_build_completes_what_the_tool_made(t *testing.T) {
	fakeTool(t, `cat >"$DIR/stdin"; echo "$@" >"$DIR/args"; echo "I: running apt-get update..." >&2; cat "$TAR"`)
	s := testStore(t)
	o := fakeOptions(s)
	var mu sync.Mutex
	var stages []string
	o.Progress = func(stage string, _, _ int64) {
		if !mu.TryLock() {
			t.Error("two calls of Progress at once")
			return
		}
		defer mu.Unlock()
		if !slices.Contains(stages, stage) {
			stages = append(stages, stage)
		}
	}
	img, err := Build(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	got, _ := imagetest.DumpImage(t, img.Path())
	text := func(s string) string { return imagetest.HashOf(t, strings.NewReader(s)) }
	for name, want := range map[string]string{
		"etc/hostname": "localhost\n", "etc/resolv.conf": "", "etc/machine-id": "",
		"etc/apt/sources.list": "deb http://m.example/debian bookworm main\n", // without the password
	} {
		if e := got[name]; e.Hash != text(want) || e.Mode != 0o644 {
			t.Errorf("%s: %v, want %q of mode 0644", name, e, want)
		}
	}
	if e := got["tmp"]; e.Mode != os.ModeDir|os.ModeSticky|0o777 {
		t.Errorf("tmp: %v", e)
	}
	if want := (image.Package{Name: "git", Version: "1", Architecture: "amd64"}); len(img.Packages) != 1 || img.Packages[0] != want || img.Architecture != "amd64" {
		t.Errorf("packages %v, architecture %s", img.Packages, img.Architecture)
	}
	if want := "debian-git:latest"; !slices.Equal(img.Tags, []string{want}) || img.Cached {
		t.Errorf("tags %v, cached %v", img.Tags, img.Cached)
	}
	dir := filepath.Dir(imagetest.Must(exec.LookPath("mmdebstrap")))
	if args := string(imagetest.Must(os.ReadFile(filepath.Join(dir, "args")))); strings.Contains(args, "secret") || !strings.Contains(args, "--include=git") {
		t.Errorf("the tool was called with %q", args)
	}
	if in := string(imagetest.Must(os.ReadFile(filepath.Join(dir, "stdin")))); in != "deb http://user:secret@m.example/debian bookworm main\n" {
		t.Errorf("the tool was given the sources %q", in)
	}
	if want := []string{image.StagePrepare, image.StageRead, image.StageWrite, image.StageHash, image.StagePublish}; !slices.Equal(slices.DeleteFunc(stages,
		func(s string) bool { return s == image.StageIndex }), want) {
		t.Errorf("stages %v, want %v", stages, want)
	}
	if left := imagetest.Must(os.ReadDir(filepath.Join(s.Dir(), "tmp"))); len(left) != 0 {
		t.Errorf("left in tmp: %v", left)
	}
}

func TestSame_spec_is_built_once_within_its_age(t *testing.T) {
	fakeTool(t, `cat >/dev/null; echo x >>"$DIR/runs"; date +%N >"$DIR/now"; cat "$TAR"`)
	s, o := testStore(t), Options{}
	dir := filepath.Dir(imagetest.Must(exec.LookPath("mmdebstrap")))
	build := func(want int, cached bool, what string, change func()) *image.Image {
		t.Helper()
		o = fakeOptions(s)
		change()
		img, err := Build(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		if n := bytes.Count(imagetest.Must(os.ReadFile(filepath.Join(dir, "runs"))), []byte("x")); n != want || img.Cached != cached {
			t.Errorf("%s: the tool ran %d times, cached %v; want %d, %v", what, n, img.Cached, want, cached)
		}
		return img
	}
	build(1, false, "first", func() {})
	build(1, true, "again", func() {})
	img := build(1, true, "other tag and order", func() { o.Tag = "mine"; o.Include = []string{"git,git"} })
	if !slices.Contains(img.Tags, "mine:latest") || !slices.Contains(img.Tags, "debian-git:latest") {
		t.Errorf("tags %v, want both", img.Tags)
	}
	build(2, false, "NoCache", func() { o.NoCache = true })
	build(3, false, "too old", func() { o.MaxAge = time.Nanosecond })
	build(4, false, "other packages", func() { o.Include = []string{"git", "vim"} })
	build(5, false, "NoDocs", func() { o.NoDocs = true })
	img = build(5, true, "NoDocs again", func() { o.NoDocs = true })
	if err := os.Truncate(img.Path(), 5000); err != nil {
		t.Fatal(err)
	}
	build(6, false, "damaged", func() { o.NoDocs = true })
}

func TestConcurrent_builds_of_one_spec_run_the_tool_once(t *testing.T) {
	fakeTool(t, `cat >/dev/null; echo x >>"$DIR/runs"; sleep 0.3; cat "$TAR"`)
	s := testStore(t)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if _, err := Build(t.Context(), fakeOptions(s)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if runs := imagetest.Must(os.ReadFile(filepath.Join(filepath.Dir(imagetest.Must(exec.LookPath("mmdebstrap"))), "runs"))); len(runs) != 2 {
		t.Errorf("the tool ran %d times, want once", len(runs)/2)
	}
}

func TestFailing_tool_is_told_with_its_errors(t *testing.T) {
	for name, c := range map[string]struct {
		script string
		want   error
		text   string
	}{
		"unknown package": {`cat >/dev/null; echo "I: something" >&2; echo "E: Unable to locate package gti" >&2
echo "E: setup failed: E: command failed: x" >&2; exit 1`, image.ErrBuildTool, "exit status 1: E: Unable to locate package gti"},
		"fails after a whole stream": {`cat >/dev/null; cat "$TAR"; echo "no marker" >&2; exit 3`, image.ErrBuildTool, "no marker"},
		"cut stream, exit 0":         {`cat >/dev/null; head -c 100000 "$TAR"`, image.ErrBadArchive, ""},
		"no stream, exit 1":          {`exit 1`, image.ErrBuildTool, "said nothing"},
		"garbage for ever":           {`cat >/dev/null; yes`, image.ErrBadArchive, ""},
		"endless stream":             {`cat >/dev/null; head -c 1024 "$TAR"; yes`, image.ErrBadArchive, ""},
	} {
		t.Run(name, func(t *testing.T) {
			fakeTool(t, c.script)
			s := testStore(t)
			_, err := Build(t.Context(), fakeOptions(s))
			if err == nil || (c.want != nil && !errors.Is(err, c.want)) || !strings.Contains(err.Error(), c.text) {
				t.Errorf("got %v, want %v with %q", err, c.want, c.text)
			}
			if err != nil && (strings.Contains(err.Error(), "secret") || strings.Contains(err.Error(), "setup failed")) {
				t.Errorf("the error tells the password, or what only follows from the cause: %v", err)
			}
			wantEmpty(t, s)
		})
	}
}

func TestToo_large_stream_stops_the_tool(t *testing.T) {
	fakeTool(t, `cat >/dev/null; cat "$TAR"; sleep 1000`)
	s := testStore(t)
	o := fakeOptions(s)
	o.MaxBytes = 100000
	if _, err := Build(t.Context(), o); !errors.Is(err, image.ErrTooLarge) {
		t.Errorf("got %v, want ErrTooLarge", err)
	}
	wantEmpty(t, s)
}

func TestMissing_tool_is_one_error_with_the_remedy(t *testing.T) {
	fakeTool(t, "")
	empty := t.TempDir()
	for _, p := range []string{"unshare", "apt-config"} {
		if err := os.Symlink(imagetest.Must(exec.LookPath(p)), filepath.Join(empty, p)); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", empty)
	s := testStore(t)
	_, err := Build(t.Context(), fakeOptions(s))
	if !errors.Is(err, image.ErrToolMissing) || !strings.Contains(err.Error(), "apt-get install") || !strings.Contains(err.Error(), "mmdebstrap") {
		t.Errorf("got %v, want ErrToolMissing with the apt-get line", err)
	}
	wantEmpty(t, s)
}

func TestInstall_deps_installs_the_missing_tool(t *testing.T) {
	fakeTool(t, `cat >/dev/null; cat "$TAR"`)
	tool := imagetest.Must(exec.LookPath("mmdebstrap"))
	bin := t.TempDir()
	for _, p := range []string{"unshare", "apt-config", "sh", "cat", "ln", "touch"} {
		if err := os.Symlink(imagetest.Must(exec.LookPath(p)), filepath.Join(bin, p)); err != nil {
			t.Fatal(err)
		}
	}
	// The first install fails, as with old package lists. After an update it succeeds.
	script := "#!/bin/sh\nif [ \"$1\" = update ]; then touch " + bin + "/updated; exit 0; fi\n" +
		"[ -e " + bin + "/updated ] || { echo 'E: no candidate' >&2; exit 100; }\nln -s " + tool + " " + bin + "/" + "mmdebstrap" + "\n"
	imagetest.Write(t, filepath.Join(bin, "apt-get"), script)
	if err := os.Chmod(filepath.Join(bin, "apt-get"), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", bin)
	s := testStore(t)
	o := fakeOptions(s)
	o.InstallDeps = true
	if _, err := Build(t.Context(), o); err != nil {
		t.Error(err)
	}

	if err := errors.Join(os.Remove(filepath.Join(bin, "mmdebstrap")), os.Remove(filepath.Join(bin, "updated"))); err != nil {
		t.Fatal(err)
	}
	imagetest.Write(t, filepath.Join(bin, "apt-get"), "#!/bin/sh\necho 'E: dpkg was interrupted' >&2; exit 100\n")
	o.NoCache = true
	if _, err := Build(t.Context(), o); !errors.Is(err, image.ErrBuildTool) || !strings.Contains(err.Error(), "dpkg was interrupted") {
		t.Errorf("got %v, want ErrBuildTool with what apt-get said", err)
	}
}

// The tool's descendants leave its process group and session, as apt's do, and keep its output open.
func TestCancelling_kills_all_that_the_tool_started(t *testing.T) {
	fakeTool(t, `cat >/dev/null
setsid sh -c 'trap "" TERM HUP INT; echo started >>"$0/up"; sleep 987654' "$DIR" &
mkdir -p "$TMPDIR/root/etc" "$TMPDIR/mnt"
sh -c 'trap "" TERM; while :; do echo x >>"$TMPDIR/root/etc/growing"; done' 2>/dev/null &
while ! [ -e "$DIR/up" ]; do sleep 0.01; done
mount -t tmpfs none "$TMPDIR/mnt" 2>/dev/null
echo "I: extracting archives..." >&2
wait`)
	s := testStore(t)
	limited, release := context.WithTimeout(t.Context(), time.Minute)
	defer release()
	ctx, cancel := context.WithCancelCause(limited)
	defer cancel(nil)
	o := fakeOptions(s)
	cause := errors.New("changed my mind")
	o.Progress = func(stage string, _, _ int64) {
		if stage == image.StageInstall {
			cancel(cause)
		}
	}
	began := time.Now()
	_, err := Build(ctx, o)
	if !errors.Is(err, cause) {
		t.Errorf("got %v, want %v", err, cause)
	}
	if d := time.Since(began); d > 10*time.Second {
		t.Errorf("cancelling took %v", d)
	}
	wantEmpty(t, s)
	if pids := processesWith(t, "987654"); len(pids) > 0 {
		t.Errorf("processes %v are left", pids)
	}
	if m := string(imagetest.Must(os.ReadFile("/proc/self/mounts"))); strings.Contains(m, s.Dir()) {
		t.Error("a mount is left")
	}
}

// processesWith returns the processes that have the given argument.
func processesWith(t *testing.T, arg string) (pids []int) {
	t.Helper()
	for _, e := range imagetest.Must(os.ReadDir("/proc")) {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		b, err := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
		if err == nil && slices.Contains(strings.Split(string(b), "\x00"), arg) && unix.Kill(pid, 0) == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// The real tool needs the network and a minute: DROWSE_TEST_DEBIAN=bookworm builds that suite with python3 and
// ca-certificates. DROWSE_TEST_DEBIAN_STORE names a store that keeps the image.
func TestReal_Debian_image_equals_what_the_tool_made(t *testing.T) {
	suite := os.Getenv("DROWSE_TEST_DEBIAN")
	if suite == "" {
		t.Skip("set DROWSE_TEST_DEBIAN to a suite, such as bookworm, to build a real image over the network")
	}
	real, err := exec.LookPath("mmdebstrap")
	if err != nil {
		t.Skipf("%s is not installed", "mmdebstrap")
	}
	// Copy the tool's stream on its way.
	fakeTool(t, real+` "$@" | tee "$DIR/copy.tar"`)
	dir := filepath.Dir(imagetest.Must(exec.LookPath("mmdebstrap")))
	s := testStore(t)
	if keep := os.Getenv("DROWSE_TEST_DEBIAN_STORE"); keep != "" {
		s = imagetest.Must(image.OpenStore(keep))
	}
	began, last := time.Now(), ""
	img, err := Build(t.Context(), Options{Store: s, From: "debian:" + suite, Include: []string{"python3,ca-certificates"}, NoCache: true,
		Progress: func(stage string, _, _ int64) {
			if stage != last {
				t.Logf("%6.2f s %s", time.Since(began).Seconds(), stage)
				last = stage
			}
		}})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%6.2f s done: %s, %d bytes, %d inodes, %d packages", time.Since(began).Seconds(), img.ShortID(), img.Size, img.Inodes, len(img.Packages))
	f := imagetest.Must(os.Open(filepath.Join(dir, "copy.tar")))
	defer f.Close()
	want := imagetest.DumpTar(t, f)
	// List by path, and not with the code under test, what the build removes and adds.
	trimmed := []string{"var/lib/apt/lists/", "var/lib/apt/mirrors/", "var/cache/apt/archives/", "var/log/apt/", "tmp/", "var/tmp/"}
	for p := range want {
		below := slices.ContainsFunc(trimmed, func(d string) bool { return strings.HasPrefix(p, d) && p != d })
		if below && !strings.HasSuffix(p, "/partial") || strings.HasSuffix(p, "-old") || strings.HasPrefix(p, "run/") && p != "run/lock" {
			delete(want, p)
		}
	}
	added := []string{"etc/hostname", "etc/resolv.conf", "etc/machine-id", "etc/apt/sources.list"}
	for _, p := range append(added, "var/log/dpkg.log", "var/log/bootstrap.log", "var/log/alternatives.log", "var/cache/ldconfig/aux-cache",
		"etc/apt/apt.conf.d/99mmdebstrap", "etc/dpkg/dpkg.cfg.d/99mmdebstrap") {
		delete(want, p)
	}
	imagetest.CheckImage(t, img.Path(), want, added...)
	t.Logf("compared %d paths", len(want))

	names := slices.Collect(maps.Keys(want))
	pyc := slices.ContainsFunc(names, func(p string) bool {
		return strings.HasPrefix(p, "usr/lib/python3") && strings.Contains(p, "/__pycache__/os.cpython-")
	})
	if !pyc {
		t.Error("the standard library of python3 is not compiled")
	}
	checkHash(t, img)
}
