package kernel

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/rootfs/internal/artifact"
)

// put publishes a small kernel and returns it.
func put(t *testing.T, cache string, kind Kind, hash string) *Kernel {
	t.Helper()
	k := &Kernel{
		ID: string(kind) + "-6.1.0-" + hash, Kind: kind, Version: "6.1.0", Arch: "amd64", Image: "vmlinux", Config: "config",
		InputsHash: hash, Inputs: map[string]string{"a": "b"},
	}
	files := map[string]string{"vmlinux": "image " + hash, "config": "CONFIG_A=y\n"}
	if kind == Debian {
		k.ModulesDir, k.Modules = "lib/modules/6.1.0", []string{"lib/modules/6.1.0/kernel/a.ko"}
		files["lib/modules/6.1.0/kernel/a.ko"] = "module"
	}
	staging, err := artifact.StagingDir(filepath.Join(cache, kernelsDir), k.ID)
	if err != nil {
		t.Fatal(err)
	}
	writeTree(t, staging, files)
	k, err = k.publish(t.Context(), cache, staging)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// age makes a kernel older by d.
func age(t *testing.T, k *Kernel, d time.Duration) {
	t.Helper()
	edit(t, k, func(m map[string]any) { m["created"] = time.Now().Add(-d).UTC().Format(time.RFC3339) })
}

func edit(t *testing.T, k *Kernel, change func(map[string]any)) {
	t.Helper()
	path := filepath.Join(filepath.Dir(k.Image), metadataFile)
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var m map[string]any
	if err := json.Unmarshal(data, &m); err != nil {
		t.Fatal(err)
	}
	change(m)
	if data, err = json.Marshal(m); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, data, 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestFind_by_ID_kind_and_prefix(t *testing.T) {
	cache := t.TempDir()
	old, newer := put(t, cache, Built, "aaaa11"), put(t, cache, Built, "aaaa22")
	deb := put(t, cache, Debian, "bbbb11")
	age(t, old, time.Hour)
	age(t, deb, time.Minute)
	for _, c := range []struct{ what, want, err string }{
		{old.ID, old.ID, ""},
		{"built", newer.ID, ""},
		{"debian", deb.ID, ""},
		{"deb", deb.ID, ""},
		{"built-6.1.0-aaaa1", old.ID, ""},
		{"built-6.1.0", "", "beginning of 2"},
		{"none", "", "drowse kernel ls"},
		{"", "", "not a kernel ID"},
		{"..", "", "not a kernel ID"},
		{"../kernels/" + old.ID, "", "not a kernel ID"},
	} {
		k, err := Find(cache, c.what)
		switch {
		case c.err != "":
			if !errors.Is(err, ErrNotFound) || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%q: error %v, want %q", c.what, err, c.err)
			}
		case err != nil || k.ID != c.want:
			t.Errorf("%q: got %v, %v; want %s", c.what, k, err, c.want)
		}
	}
	all, err := List(cache)
	if err != nil || len(all) != 3 || all[0].ID != newer.ID || all[1].ID != deb.ID || all[2].ID != old.ID {
		t.Errorf("list is not the three, newest first: %v, %v", all, err)
	}
}

func TestFind_in_empty_cache_says_what_to_run(t *testing.T) {
	for kind, want := range map[Kind]string{Built: "drowse kernel build", Debian: "drowse kernel fetch"} {
		_, err := Find(t.TempDir(), string(kind))
		if !errors.Is(err, ErrNotFound) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", kind, err)
		}
	}
}

