package kernel

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// fakePrograms are short versions of the programs that Build and Fetch run. They do what their caller needs, count
// how often they were run, and obey the files in the folder $T.
var fakePrograms = map[string]string{
	"gcc":   `case "$1" in --version) cat "$T/gcc-version";; *) grep -q "$(cat "$T/no-header" 2>/dev/null || echo none)" && exit 1; exit 0;; esac`,
	"ld":    `echo "ld 1"`,
	"tar":   `echo tar >>"$T/ran"; while [ "$1" != -C ]; do shift; done; mkdir -p "$2"; touch -d 2020-01-02 "$2/Kbuild"`,
	"patch": `cat >>"$T/patched"; [ ! -e "$T/patch-fails" ] || { echo "1 out of 1 hunk FAILED"; exit 1; }`,
	"strip": `cp "$4" "$3"`,
	"make": `for target; do :; done
echo "make $*" >>"$T/ran"; env >>"$T/env"
case "$target" in
tinyconfig) echo "CONFIG_TINY=y" >.config;;
olddefconfig) [ ! -e "$T/lose" ] || { grep -v "$(cat "$T/lose")" .config >new; mv new .config; };;
kernelrelease) echo 6.1.0-test;;
vmlinux) echo "  CC      a.o"; echo "noise"; echo "  CC      b.o"
  if [ -e "$T/hang" ]; then touch "$T/hanging"; sleep 60; fi
  [ ! -e "$T/make-fails" ] || { echo "a.c:1: error: something"; exit 2; }
  echo image >vmlinux; echo "ffffffff81000000 T startup_64" >System.map;;
esac`,
	"flex": "", "bison": "", "bc": "", "perl": "", "xz": "",
	"apt-cache": `for name; do :; done; cat "$T/apt/$name" 2>/dev/null || { echo "E: No packages found" >&2; exit 100; }`,
	"apt-get": `echo "apt-get $*" >>"$T/ran"
for last; do :; done
case "$*" in
*download*) [ ! -e "$T/stale" ] || { echo "E: 404" >&2; exit 100; }; cp "$T/deb" "${last%%=*}.deb";;
*update*) rm -f "$T/stale"; [ ! -d "$T/new-index" ] || cp "$T"/new-index/* "$T/apt/";;
*install*) for p in $(cat "$T/installable" 2>/dev/null); do cp "$T/spare/$p" "$T/bin/$p"; done;;
esac`,
	"dpkg-query": `exit 1`,
	// --compare-versions A lt B
	"dpkg":     `[ "$2" != "$4" ] && [ "$(printf '%s\n' "$2" "$4" | sort -V | head -n 1)" = "$2" ]`,
	"dpkg-deb": `mkdir -p "$3" && cp -r "$T/package/." "$3"`,
}

