package kernel

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

const debContent = "the package"

func stanza(name, depends, sum string) string {
	return fmt.Sprintf(`Package: %s
Version: 6.1.9-1
Installed-Size: 13
Architecture: amd64
Depends: kmod, %s
Description: Linux
 This line goes on: and has a colon.
Filename: pool/x.deb
Size: %d
SHA256: %s

Package: %s
Version: 6.1.8-1
`, name, depends, len(debContent), sum, name)
}

// fakeArchive puts Debian's two packages of a kernel with a guest's modules into the fake apt's index.
func fakeArchive(t *testing.T) (dir string, opts FetchOptions) {
	t.Helper()
	dir = fake(t)
	sum := sha256.Sum256([]byte(debContent))
	files := map[string]string{
		"deb":                                 debContent,
		"apt/" + cloudPackage:                 stanza(cloudPackage, "linux-image-6.1.0-9-cloud-amd64 (= 6.1.9-1)", hex.EncodeToString(sum[:])),
		"apt/linux-image-6.1.0-9-cloud-amd64": stanza("linux-image-6.1.0-9-cloud-amd64", "linux-base", hex.EncodeToString(sum[:])),
		"package/boot/vmlinuz-6.1.0-9-cloud-amd64":                         "bzImage",
		"package/boot/config-6.1.0-9-cloud-amd64":                          "CONFIG_A=y\n",
		"package/boot/System.map-6.1.0-9-cloud-amd64":                      "elsewhere\n",
		"package/usr/share/doc/x":                                          "x",
		"package/lib/modules/6.1.0-9-cloud-amd64/modules.builtin":          "kernel/fs/ext4.ko\n",
		"package/lib/modules/6.1.0-9-cloud-amd64/kernel/virtio_ring.ko":    string(moduleELF("depends=\x00")),
		"package/lib/modules/6.1.0-9-cloud-amd64/kernel/extra.ko":          string(moduleELF("depends=\x00")),
		"package/lib/modules/6.1.0-9-cloud-amd64/kernel/not-for-guests.ko": string(moduleELF("depends=\x00")),
	}
	for _, m := range wantedModules {
		if m != "ext4" && m != "pvpanic_mmio" {
			files["package/lib/modules/6.1.0-9-cloud-amd64/kernel/"+m+".ko"] = string(moduleELF("depends=virtio_ring\x00"))
		}
	}
	writeTree(t, dir, files)
	return dir, FetchOptions{CacheDir: filepath.Join(dir, "cache")}
}

func moduleNames(k *Kernel) string {
	var names []string
	for _, m := range k.Modules {
		names = append(names, moduleName(m))
	}
	return strings.Join(names, " ")
}

func TestFetch_follows_meta_package_and_orders_modules(t *testing.T) {
	dir, opts := fakeArchive(t)
	opts.ExtraModules = []string{"extra"}
	k, err := Fetch(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	if k.Kind != Debian || k.Version != "6.1.0-9-cloud-amd64" || k.SymbolMap != "" {
		t.Errorf("got %+v", k)
	}
	if data, err := os.ReadFile(k.Image); err != nil || string(data) != "bzImage" {
		t.Errorf("image holds %q, %v", data, err)
	}
	want := "virtio_ring virtio_mmio virtio_blk virtio_net vmw_vsock_virtio_transport virtio_balloon virtio_console virtio_rng " +
		"erofs overlay fuse extra"
	if got := moduleNames(k); got != want {
		t.Errorf("modules %s, want %s", got, want)
	}
	// Fetch keeps modules that the guest may load later, and drops documentation.
	if _, err := os.Stat(filepath.Join(k.ModulesDir, "kernel/not-for-guests.ko")); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(filepath.Dir(k.Image), "../usr")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("documentation was kept: %v", err)
	}
	noRemains(t, opts.CacheDir)

	again, err := Fetch(t.Context(), opts)
	if err != nil || again.ID != k.ID || count(t, dir, "download") != 1 {
		t.Errorf("second call: %v, %v, %d downloads", again, err, count(t, dir, "download"))
	}
	opts.ExtraModules = nil
	other, err := Fetch(t.Context(), opts)
	if err != nil || other.ID == k.ID || strings.Contains(moduleNames(other), "extra") {
		t.Errorf("without extra modules: %v, %v", other, err)
	}
	if n := count(t, dir, "download"); n != 1 {
		t.Errorf("downloaded %d times", n)
	}
}

func TestFetches_at_once_download_once(t *testing.T) {
	dir, opts := fakeArchive(t)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if _, err := Fetch(t.Context(), opts); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if n := count(t, dir, "download"); n != 1 {
		t.Errorf("downloaded %d times", n)
	}
}

func TestDownload_that_differs_from_index_is_refused(t *testing.T) {
	dir, opts := fakeArchive(t)
	writeTree(t, dir, map[string]string{"deb": "another package"})
	_, err := Fetch(t.Context(), opts)
	if err == nil || !strings.Contains(err.Error(), "SHA-256") {
		t.Errorf("got %v", err)
	}
	noRemains(t, opts.CacheDir)
	if debs, _ := filepath.Glob(filepath.Join(opts.CacheDir, downloadsDir, "*")); len(debs) != 0 {
		t.Errorf("kept %q", debs)
	}
}