func TestPublished_kernel_has_absolute_paths_and_survives_move_of_cache(t *testing.T) {
	cache := filepath.Join(t.TempDir(), "cache")
	k := put(t, cache, Debian, "cccc")
	moved := cache + "-moved"
	if err := os.Rename(cache, moved); err != nil {
		t.Fatal(err)
	}
	again, err := Open(moved, k.ID)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{again.Image, again.Config, again.ModulesDir, again.Modules[0]} {
		if !strings.HasPrefix(p, moved+"/") {
			t.Errorf("path %s is not in %s", p, moved)
		}
	}
	if again.SymbolMap != "" || again.ImageSize != int64(len("image cccc")) || again.Inputs["a"] != "b" {
		t.Errorf("got %+v", again)
	}
	if err := again.Verify(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestDamaged_kernel_is_not_listed_and_open_says_why(t *testing.T) {
	for name, c := range map[string]struct {
		damage func(k *Kernel, dir string)
		err    string
	}{
		"no metadata":        {func(_ *Kernel, dir string) { os.Remove(filepath.Join(dir, metadataFile)) }, metadataFile},
		"metadata cut short": {func(_ *Kernel, dir string) { os.Truncate(filepath.Join(dir, metadataFile), 20) }, "JSON"},
		"metadata too long":  {func(_ *Kernel, dir string) { os.Truncate(filepath.Join(dir, metadataFile), maxMetadata+1) }, "more than"},
		"image gone":         {func(k *Kernel, _ string) { os.Remove(k.Image) }, "vmlinux"},
		"image cut short":    {func(k *Kernel, _ string) { os.Truncate(k.Image, 3) }, "bytes"},
		"module gone":        {func(k *Kernel, _ string) { os.Remove(k.Modules[0]) }, "a.ko"},
		"newer format":       {func(k *Kernel, _ string) { edit(t, k, func(m map[string]any) { m["format_version"] = 99 }) }, "99"},
		"another kernel's":   {func(k *Kernel, _ string) { edit(t, k, func(m map[string]any) { m["id"] = "x" }) }, `"x"`},
		"path out of folder": {func(k *Kernel, _ string) { edit(t, k, func(m map[string]any) { m["image"] = "../../x" }) }, "inside"},
		"absolute path":      {func(k *Kernel, _ string) { edit(t, k, func(m map[string]any) { m["image"] = "/etc/passwd" }) }, "inside"},
		"no image in it":     {func(k *Kernel, _ string) { edit(t, k, func(m map[string]any) { m["image"] = "" }) }, "no image"},
	} {
		cache := t.TempDir()
		k := put(t, cache, Debian, "dddd")
		c.damage(k, filepath.Join(cache, kernelsDir, k.ID))
		_, err := Open(cache, k.ID)
		if !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: error %v, want %q", name, err, c.err)
		}
		if all, err := List(cache); err != nil || len(all) != 0 {
			t.Errorf("%s: list gives %v, %v", name, all, err)
		}
	}
}

func TestVerify_finds_flipped_bit(t *testing.T) {
	k := put(t, t.TempDir(), Built, "eeee")
	if err := os.WriteFile(k.Image, []byte("imagf eeee"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := k.Verify(t.Context()); !errors.Is(err, ErrDamaged) {
		t.Errorf("got %v", err)
	}
}

func TestDefaultParams(t *testing.T) {
	const usual = "console=ttyS0 quiet panic=-1 reboot=k"
	for _, c := range []struct {
		kind Kind
		host Host
		want string
		is   error
	}{
		{Built, Hardware, usual, nil},
		{Debian, Hardware, usual, nil},
		{Built, Soft, usual + " tsc=reliable clocksource=kvm-clock no_timer_check rodata=off no-kvmapf nf_conntrack.hashsize=512 fault_around_bytes=4096 " + strings.Join(softHostEnv, " "), nil},
		{Debian, Soft, "", ErrUnsupported},
		{"other", Hardware, "", ErrUnsupported},
		{Built, "other", "", ErrUnsupported},
	} {
		got, err := DefaultParams(c.kind, c.host)
		if got != c.want || !errors.Is(err, c.is) {
			t.Errorf("%s on %s: %q, %v; want %q, %v", c.kind, c.host, got, err, c.want, c.is)
		}
	}
}

func TestRootParams(t *testing.T) {
	for kind, want := range map[Kind]string{
		Built: "root=/dev/vda rootfstype=erofs ro init=/init", Debian: "rdinit=/init",
	} {
		if got := RootParams(kind); got != want {
			t.Errorf("%s: %q; want %q", kind, got, want)
		}
	}
}