// fake replaces all programs by the fake ones and returns the folder $T.
func fake(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	files := map[string]string{"gcc-version": "gcc 1\nmore\n", "source.tar.xz": "source"}
	for name, text := range fakePrograms {
		files["bin/"+name] = "#!/bin/sh\nT='" + dir + "'\nPATH=/usr/bin:/bin\n" + text + "\n"
	}
	writeTree(t, dir, files)
	for name := range fakePrograms {
		if err := os.Chmod(filepath.Join(dir, "bin", name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", filepath.Join(dir, "bin"))
	return dir
}

func testOptions(dir string) BuildOptions {
	return BuildOptions{CacheDir: filepath.Join(dir, "cache"), Jobs: 3, SourceTarball: filepath.Join(dir, "source.tar.xz")}
}

func count(t *testing.T, dir, what string) int {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(dir, "ran"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	return strings.Count(string(data), what)
}

// noRemains fails the test if the cache holds anything unfinished.
func noRemains(t *testing.T, cache string) {
	t.Helper()
	for _, pattern := range []string{"kernels/.*", "work/*", "work/.*", "downloads/.*"} {
		if left, _ := filepath.Glob(filepath.Join(cache, pattern)); len(left) != 0 {
			t.Errorf("left behind: %q", left)
		}
	}
}

func TestBuild_with_own_options_is_another_kernel(t *testing.T) {
	dir := fake(t)
	opts := testOptions(dir)
	usual, err := Build(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	opts.Config = "CONFIG_VXLAN=y\n"
	own, err := Build(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	if own.ID == usual.ID || !own.Own() || usual.Own() {
		t.Errorf("%s and %s: own options %v and %v", own.ID, usual.ID, own.Own(), usual.Own())
	}
	if data, err := os.ReadFile(own.Config); err != nil || !strings.Contains(string(data), "CONFIG_VXLAN=y") || !strings.Contains(string(data), "CONFIG_VIRTIO_BLK=y") {
		t.Errorf("its configuration lacks options of both: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "lose"), []byte("CONFIG_NO_SUCH"), 0o644); err != nil {
		t.Fatal(err)
	}
	opts.Config = "CONFIG_NO_SUCH=y\n"
	if _, err := Build(t.Context(), opts); err == nil || !strings.Contains(err.Error(), "CONFIG_NO_SUCH is n, not y") {
		t.Errorf("an option that the kernel does not have: %v", err)
	}
	opts.Config = "CONFIG_MODULES=y\n"
	if _, err := Build(t.Context(), opts); !errors.Is(err, ErrUnsupported) {
		t.Errorf("modules: %v", err)
	}
}

func TestBuild_publishes_kernel_and_second_call_takes_it_from_cache(t *testing.T) {
	dir := fake(t)
	opts := testOptions(dir)
	var stages []string
	var log bytes.Buffer
	opts.Log = &log
	opts.Progress = func(stage string, done, total int64) {
		stages = append(stages, fmt.Sprint(stage, " ", done, "/", total))
	}
	k, err := Build(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	if k.Kind != Built || k.Version != "6.1.0-test" || k.ID != "built-6.1.0-test-"+k.InputsHash[:idHashLength] || k.Arch != "amd64" {
		t.Errorf("got %+v", k)
	}
	if data, err := os.ReadFile(k.Image); err != nil || string(data) != "image\n" {
		t.Errorf("image holds %q, %v", data, err)
	}
	if data, err := os.ReadFile(k.Config); err != nil || !strings.Contains(string(data), "CONFIG_TINY=y") ||
		!strings.Contains(string(data), "CONFIG_VIRTIO_BLK=y") {
		t.Errorf("config lacks options of both: %v", err)
	}
	ps, err := patches()
	if err != nil {
		t.Fatal(err)
	}
	want := "check 0/0,unpack 0/0,"
	for i := range ps {
		want += fmt.Sprintf("patch %d/%d,", i, len(ps))
	}
	want += "configure 0/0," +
		"compile 0/1840,compile 1/1840,compile 2/1840,compile 2/2,publish 0/0"
	if got := strings.Join(stages, ","); got != want {
		t.Errorf("stages\n%s, want\n%s", got, want)
	}
	if !strings.Contains(log.String(), "noise") {
		t.Errorf("log holds %q", log.String())
	}
	patched, _ := os.ReadFile(filepath.Join(dir, "patched"))
	var all string
	for _, p := range ps {
		all += p.text
	}
	if string(patched) != all {
		t.Error("patch has not got all patches in order")
	}
	noRemains(t, opts.CacheDir)

	again, err := Build(t.Context(), opts)
	if err != nil || again.ID != k.ID || count(t, dir, "vmlinux") != 1 {
		t.Errorf("second call: %v, %v, compiled %d times", again, err, count(t, dir, "vmlinux"))
	}
}

func TestBuild_is_made_anew_for_other_inputs_only(t *testing.T) {
	dir := fake(t)
	opts := testOptions(dir)
	build := func() *Kernel {
		t.Helper()
		k, err := Build(t.Context(), opts)
		if err != nil {
			t.Fatal(err)
		}
		return k
	}
	first := build()
	opts.Jobs = 1
	if k := build(); k.ID != first.ID {
		t.Error("the number of jobs made another kernel")
	}
	writeTree(t, dir, map[string]string{"gcc-version": "gcc 2\n"})
	if k := build(); k.ID != first.ID {
		t.Error("another compiler made another kernel unasked")
	}
	opts.Update = true
	second := build()
	if second.ID == first.ID {
		t.Error("another compiler made the same kernel")
	}
	writeTree(t, dir, map[string]string{"source.tar.xz": "other source"})
	if k := build(); k.ID == second.ID {
		t.Error("another source made the same kernel")
	}
	if n := count(t, dir, " vmlinux"); n != 3 {
		t.Errorf("compiled %d times, want 3", n)
	}
}

func TestInputs_hold_source_configuration_and_patches(t *testing.T) {
	opts := testOptions(fake(t))
	seen := map[string]string{}
	for _, c := range []struct {
		name   string
		change func(b *builder, src *source)
	}{
		{"nothing changed", func(*builder, *source) {}},
		{"other source", func(_ *builder, src *source) { src.identity = "other" }},
		{"other configuration", func(b *builder, _ *source) { b.config += "CONFIG_MORE=y\n" }},
		{"other patch", func(b *builder, _ *source) { b.patches[0].text += "\n" }},
		{"patch less", func(b *builder, _ *source) { b.patches = b.patches[1:] }},
		{"other name and place of a patch", func(b *builder, _ *source) { b.patches[0].name = "9999.patch" }},
	} {
		b, err := newBuilder(opts)
		if err != nil {
			t.Fatal(err)
		}
		src := source{identity: "source"}
		c.change(b, &src)
		in, err := b.inputs(t.Context(), src)
		if err != nil {
			t.Fatal(err)
		}
		hash := hashInputs(in)
		if other, ok := seen[hash]; ok {
			t.Errorf("%s: same hash as with %s", c.name, other)
		}
		seen[hash] = c.name
	}
}

func TestBuilds_at_once_compile_once(t *testing.T) {
	dir := fake(t)
	var wg sync.WaitGroup
	ids := make([]string, 4)
	for i := range ids {
		wg.Go(func() {
			if k, err := Build(t.Context(), testOptions(dir)); err != nil {
				t.Error(err)
			} else {
				ids[i] = k.ID
			}
		})
	}
	wg.Wait()
	for _, id := range ids {
		if id != ids[0] {
			t.Errorf("different kernels: %q", ids)
		}
	}
	if n := count(t, dir, " vmlinux"); n != 1 {
		t.Errorf("compiled %d times", n)
	}
}

func TestBuild_does_not_pass_on_variables_that_change_the_result(t *testing.T) {
	dir := fake(t)
	for _, name := range []string{"MAKEFLAGS", "ARCH", "CC", "KCFLAGS", "CROSS_COMPILE", "LANG"} {
		t.Setenv(name, "harmful")
	}
	if _, err := Build(t.Context(), testOptions(dir)); err != nil {
		t.Fatal(err)
	}
	env, err := os.ReadFile(filepath.Join(dir, "env"))
	if err != nil || strings.Contains(string(env), "harmful") || !strings.Contains(string(env), "LC_ALL=C") {
		t.Errorf("make was run with\n%s", env)
	}
	if count(t, dir, "KBUILD_BUILD_TIMESTAMP=Thu Jan  2 ") == 0 {
		t.Error("the time of the source is not that of the build")
	}
}

func TestCancelled_build_stops_compiler_leaves_nothing_and_next_one_succeeds(t *testing.T) {
	dir := fake(t)
	opts := testOptions(dir)
	writeTree(t, dir, map[string]string{"hang": ""})
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		defer cancel()
		for range 1000 {
			if _, err := os.Stat(filepath.Join(dir, "hanging")); err == nil {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
	}()
	start := time.Now()
	_, err := Build(ctx, opts)
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v", err)
	}
	if d := time.Since(start); d > 20*time.Second {
		t.Errorf("took %v: the compiler was waited for", d)
	}
	noRemains(t, opts.CacheDir)
	if all, err := List(opts.CacheDir); err != nil || len(all) != 0 {
		t.Errorf("list gives %v, %v", all, err)
	}
	if err := os.Remove(filepath.Join(dir, "hang")); err != nil {
		t.Fatal(err)
	}
	if _, err := Build(t.Context(), opts); err != nil {
		t.Errorf("next build: %v", err)
	}
}

func TestBuild_after_crash_ignores_and_replaces_its_remains(t *testing.T) {
	dir := fake(t)
	opts := testOptions(dir)
	k, err := Build(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	// A loss of power may leave this: a half-built tree, half of what was to be published, and a damaged result.
	writeTree(t, opts.CacheDir, map[string]string{
		"work/.tmp-build-" + k.InputsHash[:idHashLength] + "/linux/old.o": "x",
		"kernels/.tmp-" + k.ID + "/vmlinux":                               "half",
		"work/.tmp-build-0123456789ab/linux/old.o":                        "of other inputs",
		"kernels/.tmp-debian-6.1.0-0123456789ab/boot/vmlinuz":             "of a fetch",
	})
	if err := os.Truncate(k.Image, 1); err != nil {
		t.Fatal(err)
	}
	if all, err := List(opts.CacheDir); err != nil || len(all) != 0 {
		t.Fatalf("list gives %v, %v", all, err)
	}
	again, err := Build(t.Context(), opts)
	if err != nil || again.ID != k.ID {
		t.Fatalf("got %v, %v", again, err)
	}
	if err := again.Verify(t.Context()); err != nil {
		t.Error(err)
	}
	noRemains(t, opts.CacheDir)
}

func TestBuild_failure_tells_step_output_and_log(t *testing.T) {
	for _, c := range []struct {
		file, content string
		want          []string
	}{
		{"patch-fails", "", []string{"0001-", "hunk FAILED"}},
		{"make-fails", "", []string{"compiling the kernel", "a.c:1: error: something", "exit status 2"}},
		{"lose", "CONFIG_VIRTIO_BLK=", []string{"CONFIG_VIRTIO_BLK is n, not y"}},
	} {
		dir := fake(t)
		opts := testOptions(dir)
		writeTree(t, dir, map[string]string{c.file: c.content})
		_, err := Build(t.Context(), opts)
		if err == nil {
			t.Errorf("%s: no error", c.file)
			continue
		}
		for _, want := range c.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %q is not in\n%v", c.file, want, err)
			}
		}
		var ce *CommandError
		if errors.As(err, &ce) {
			if log, err := os.ReadFile(ce.LogPath); err != nil || len(log) == 0 {
				t.Errorf("%s: log %s holds %q, %v", c.file, ce.LogPath, log, err)
			}
		} else if c.file != "lose" {
			t.Errorf("%s: %T is no CommandError", c.file, err)
		}
		noRemains(t, opts.CacheDir)
	}
}

func TestMissing_build_dependencies_are_named_in_one_error(t *testing.T) {
	dir := fake(t)
	for _, p := range []string{"bison", "bc"} {
		if err := os.Remove(filepath.Join(dir, "bin", p)); err != nil {
			t.Fatal(err)
		}
	}
	writeTree(t, dir, map[string]string{"no-header": "gelf.h"})
	_, err := Build(t.Context(), testOptions(dir))
	if !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), "apt-get install --no-install-recommends bc bison libelf-dev)") {
		t.Errorf("got %v", err)
	}
	if count(t, dir, "apt-get") != 0 {
		t.Error("apt-get was run unasked")
	}
}

func TestInstall_deps_installs_what_is_missing(t *testing.T) {
	dir := fake(t)
	if err := os.Mkdir(filepath.Join(dir, "spare"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(filepath.Join(dir, "bin/bison"), filepath.Join(dir, "spare/bison")); err != nil {
		t.Fatal(err)
	}
	opts := testOptions(dir)
	opts.InstallDeps = true
	if _, err := Build(t.Context(), opts); !errors.Is(err, ErrUnsupported) {
		t.Fatalf("install that does nothing: %v", err)
	}
	writeTree(t, dir, map[string]string{"installable": "bison"})
	if _, err := Build(t.Context(), opts); err != nil {
		t.Fatal(err)
	}
	if count(t, dir, "apt-get -q -y --no-install-recommends install bison") == 0 {
		t.Error("bison was not installed")
	}
}

func TestHash_inputs_depends_on_every_name_and_value(t *testing.T) {
	seen := map[string]int{}
	for i, m := range []map[string]string{
		nil, {"a": "b"}, {"a": "c"}, {"b": "b"}, {"a": "b", "c": ""}, {"a": "b\nc="}, {"a=b": ""}, {"a": "=b"}, {"": "a=b"},
	} {
		h := hashInputs(m)
		if j, ok := seen[h]; ok {
			t.Errorf("maps %d and %d have one hash", i, j)
		}
		seen[h] = i
		if h != hashInputs(m) {
			t.Errorf("map %d has two hashes", i)
		}
	}
}

// TestRealBuild really builds the kernel. It takes minutes, so it runs only on request.
func TestRealBuild(t *testing.T) {
	cache := os.Getenv("DROWSE_TEST_KERNEL_CACHE")
	if cache == "" {
		t.Skip("set DROWSE_TEST_KERNEL_CACHE to a cache folder to build the kernel and fetch Debian's")
	}
	k, err := Build(t.Context(), BuildOptions{CacheDir: cache})
	if err != nil {
		t.Fatal(err)
	}
	head := make([]byte, 4)
	f, err := os.Open(k.Image)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.ReadAt(head, 0); err != nil || string(head) != "\x7fELF" {
		t.Errorf("image begins with %q, %v", head, err)
	}
	if name, off, ok := k.Symbolize(0xffffffff81000000); !ok || name != "startup_64" || off != 0 {
		t.Errorf("the kernel's first byte is in %q+%d, %v", name, off, ok)
	}
	d, err := Fetch(t.Context(), FetchOptions{CacheDir: cache})
	if err != nil {
		t.Fatal(err)
	}
	if len(d.Modules) < len(wantedModules) {
		t.Errorf("only %d modules: %q", len(d.Modules), d.Modules)
	}
	checkFeatures(t, k, d)
}
