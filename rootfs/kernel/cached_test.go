package kernel

import (
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// putSource puts a version of the kernel's source package into the fake apt's index.
func putSource(t *testing.T, dir, version string) {
	t.Helper()
	sum := sha256.Sum256([]byte(debContent))
	text := strings.ReplaceAll(stanza(sourcePackage, "binutils", hex.EncodeToString(sum[:])), "6.1.9-1", version)
	writeTree(t, dir, map[string]string{
		"deb": debContent, "apt/" + sourcePackage: text, "package/usr/src/" + sourcePackage + ".tar.xz": "source",
	})
}

func TestBuild_uses_the_kernel_that_is_there_until_the_newest_is_asked_for(t *testing.T) {
	dir := fake(t)
	var newer []string
	opts := BuildOptions{
		CacheDir: filepath.Join(dir, "cache"), SharedDir: filepath.Join(dir, "shared"), InstallDeps: true,
		Newer: func(v string) { newer = append(newer, v) },
	}
	build := func(runs int) *Kernel {
		t.Helper()
		k, err := Build(t.Context(), opts)
		if err != nil {
			t.Fatal(err)
		}
		if n := count(t, dir, "vmlinux\n"); n != runs {
			t.Errorf("compiled %d times, want %d", n, runs)
		}
		return k
	}
	putSource(t, dir, "6.1.9-1")
	first := build(1)
	if build(1); newer != nil {
		t.Errorf("newer kernels: %q", newer)
	}
	putSource(t, dir, "6.1.10-1")
	if k := build(1); k.ID != first.ID || strings.Join(newer, " ") != "6.1.10-1" {
		t.Errorf("got %s, newer kernels %q", k.ID, newer)
	}
	putSource(t, dir, "6.1.8-1")
	if build(1); len(newer) != 1 {
		t.Errorf("an index that is older has newer kernels: %q", newer)
	}

	// Another cache takes the kernel from the shared one, without an index and without a compiler.
	opts.CacheDir = filepath.Join(dir, "other")
	if err := os.RemoveAll(filepath.Join(dir, "apt")); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(filepath.Join(dir, "bin/gcc"), filepath.Join(dir, "gcc")); err != nil {
		t.Fatal(err)
	}
	if k := build(1); k.ID != first.ID || len(newer) != 1 || !strings.HasPrefix(k.Image, opts.CacheDir) {
		t.Errorf("got %s at %s, newer kernels %q", k.ID, k.Image, newer)
	}
	if n := count(t, dir, "apt-get -q update") + count(t, dir, "install"); n != 0 {
		t.Errorf("apt-get was run %d times to change something", n)
	}
	if err := os.Rename(filepath.Join(dir, "gcc"), filepath.Join(dir, "bin/gcc")); err != nil {
		t.Fatal(err)
	}
	putSource(t, dir, "6.1.10-1")
	opts.Update = true
	if k := build(2); k.ID == first.ID {
		t.Error("the newest was asked for, and the old one returned")
	}
	build(2)
}

func TestBuild_does_not_use_a_kernel_of_other_options_patches_or_tarball(t *testing.T) {
	dir := fake(t)
	opts := testOptions(dir)
	ofTarball, err := Build(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	putSource(t, dir, "6.1.9-1")
	opts.SourceTarball = ""
	ofPackage, err := Build(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	opts.Config = "CONFIG_VXLAN=y\n"
	own, err := Build(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	if ofTarball.ID == ofPackage.ID || ofPackage.ID == own.ID {
		t.Errorf("kernels %s, %s and %s are not three", ofTarball.ID, ofPackage.ID, own.ID)
	}
	for _, c := range []struct {
		name   string
		change func(b *builder)
		want   string
	}{
		{"nothing changed", func(*builder) {}, own.ID},
		{"other options", func(b *builder) { b.config += "CONFIG_MORE=y\n" }, ""},
		{"own options, as those of all", func(b *builder) { b.opts.Config = "" }, ""},
		{"a patch less", func(b *builder) { b.patches = b.patches[1:] }, ""},
		{"a patch more", func(b *builder) { b.patches = append(b.patches, patch{name: "9999.patch"}) }, ""},
		{"other patch", func(b *builder) { b.patches[0].text += "\n" }, ""},
	} {
		b, err := newBuilder(opts)
		if err != nil {
			t.Fatal(err)
		}
		c.change(b)
		k, err := b.cached(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		got := ""
		if k != nil {
			got = k.ID
		}
		if got != c.want {
			t.Errorf("%s: got %q, want %q", c.name, got, c.want)
		}
	}
}

func TestFetch_uses_the_kernel_that_is_there_until_the_newest_is_asked_for(t *testing.T) {
	dir, opts := fakeArchive(t)
	var newer []string
	opts.Newer, opts.UpdateIndex = func(v string) { newer = append(newer, v) }, true
	first, err := Fetch(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{cloudPackage, "linux-image-6.1.0-9-cloud-amd64"} {
		path := filepath.Join(dir, "apt", name)
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		writeTree(t, dir, map[string]string{"apt/" + name: strings.ReplaceAll(string(text), "6.1.9-1", "6.1.10-1")})
	}
	if k, err := Fetch(t.Context(), opts); err != nil || k.ID != first.ID || strings.Join(newer, " ") != "6.1.10-1" {
		t.Errorf("got %v, %v, newer kernels %q", k, err, newer)
	}
	opts.Update = true
	if k, err := Fetch(t.Context(), opts); err != nil || k.ID == first.ID || len(newer) != 1 {
		t.Errorf("the newest was asked for: got %v, %v, newer kernels %q", k, err, newer)
	}
	opts.Update = false
	if err := os.RemoveAll(filepath.Join(dir, "apt")); err != nil {
		t.Fatal(err)
	}
	if _, err := Fetch(t.Context(), opts); err != nil || count(t, dir, "update") != 0 {
		t.Errorf("without an index: %v", err)
	}
}
