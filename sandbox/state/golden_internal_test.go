package state

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/kernel"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

var updateGolden = flag.Bool("update", false, "write the golden state of this version anew; those of others are never changed")

// goldenDir has a state directory for each version of the formats, as a build of that version wrote it. That of
// version 1 was written along with the tests, later than the version itself.
const goldenDir = "testdata/golden"

var goldenTime = time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)

// goldenRecord returns a record with a value in each field.
func goldenRecord(t *testing.T) *Record {
	t.Helper()
	p, err := netpolicy.Parse([]byte("publish: [{listen: \"127.0.0.1:8080\", port: 80, protocol: tcp}]\n"))
	if err != nil {
		t.Fatal(err)
	}
	spec, err := spec.VM{
		Name: "golden", Image: "app:1", VCPUs: 2, MemoryMiB: 512, Network: spec.NetworkTAP, Policy: p, Tags: []string{"web"},
		Idle: spec.Idle{SleepSeconds: 15},
	}.WithDefaults()
	if err != nil {
		t.Fatal(err)
	}
	id := func(c string) string { return strings.Repeat(c, 32) }
	return &Record{
		Version: RecordVersion, ID: id("a"), Spec: spec, Created: goldenTime, Phase: Asleep,
		Boot: BootFiles{KernelID: "built-6.1", Kernel: "/kernels/vmlinux", Cmdline: "quiet", ImageID: strings.Repeat("b", 64)},
		Disk: disk.Stack{Layers: []string{id("c") + ".layer"}}, NextLayer: 3, Snapshot: id("d"), Problem: "none", Parent: id("e"),
		Exit:    &ExitRecord{},
		Fork:    &Origin{Parent: "other", ParentID: id("f"), Generation: 2, Time: goldenTime},
		Lineage: id("f"), Previous: id("1"), Awake: goldenTime, Former: "before",
		Sleeps: []SleepRecord{{Snapshot: id("d"), Awake: goldenTime, Asleep: goldenTime, Raw: 1, Stored: 2, Shared: 3, CPUSeconds: 4.5, NetworkIn: 6, NetworkOut: 7}},
	}
}

func goldenMetadata() spec.Metadata {
	return spec.Metadata{
		Class: lifetime.Resumable, Owner: "build", Purpose: "nightly", Tags: []string{"ci", "web"}, Expires: goldenTime.Add(24 * time.Hour).Truncate(time.Second),
		Keep: lifetime.Keep{Last: 5},
	}
}

