package builder

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/imagetest"
)

// A doc is a JSON document of an image, written by hand: the code under test must not write it.
type doc = map[string]any

func jsonOf(t *testing.T, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func digestOf(b []byte) string {
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:])
}

const (
	typeIndex    = "application/vnd.oci.image.index.v1+json"
	typeManifest = "application/vnd.oci.image.manifest.v1+json"
	typeConfig   = "application/vnd.oci.image.config.v1+json"
	typeLayer    = "application/vnd.oci.image.layer.v1.tar"
)

// ociFiles maps names in a layout to contents.
type ociFiles map[string][]byte

func (f ociFiles) blob(b []byte) doc {
	d := digestOf(b)
	f["blobs/"+strings.Replace(d, ":", "/", 1)] = b
	return doc{"digest": d, "size": len(b)}
}

func (f ociFiles) typed(mediaType string, b []byte) doc {
	d := f.blob(b)
	d["mediaType"] = mediaType
	return d
}

// A recipe describes an image for tests.
type recipe struct {
	layers [][]byte // tar streams
	pack   []string // of each layer: "", "gzip" or "zstd"
	config doc      // "config" of the configuration
	arch   string   // amd64 when empty
	tag    string   // ref.name in the index
	// These are called before each document is written, to spoil it.
	editConfig, editManifest, editIndex func(doc)
	editLayer                           func(i int, d doc)
}

// manifest adds the image's blobs and returns the descriptor of its manifest.
func (r recipe) manifest(t *testing.T, f ociFiles) doc {
	t.Helper()
	var diffs []string
	var layers []doc
	for i, l := range r.layers {
		how := ""
		if i < len(r.pack) {
			how = r.pack[i]
		}
		suffix := ""
		if how != "" {
			suffix = "+" + how
		}
		d := f.typed(typeLayer+suffix, imagetest.Pack(t, how, l))
		if r.editLayer != nil {
			r.editLayer(i, d)
		}
		layers = append(layers, d)
		diffs = append(diffs, digestOf(l))
	}
	arch := r.arch
	if arch == "" {
		arch = "amd64"
	}
	config := doc{"architecture": arch, "os": "linux", "config": r.config, "rootfs": doc{"type": "layers", "diff_ids": diffs}}
	if r.editConfig != nil {
		r.editConfig(config)
	}
	manifest := doc{"schemaVersion": 2, "mediaType": typeManifest, "config": f.typed(typeConfig, jsonOf(t, config)), "layers": layers}
	if r.editManifest != nil {
		r.editManifest(manifest)
	}
	d := f.typed(typeManifest, jsonOf(t, manifest))
	if r.tag != "" {
		d["annotations"] = doc{"org.opencontainers.image.ref.name": r.tag}
	}
	return d
}

// layout returns the files of an OCI image layout.
func (r recipe) layout(t *testing.T) ociFiles {
	t.Helper()
	f := ociFiles{}
	d := r.manifest(t, f)
	index := doc{"schemaVersion": 2, "mediaType": typeIndex, "manifests": []doc{d}}
	if r.editIndex != nil {
		r.editIndex(index)
	}
	f["index.json"] = jsonOf(t, index)
	f["oci-layout"] = []byte(`{"imageLayoutVersion":"1.0.0"}`)
	return f
}

// dir writes the files to a new directory.
func (f ociFiles) dir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for name, b := range f {
		imagetest.Write(t, filepath.Join(dir, name), string(b))
	}
	return dir
}

// archive writes the files as a tar file.
func (f ociFiles) archive(t *testing.T) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "image.tar")
	if err := os.WriteFile(name, f.tar(t), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

func (f ociFiles) tar(t *testing.T) []byte {
	t.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, name := range slices.Sorted(maps.Keys(f)) {
		if err := w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(f[name]))}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(f[name]); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// dockerArchive returns the image as `docker save` wrote it before docker 25.
func (r recipe) dockerArchive(t *testing.T, tags ...string) ociFiles {
	t.Helper()
	f, diffs, names := ociFiles{}, []string{}, []string{}
	for _, l := range r.layers {
		d := digestOf(l)
		name := strings.TrimPrefix(d, "sha256:") + "/layer.tar"
		f[name] = l
		diffs, names = append(diffs, d), append(names, name)
	}
	config := doc{"architecture": "amd64", "os": "linux", "config": r.config, "rootfs": doc{"type": "layers", "diff_ids": diffs}}
	if r.editConfig != nil {
		r.editConfig(config)
	}
	c := jsonOf(t, config)
	file := strings.TrimPrefix(digestOf(c), "sha256:") + ".json"
	f[file] = c
	f["manifest.json"] = jsonOf(t, []doc{{"Config": file, "RepoTags": tags, "Layers": names}})
	return f
}

func newStore(t *testing.T) *image.Store {
	t.Helper()
	s, err := image.OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// build builds an image in a new store.
func build(t *testing.T, from string) *image.Image {
	t.Helper()
	img, err := Build(t.Context(), Options{Store: newStore(t), From: from, Platform: "linux/amd64"})
	if err != nil {
		t.Fatal(err)
	}
	return img
}

// vmFiles lists what every image gets besides the content of its source.
var vmFiles = []string{"dev", "proc", "sys", "run", "tmp", "etc", "etc/hostname", "etc/resolv.conf", "etc/machine-id"}