func TestDamaged_download_in_cache_is_replaced(t *testing.T) {
	dir, opts := fakeArchive(t)
	if _, err := Fetch(t.Context(), opts); err != nil {
		t.Fatal(err)
	}
	debs, _ := filepath.Glob(filepath.Join(opts.CacheDir, downloadsDir, "*.deb"))
	if len(debs) != 1 {
		t.Fatalf("downloads: %q", debs)
	}
	if err := os.WriteFile(debs[0], []byte("damaged"), 0o644); err != nil {
		t.Fatal(err)
	}
	opts.ExtraModules = []string{"extra"}
	if _, err := Fetch(t.Context(), opts); err != nil {
		t.Fatal(err)
	}
	if data, err := os.ReadFile(debs[0]); err != nil || string(data) != debContent || count(t, dir, "download") != 2 {
		t.Errorf("download holds %q, %v", data, err)
	}
}

func TestUnknown_package_is_looked_up_again_after_update_only_if_allowed(t *testing.T) {
	dir, opts := fakeArchive(t)
	if err := os.Rename(filepath.Join(dir, "apt"), filepath.Join(dir, "new-index")); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "apt"), 0o755); err != nil {
		t.Fatal(err)
	}
	_, err := Fetch(t.Context(), opts)
	if !errors.Is(err, ErrNoPackage) || !strings.Contains(err.Error(), "apt-get update") || count(t, dir, "apt-get") != 0 {
		t.Fatalf("without leave: %v", err)
	}
	opts.UpdateIndex = true
	if _, err := Fetch(t.Context(), opts); err != nil {
		t.Errorf("with leave: %v", err)
	}
}

func TestFile_gone_from_archive_is_tried_again_after_update_only_if_allowed(t *testing.T) {
	dir, opts := fakeArchive(t)
	writeTree(t, dir, map[string]string{"stale": ""})
	_, err := Fetch(t.Context(), opts)
	var ce *CommandError
	if !errors.As(err, &ce) || !strings.Contains(err.Error(), "404") {
		t.Fatalf("without leave: %v", err)
	}
	opts.UpdateIndex = true
	if _, err := Fetch(t.Context(), opts); err != nil {
		t.Errorf("with leave: %v", err)
	}
}

func TestFetch_refuses_package_that_is_no_kernel(t *testing.T) {
	dir, opts := fakeArchive(t)
	writeTree(t, dir, map[string]string{"apt/" + cloudPackage: stanza(cloudPackage, "base-files", strings.Repeat("0", 64))})
	if _, err := Fetch(t.Context(), opts); !errors.Is(err, ErrUnsupported) {
		t.Errorf("got %v", err)
	}
}

func TestFetch_refuses_kernel_without_needed_module(t *testing.T) {
	dir, opts := fakeArchive(t)
	if err := os.Remove(filepath.Join(dir, "package/lib/modules/6.1.0-9-cloud-amd64/kernel/overlay.ko")); err != nil {
		t.Fatal(err)
	}
	if _, err := Fetch(t.Context(), opts); !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), "overlay") {
		t.Errorf("got %v", err)
	}
	noRemains(t, opts.CacheDir)
}

func TestResolve_kernel_ends_when_packages_depend_on_each_other(t *testing.T) {
	calls := 0
	candidate := func(_ context.Context, name string) (aptPackage, error) {
		calls++
		return aptPackage{name: name, depends: "linux-image-amd64"}, nil
	}
	if _, err := resolveKernel(t.Context(), candidate, "linux-image-amd64"); !errors.Is(err, ErrUnsupported) || calls != maxMetaPackages {
		t.Errorf("got %v after %d look-ups", err, calls)
	}
}

func TestParseStanza(t *testing.T) {
	sum := strings.Repeat("0a", 32)
	p, err := parseStanza(stanza("linux-image-6.1", "a (= 1), b | c", strings.ToUpper(sum)))
	want := aptPackage{name: "linux-image-6.1", version: "6.1.9-1", arch: "amd64", sha256: sum, size: int64(len(debContent)), depends: "kmod, a (= 1), b | c"}
	if err != nil || p != want {
		t.Errorf("got %+v, %v; want %+v", p, err, want)
	}
	for name, text := range map[string]string{
		"empty":               "",
		"no version":          "Package: ab\n",
		"name like an option": "Package: -o\nVersion: 1\n",
		"name like a path":    "Package: ../ab\nVersion: 1\n",
		"version with space":  "Package: ab\nVersion: 1 2\n",
		"version with slash":  "Package: ab\nVersion: 1/../2\n",
		"size below zero":     "Package: ab\nVersion: 1\nSize: -1\n",
		"hash too short":      "Package: ab\nVersion: 1\nSHA256: 00\n",
		"line without field":  "Package: ab\nVersion: 1\nnothing\n",
	} {
		if p, err := parseStanza(text); err == nil {
			t.Errorf("%s: got %+v", name, p)
		}
	}
}