func writeGolden(t *testing.T, dir string) {
	t.Helper()
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	s, err := OpenStore(dir)
	if err != nil {
		t.Fatal(err)
	}
	l, err := s.Create(goldenRecord(t))
	if err != nil {
		t.Fatal(err)
	}
	l.Release()
	if _, err := s.SetMetadata(t.Context(), "golden", func(l *spec.Metadata, _ error) error { *l = goldenMetadata(); return nil }); err != nil {
		t.Fatal(err)
	}
	write := func(path string, doc any) {
		t.Helper()
		b, ok := doc.([]byte)
		var err error
		if !ok {
			b, err = json.MarshalIndent(doc, "", "  ")
		}
		if err == nil {
			err = os.MkdirAll(filepath.Dir(filepath.Join(dir, path)), 0o755)
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, path), b, 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	id := strings.Repeat("b", 64)
	write("images/"+id+"/image.json", &image.Image{
		Version: image.RecordVersion, ID: id, Tags: []string{"app:1"}, Tagged: goldenTime, Source: "debian:bookworm", Spec: id, Include: []string{"python3"},
		Packages: []image.Package{{Name: "python3", Version: "3.11", Architecture: "amd64"}}, Size: 4096, Content: 5, Inodes: 6, Created: goldenTime, Architecture: "amd64",
	})
	write("images/"+id+"/root.erofs", make([]byte, 4096))
	write("kernels/built-6.1/kernel.json", map[string]any{
		"format_version": 1, "id": "built-6.1", "kind": kernel.Built, "version": "6.1", "arch": "amd64", "image": "vmlinux", "image_size": 4,
		"image_sha256": strings.Repeat("0", 64), "config": "config", "symbol_map": "", "modules_dir": "", "modules": nil, "created": goldenTime,
		"inputs_hash": strings.Repeat("1", 64), "inputs": map[string]string{"source": "6.1"},
	})
	write("kernels/built-6.1/vmlinux", []byte("\x7fELF"))
	write("kernels/built-6.1/config", []byte("CONFIG_X=y\n"))
	write("volumes/data/volume.json", map[string]any{
		"version": 1, "id": strings.Repeat("9", 32), "name": "data", "size": 1 << 30, "created": goldenTime, "generation": 7,
		"settled": map[string]any{"snapshot": strings.Repeat("d", 32), "vm": strings.Repeat("a", 32)},
	})
	for _, sub := range []string{"cache", "layers", "snapshots"} {
		_ = os.Remove(filepath.Join(dir, sub)) // git keeps no empty directory
	}
}

// Every later version must open what a version wrote: an upgrade loses nothing. A new version of a format adds a
// directory, with scripts/golden, and leaves the others unchanged.
func TestGolden_states_of_every_version_open(t *testing.T) {
	if *updateGolden {
		writeGolden(t, filepath.Join(goldenDir, fmt.Sprintf("v%d", RecordVersion)))
	}
	for version := 1; version <= RecordVersion; version++ {
		t.Run(fmt.Sprintf("version %d", version), func(t *testing.T) {
			dir := t.TempDir()
			if err := os.CopyFS(dir, os.DirFS(filepath.Join(goldenDir, fmt.Sprintf("v%d", version)))); err != nil {
				t.Fatal(err)
			}
			s, err := OpenStore(dir)
			if err != nil {
				t.Fatal(err)
			}
			list, err := s.List()
			if err != nil || len(list) != 1 {
				t.Fatalf("the list is %v (%v), want one VM", list, err)
			}
			if got, want := asJSON(t, list[0]), asJSON(t, goldenRecord(t)); got != want {
				t.Errorf("the record is\n%s\nwant\n%s", got, want)
			}
			if l, err := s.Metadata("golden"); err != nil || !reflect.DeepEqual(l, goldenMetadata()) {
				t.Errorf("the metadata is %+v (%v), want %+v", l, err, goldenMetadata())
			}
			images, err := image.OpenStore(s.ImageDir())
			if err != nil {
				t.Fatal(err)
			}
			if img, err := images.Find("app:1"); err != nil || img.Source != "debian:bookworm" || len(img.Packages) != 1 {
				t.Errorf("the image is %+v (%v)", img, err)
			}
			if k, err := kernel.Find(s.KernelDir(), "built-6.1"); err != nil || k.Version != "6.1" || k.Inputs["source"] != "6.1" {
				t.Errorf("the kernel is %+v (%v)", k, err)
			}
			if v, err := s.Volumes().Get("data"); err != nil || v.Generation != 7 || v.Settled == nil || v.Size != 1<<30 {
				t.Errorf("the volume is %+v (%v)", v, err)
			}
			// Changes to it work as well, and leave it whole.
			if _, err := s.SetMetadata(t.Context(), "golden", func(l *spec.Metadata, _ error) error { l.Owner = "other"; return nil }); err != nil {
				t.Error(err)
			}
			if err := s.Rename(t.Context(), "golden", "later"); err != nil {
				t.Error(err)
			}
			if r, err := s.Get("later"); err != nil || r.ID != list[0].ID || r.Former != "golden" {
				t.Errorf("after it was renamed it is %+v (%v)", r, err)
			}
			if l, err := s.Metadata("later"); err != nil || l.Owner != "other" {
				t.Errorf("its metadata is %+v (%v)", l, err)
			}
		})
	}
}

func asJSON(t *testing.T, doc any) string {
	t.Helper()
	b, err := json.MarshalIndent(doc, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
