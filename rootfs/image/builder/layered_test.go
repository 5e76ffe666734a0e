package builder

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ulikunitz/xz"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/imagetest"
)

// small returns an image of three layers with a configuration.
func small(t *testing.T) recipe {
	return recipe{
		layers: [][]byte{
			imagetest.LayerOf(t, imagetest.Dirh("./"), imagetest.Dirh("bin/"), imagetest.Reg("bin/sh=shell"), imagetest.Dirh("srv/"), imagetest.Reg("srv/old=1"), imagetest.Sym("lib", "usr/lib")),
			imagetest.LayerOf(t, imagetest.Reg("srv/.wh.old"), imagetest.Reg("srv/new=2"), imagetest.Lnk("srv/sh", "bin/sh")),
			imagetest.LayerOf(t, imagetest.Reg("lib/so=3")),
		},
		pack: []string{"gzip", "", "zstd"},
		tag:  "v1",
		config: doc{"Env": []string{"PATH=/opt/bin:/bin", "LANG=C.UTF-8", "NOVALUE", "=x"}, "User": "daemon:adm", "WorkingDir": "/srv/app/data/../x",
			"Entrypoint": []string{"/bin/sh", "-c"}, "Cmd": []string{"hi"}, "Labels": doc{"a": "1", "b": "2"}, "StopSignal": "SIGQUIT"},
	}
}

func TestBuild_every_source_of_one_image_gives_the_same_id(t *testing.T) {
	r := small(t)
	layout, docker := r.layout(t), r.dockerArchive(t, "me/app:v1")
	index := layout.dir(t)
	squeezed := filepath.Join(t.TempDir(), "docker.tar.gz")
	imagetest.Write(t, squeezed, string(imagetest.Pack(t, "gzip", docker.tar(t))))
	// docker 25 and later write a layout with a manifest.json that names its blobs.
	both := r.layout(t)
	for i, l := range r.layers {
		how := []string{"gzip", "", "zstd"}[i]
		both["blobs/"+strings.Replace(digestOf(imagetest.Pack(t, how, l)), ":", "/", 1)] = imagetest.Pack(t, how, l)
	}
	ids := map[string][]string{}
	for _, from := range []string{
		"oci:" + index, "oci:" + index + ":v1", "oci-archive:" + layout.archive(t), "oci-archive:" + layout.archive(t) + ":v1",
		"docker-archive:" + docker.archive(t), "docker-archive:" + docker.archive(t) + ":docker.io/me/app:v1", "docker-archive:" + squeezed,
	} {
		img := build(t, from)
		ids[img.ID] = append(ids[img.ID], from)
	}
	for _, how := range []string{"", "zstd"} {
		for _, from := range []string{"oci-archive:-", "docker-archive:-:me/app:v1"} {
			in := layout
			if strings.HasPrefix(from, "docker") {
				in = docker
			}
			img, err := Build(t.Context(), Options{Store: newStore(t), From: from, Platform: "linux/amd64", Stdin: bytes.NewReader(imagetest.Pack(t, how, in.tar(t)))})
			if err != nil {
				t.Fatalf("%s: %v", from, err)
			}
			ids[img.ID] = append(ids[img.ID], from+" "+how)
		}
	}
	if len(ids) != 1 {
		t.Errorf("several ids: %v", ids)
	}
}

func TestBuild_layout_gives_image_with_its_record(t *testing.T) {
	r := small(t)
	files := r.layout(t)
	s := newStore(t)
	dir := files.dir(t)
	img, err := Build(t.Context(), Options{Store: s, From: "oci:" + dir, Platform: "linux/amd64"})
	if err != nil {
		t.Fatal(err)
	}
	got, _ := imagetest.DumpImage(t, img.Path())
	for p, want := range map[string]string{"srv/new": "2", "usr/lib/so": "3", "bin/sh": "shell", "srv/sh": "shell"} {
		if got[p].Hash != imagetest.HashOf(t, strings.NewReader(want)) {
			t.Errorf("%s: %v", p, got[p])
		}
	}
	if _, ok := got["srv/old"]; ok {
		t.Error("srv/old is still there")
	}
	if d, ok := got["srv/app/x"]; !ok || !d.Mode.IsDir() {
		t.Error("the working directory was not made")
	}
	// Check the record on disk, not what Build returned.
	if img, err = s.Find(img.ID); err != nil {
		t.Fatal(err)
	}
	if want := []string{"PATH=/opt/bin:/bin", "LANG=C.UTF-8"}; !slices.Equal(img.Env, want) {
		t.Errorf("env %q, want %q", img.Env, want)
	}
	if img.User != "daemon:adm" || img.Workdir != "/srv/app/x" || img.StopSignal != "SIGQUIT" || img.Labels["b"] != "2" ||
		!slices.Equal(img.Entrypoint, []string{"/bin/sh", "-c"}) || !slices.Equal(img.Cmd, []string{"hi"}) {
		t.Errorf("configuration %+v", img.RunConfig)
	}
	if img.Platform != "linux/amd64" || len(img.Layers) != 3 || img.Layers[0].DiffID != digestOf(r.layers[0]) ||
		img.Layers[0].Digest != digestOf(imagetest.Pack(t, "gzip", r.layers[0])) || files["blobs/"+strings.Replace(img.Manifest, ":", "/", 1)] == nil ||
		files["blobs/"+strings.Replace(img.Config, ":", "/", 1)] == nil || img.Source != "oci:"+dir {
		t.Errorf("record %+v", img)
	}
}

func TestBuild_configuration_is_part_of_the_id(t *testing.T) {
	r := small(t)
	a := build(t, "oci:"+r.layout(t).dir(t))
	r.config["Env"] = []string{"PATH=/bin"}
	b := build(t, "oci:"+r.layout(t).dir(t))
	if a.ID == b.ID {
		t.Error("two images of one file system and two configurations have one id: one record would hide the other")
	}
	r.config = nil
	c, plain := build(t, "oci:"+r.layout(t).dir(t)), filepath.Join(t.TempDir(), "x.tar")
	if c.ID == a.ID || c.ID == b.ID {
		t.Error("an image without a configuration has the id of one with it")
	}
	// Without a configuration, only the file system counts.
	imagetest.Write(t, plain, string(imagetest.LayerOf(t, imagetest.Dirh("./"), imagetest.Reg("f=1"))))
	single := recipe{layers: [][]byte{imagetest.LayerOf(t, imagetest.Dirh("./"), imagetest.Reg("f=1"))}}
	if x, y := build(t, "oci:"+single.layout(t).dir(t)), buildTarFile(t, plain, nil); x.ID != y.ID {
		t.Error("a tar file and an image of the same layer have two ids")
	}
}

func buildTarFile(t *testing.T, file string, stdin io.Reader) *image.Image {
	t.Helper()
	img, err := Build(t.Context(), Options{Store: newStore(t), From: "tar:" + file, Stdin: stdin})
	if err != nil {
		t.Fatal(err)
	}
	return img
}

func TestBuild_same_input_gives_the_same_id_whatever_the_surroundings(t *testing.T) {
	r := recipe{layers: generate(t, 3, 600, 6), pack: []string{"gzip", "", "zstd", "gzip", "", "zstd"}, config: doc{"Labels": doc{"a": "1", "b": "2", "c": "3"}}}
	first := build(t, "oci:"+r.layout(t).dir(t))
	data, err := os.ReadFile(first.Path())
	if err != nil {
		t.Fatal(err)
	}
	old := syscall.Umask(0o077)
	defer syscall.Umask(old)
	zone := time.Local
	defer func() { time.Local = zone }()
	time.Local = time.FixedZone("UTC+14", 14*3600)
	for _, procs := range []int{1, 4} {
		func() {
			defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(procs))
			again := build(t, "oci-archive:"+r.layout(t).archive(t))
			if again.ID != first.ID {
				t.Errorf("with %d processors: id %s, then %s", procs, first.ID, again.ID)
			}
			if b, err := os.ReadFile(again.Path()); err != nil || !bytes.Equal(b, data) {
				t.Errorf("the images differ (%v)", err)
			}
		}()
	}
}

// bz2 is a tar stream with a file f that holds "bz", compressed by bzip2, for which Go has no writer.
const bz2 = "QlpoOTFBWSZTWdelxiMAAG/bgMkAQAB3gAAA8QAeEAgIIABUQmjRoNAGgkUmjQYmRkfW2IIQZiCEcPzreLkaoEMGcwm0aMR2QgV4yW9DxJDcHWXjN5kERAPi7kinChIa9LjEYA=="

func TestBuild_tar_compressed_in_any_way_is_the_same(t *testing.T) {
	plain := imagetest.LayerOf(t, imagetest.Reg("d/f=1"), imagetest.Reg(".wh.f=2"))
	var x bytes.Buffer
	w, err := xz.NewWriter(&x)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(plain); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	ids := map[string]bool{}
	for _, b := range [][]byte{plain, imagetest.Pack(t, "gzip", plain), imagetest.Pack(t, "zstd", plain), x.Bytes(), append(imagetest.Pack(t, "gzip", plain[:700]), imagetest.Pack(t, "gzip", plain[700:])...)} {
		file := filepath.Join(t.TempDir(), "root.tar.x")
		imagetest.Write(t, file, string(b))
		img := buildTarFile(t, file, nil)
		ids[img.ID] = true
		ids[buildTarFile(t, "-", bytes.NewReader(b)).ID] = true
		// In a plain archive, names with .wh. are names.
		if got, _ := imagetest.DumpImage(t, img.Path()); got[".wh.f"].Size != 1 {
			t.Errorf("got %v", got)
		}
	}
	if len(ids) != 1 {
		t.Errorf("several ids: %v", ids)
	}
}

func TestBuild_tar_compressed_by_bzip2(t *testing.T) {
	b, err := base64.StdEncoding.DecodeString(bz2)
	if err != nil {
		t.Fatal(err)
	}
	img := buildTarFile(t, "-", bytes.NewReader(b))
	if got, _ := imagetest.DumpImage(t, img.Path()); got["f"].Hash != imagetest.HashOf(t, strings.NewReader("bz")) {
		t.Errorf("got %v", got)
	}
}

func TestBuild_unchanged_image_is_not_built_again(t *testing.T) {
	r := small(t)
	s, dir := newStore(t), r.layout(t).dir(t)
	o := Options{Store: s, From: "oci:" + dir, Platform: "linux/amd64", Tag: "one"}
	first, err := Build(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	first.Created = first.Created.Add(-1000 * time.Hour) // the age does not matter
	rewriteRecord(t, first)
	o.Tag = "two"
	again, err := Build(t.Context(), o)
	if err != nil || !again.Cached || again.ID != first.ID || !slices.Equal(again.Tags, []string{"one:latest", "two:latest"}) {
		t.Errorf("got %+v (%v), want the first one with a second tag", again, err)
	}
	o.NoCache = true
	if again, err = Build(t.Context(), o); err != nil || again.Cached || again.ID != first.ID {
		t.Errorf("without the cache: %+v (%v)", again, err)
	}
	r.layers[2] = imagetest.LayerOf(t, imagetest.Reg("other=1"))
	for name, b := range r.layout(t) {
		imagetest.Write(t, filepath.Join(dir, name), string(b))
	}
	o.NoCache = false
	if again, err = Build(t.Context(), o); err != nil || again.Cached || again.ID == first.ID {
		t.Errorf("after a change: %+v (%v)", again, err)
	}
}

// nothingLeft fails the test if a failed build has left something in a store or beside it.
func nothingLeft(t *testing.T, s *image.Store, outside string) {
	t.Helper()
	for _, dir := range []string{"images", "tmp"} {
		entries, err := os.ReadDir(filepath.Join(s.Dir(), dir))
		if err != nil {
			t.Fatal(err)
		}
		if len(entries) > 0 {
			t.Errorf("the failed build left %v in %s", entries, dir)
		}
	}
	entries, err := os.ReadDir(outside)
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) != 1 || entries[0].Name() != "store" {
		t.Errorf("beside the store there is %v", entries)
	}
}

func TestBuild_hostile_image_is_refused_and_leaves_nothing(t *testing.T) {
	flip := func(b []byte) []byte {
		b = bytes.Clone(b)
		b[len(b)/2] ^= 1
		return b
	}
	layerBlob := func(t *testing.T, f ociFiles, r recipe, i int) string {
		how := ""
		if i < len(r.pack) {
			how = r.pack[i]
		}
		return "blobs/" + strings.Replace(digestOf(imagetest.Pack(t, how, r.layers[i])), ":", "/", 1)
	}
	for name, c := range map[string]struct {
		edit func(t *testing.T, r *recipe)
		f    func(t *testing.T, r recipe, f ociFiles)
		want error
	}{
		"a layer with a flipped bit, plain": {f: func(t *testing.T, r recipe, f ociFiles) {
			n := layerBlob(t, f, r, 1)
			f[n] = flip(f[n])
		}, want: image.ErrDigest},
		"a layer with a flipped bit, gzip": {f: func(t *testing.T, r recipe, f ociFiles) {
			n := layerBlob(t, f, r, 0)
			f[n] = flip(f[n])
		}, want: image.ErrDigest},
		"a layer that is cut": {f: func(t *testing.T, r recipe, f ociFiles) {
			n := layerBlob(t, f, r, 0)
			f[n] = f[n][:len(f[n])-3]
		}, want: image.ErrDigest},
		"a layer that goes on": {f: func(t *testing.T, r recipe, f ociFiles) {
			n := layerBlob(t, f, r, 1)
			f[n] = append(bytes.Clone(f[n]), make([]byte, 512)...)
		}, want: image.ErrDigest},
		"a layer that is missing": {f: func(t *testing.T, r recipe, f ociFiles) { delete(f, layerBlob(t, f, r, 2)) }, want: image.ErrBadManifest},
		"a layer whose size lies": {edit: func(_ *testing.T, r *recipe) {
			r.editLayer = func(i int, d doc) { d["size"] = d["size"].(int) + 1 }
		}, want: image.ErrDigest},
		"a layer of 8 EiB": {edit: func(_ *testing.T, r *recipe) {
			r.editLayer = func(_ int, d doc) { d["size"] = int64(1<<63 - 1) }
		}, want: image.ErrDigest},
		"a layer of a negative size": {edit: func(_ *testing.T, r *recipe) {
			r.editLayer = func(_ int, d doc) { d["size"] = -1 }
		}, want: image.ErrBadManifest},
		"a layer with another's diff id": {edit: func(_ *testing.T, r *recipe) {
			r.editConfig = func(d doc) { slices.Reverse(d["rootfs"].(doc)["diff_ids"].([]string)) }
		}, want: image.ErrDigest},
		"a layer of another type": {edit: func(_ *testing.T, r *recipe) {
			r.editLayer = func(_ int, d doc) { d["mediaType"] = "application/vnd.cncf.helm.chart.content.v1.tar+gzip" }
		}, want: image.ErrBadManifest},
		"a layer that may not be distributed": {edit: func(_ *testing.T, r *recipe) {
			r.editLayer = func(_ int, d doc) {
				d["mediaType"], d["urls"] = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", []string{"http://127.0.0.1:1/x"}
			}
		}, want: image.ErrBadManifest},
		"a layer whose digest is a path": {edit: func(_ *testing.T, r *recipe) {
			r.editLayer = func(_ int, d doc) { d["digest"] = "sha256:../../../../etc/passwd" }
		}, want: image.ErrBadManifest},
		"a layer of xz":              {edit: func(t *testing.T, r *recipe) { r.layers[1] = []byte("\xfd7zXZ\x00 whatever follows") }, want: image.ErrBadArchive},
		"a layer that is no archive": {edit: func(t *testing.T, r *recipe) { r.layers[1] = bytes.Repeat([]byte("garbage!"), 1000) }, want: image.ErrBadArchive},
		"a layer that ends in the middle of gzip": {edit: func(t *testing.T, r *recipe) {
			b := imagetest.Pack(t, "gzip", r.layers[1])
			r.layers[1] = b[:len(b)-9] // its digest is right, and its diff id does not matter
		}, want: image.ErrBadArchive},
		"too few diff ids": {edit: func(_ *testing.T, r *recipe) {
			r.editConfig = func(d doc) { d["rootfs"].(doc)["diff_ids"] = []string{} }
		}, want: image.ErrBadManifest},
		"a root filesystem of another kind": {edit: func(_ *testing.T, r *recipe) {
			r.editConfig = func(d doc) { d["rootfs"].(doc)["type"] = "vhd" }
		}, want: image.ErrBadManifest},
		"513 layers": {edit: func(t *testing.T, r *recipe) {
			r.editManifest = func(d doc) {
				l := d["layers"].([]doc)[1]
				d["layers"] = slices.Repeat([]doc{l}, 513)
			}
		}, want: image.ErrBadManifest},
		"a configuration with a flipped bit": {f: func(t *testing.T, r recipe, f ociFiles) {
			for n, b := range f {
				if bytes.Contains(b, []byte("diff_ids")) {
					f[n] = bytes.Replace(b, []byte("linux"), []byte("linuX"), 1)
				}
			}
		}, want: image.ErrDigest},
		"a configuration of an artifact": {edit: func(_ *testing.T, r *recipe) {
			r.editManifest = func(d doc) { d["config"].(doc)["mediaType"] = "application/vnd.oci.empty.v1+json" }
		}, want: image.ErrBadManifest},
		"a configuration of 5 MiB": {edit: func(_ *testing.T, r *recipe) {
			r.editConfig = func(d doc) { d["comment"] = strings.Repeat("x", 5<<20) }
		}, want: image.ErrBadManifest},
		"300 KiB of variables": {edit: func(_ *testing.T, r *recipe) { r.config["Env"] = []string{"A=" + strings.Repeat("x", 300<<10)} }, want: image.ErrBadManifest},
		"2000 labels": {edit: func(_ *testing.T, r *recipe) {
			l := doc{}
			for i := range 2000 {
				l[fmt.Sprint(i)] = ""
			}
			r.config["Labels"] = l
		}, want: image.ErrBadManifest},
		"a zero byte in a variable":          {edit: func(_ *testing.T, r *recipe) { r.config["Env"] = []string{"A=\x00"} }, want: image.ErrBadManifest},
		"a working directory that is a file": {edit: func(_ *testing.T, r *recipe) { r.config["WorkingDir"] = "/bin/sh" }, want: image.ErrBadManifest},
		"another architecture":               {edit: func(_ *testing.T, r *recipe) { r.arch = "riscv64" }, want: image.ErrNoPlatform},
		"another system":                     {edit: func(_ *testing.T, r *recipe) { r.editConfig = func(d doc) { d["os"] = "windows" } }, want: image.ErrNoPlatform},
		"a manifest that is an index too": {edit: func(_ *testing.T, r *recipe) {
			r.editManifest = func(d doc) { d["manifests"] = []doc{} }
		}, want: image.ErrBadManifest},
		"a manifest of schema 1":              {edit: func(_ *testing.T, r *recipe) { r.editManifest = func(d doc) { d["schemaVersion"] = 1 } }, want: image.ErrBadManifest},
		"a manifest with something behind it": {f: func(t *testing.T, _ recipe, f ociFiles) { f["index.json"] = append(f["index.json"], "{}"...) }, want: image.ErrBadManifest},
		"an index of a wrong type": {edit: func(_ *testing.T, r *recipe) {
			r.editIndex = func(d doc) { d["manifests"].([]doc)[0]["mediaType"] = "text/plain" }
		}, want: image.ErrBadManifest},
		"an index that leads to itself": {f: func(t *testing.T, _ recipe, f ociFiles) {
			// A ring of digests is impossible to make. So Build must limit the length of the chain.
			d := f.typed(typeIndex, []byte(`{"schemaVersion":2,"manifests":[]}`))
			for range 10 {
				d = f.typed(typeIndex, jsonOf(t, doc{"schemaVersion": 2, "manifests": []doc{d}}))
			}
			f["index.json"] = jsonOf(t, doc{"schemaVersion": 2, "manifests": []doc{d}})
		}, want: image.ErrBadManifest},
		"an index whose entry names itself": {f: func(t *testing.T, _ recipe, f ociFiles) {
			self := "sha256:" + strings.Repeat("0", 64)
			b := jsonOf(t, doc{"schemaVersion": 2, "manifests": []doc{{"mediaType": typeIndex, "digest": self, "size": 0}}})
			f["blobs/sha256/"+strings.Repeat("0", 64)] = b
			f["index.json"] = bytes.Replace(b, []byte(`"size":0`), []byte(fmt.Sprintf(`"size":%d`, len(b))), 1)
		}, want: image.ErrDigest},
		"an index of 5000 entries": {edit: func(t *testing.T, r *recipe) {
			r.editIndex = func(d doc) { d["manifests"] = slices.Repeat(d["manifests"].([]doc), 5000) }
		}, want: image.ErrBadManifest},
		"an index of 5 MiB":       {f: func(t *testing.T, _ recipe, f ociFiles) { f["index.json"] = make([]byte, 5<<20) }, want: image.ErrBadManifest},
		"an index without images": {edit: func(_ *testing.T, r *recipe) { r.editIndex = func(d doc) { d["manifests"] = []doc{} } }, want: image.ErrNoSource},
		"no index":                {f: func(t *testing.T, _ recipe, f ociFiles) { delete(f, "index.json") }, want: image.ErrBadManifest},
		"no oci-layout":           {f: func(t *testing.T, _ recipe, f ociFiles) { delete(f, "oci-layout") }, want: image.ErrBadManifest},
		"a layout of version 2":   {f: func(t *testing.T, _ recipe, f ociFiles) { f["oci-layout"] = []byte(`{"imageLayoutVersion":"2.0"}`) }, want: image.ErrBadManifest},
		"a file outside by dots":  {edit: func(t *testing.T, r *recipe) { r.layers[2] = imagetest.LayerOf(t, imagetest.Reg("../../../escaped=1")) }, want: image.ErrBadArchive},
		"a hard link to the host": {edit: func(t *testing.T, r *recipe) {
			r.layers[2] = imagetest.LayerOf(t, imagetest.Sym("e", "/etc"), imagetest.Lnk("l", "e/passwd"))
		}, want: image.ErrBadArchive},
		"more than MaxBytes in two layers": {edit: func(t *testing.T, r *recipe) {
			data := map[string][]byte{"z": make([]byte, 40<<20)}
			r.layers[1], r.layers[2] = imagetest.TarOf(t, data, imagetest.Reg("z")), imagetest.TarOf(t, data, imagetest.Reg("z"))
		}, want: image.ErrTooLarge},
	} {
		t.Run(name, func(t *testing.T) {
			r := small(t)
			if c.edit != nil {
				c.edit(t, &r)
			}
			files := r.layout(t)
			if c.f != nil {
				c.f(t, r, files)
			}
			for _, from := range []string{"oci:" + files.dir(t), "oci-archive:" + files.archive(t)} {
				outside := t.TempDir()
				s, err := image.OpenStore(filepath.Join(outside, "store"))
				if err != nil {
					t.Fatal(err)
				}
				_, err = Build(t.Context(), Options{Store: s, From: from, Platform: "linux/amd64", MaxBytes: 64 << 20})
				if !errors.Is(err, c.want) {
					t.Errorf("%s: got %v, want %v", from, err, c.want)
				}
				nothingLeft(t, s, outside)
			}
		})
	}
}

func TestBuild_layout_directory_cannot_lead_outside(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "secret")
	imagetest.Write(t, secret, "of the host")
	for name, spoil := range map[string]func(t *testing.T, blob string){
		"a symlink to a file of the host": func(t *testing.T, blob string) { imagetest.Must(t, os.Symlink(secret, blob)) },
		"a symlink to a device":           func(t *testing.T, blob string) { imagetest.Must(t, os.Symlink("/dev/zero", blob)) },
		"a fifo":                          func(t *testing.T, blob string) { imagetest.Must(t, syscall.Mkfifo(blob, 0o600)) },
		"a directory":                     func(t *testing.T, blob string) { imagetest.Must(t, os.Mkdir(blob, 0o700)) },
	} {
		t.Run(name, func(t *testing.T) {
			r := small(t)
			dir := r.layout(t).dir(t)
			blob := filepath.Join(dir, "blobs", strings.Replace(digestOf(imagetest.Pack(t, "gzip", r.layers[0])), ":", "/", 1))
			imagetest.Must(t, os.Remove(blob))
			spoil(t, blob)
			s := newStore(t)
			if img, err := Build(t.Context(), Options{Store: s, From: "oci:" + dir, Platform: "linux/amd64"}); err == nil {
				t.Errorf("built %s", img.ID)
			}
		})
	}
}

func TestBuild_docker_archive_that_lies_is_refused(t *testing.T) {
	link := func(name, to string) tar.Header {
		return tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: to, Mode: 0o777}
	}
	for name, c := range map[string]struct {
		f    func(t *testing.T, f ociFiles) []tar.Header // returns further members
		from string
		want error
	}{
		"no manifest.json": {f: func(_ *testing.T, f ociFiles) []tar.Header { delete(f, "manifest.json"); return nil }, want: image.ErrBadManifest},
		"a manifest.json of two images": {f: func(t *testing.T, f ociFiles) []tar.Header {
			f["manifest.json"] = jsonOf(t, []doc{{"Config": "x"}, {"Config": "y"}})
			return nil
		}, want: image.ErrNoSource},
		"a tag that it does not have": {from: ":me/other:v2", want: image.ErrNoSource},
		"a configuration of the host": {f: func(t *testing.T, f ociFiles) []tar.Header {
			f["manifest.json"] = jsonOf(t, []doc{{"Config": "../../etc/passwd"}})
			return nil
		}, want: image.ErrBadManifest},
		"a configuration that is changed": {f: func(_ *testing.T, f ociFiles) []tar.Header {
			for n, b := range f {
				if strings.HasSuffix(n, ".json") && n != "manifest.json" {
					f[n] = append(b, ' ')
				}
			}
			return nil
		}, want: image.ErrDigest},
		"a layer that is changed": {f: func(_ *testing.T, f ociFiles) []tar.Header {
			for n, b := range f {
				if strings.HasSuffix(n, "/layer.tar") {
					f[n] = append(b, make([]byte, 512)...)
					break
				}
			}
			return nil
		}, want: image.ErrDigest},
		"layers that are links in a ring": {f: func(_ *testing.T, f ociFiles) []tar.Header {
			var out []tar.Header
			for n := range f {
				if strings.HasSuffix(n, "/layer.tar") {
					delete(f, n)
					out = append(out, link(n, "../ring"))
				}
			}
			return append(out, link("ring", "gnir"), link("gnir", "ring"))
		}, want: image.ErrBadArchive},
		"layers that are links to the host": {f: func(_ *testing.T, f ociFiles) []tar.Header {
			var out []tar.Header
			for n := range f {
				if strings.HasSuffix(n, "/layer.tar") {
					delete(f, n)
					out = append(out, link(n, "/etc/passwd"))
				}
			}
			return out
		}, want: image.ErrBadManifest},
		"17000 members": {f: func(_ *testing.T, f ociFiles) []tar.Header {
			var out []tar.Header
			for i := range 17000 {
				out = append(out, imagetest.Reg(fmt.Sprint("m", i)))
			}
			return out
		}, want: image.ErrTooLarge},
	} {
		t.Run(name, func(t *testing.T) {
			files := small(t).dockerArchive(t, "me/app:v1")
			var more []tar.Header
			if c.f != nil {
				more = c.f(t, files)
			}
			stream := files.tar(t)
			stream = append(stream[:len(stream)-1024], imagetest.TarOf(t, nil, more...)...)
			file := filepath.Join(t.TempDir(), "x.tar")
			imagetest.Write(t, file, string(stream))
			outside := t.TempDir()
			s, err := image.OpenStore(filepath.Join(outside, "store"))
			imagetest.Must(t, err)
			_, err = Build(t.Context(), Options{Store: s, From: "docker-archive:" + file + c.from, Platform: "linux/amd64"})
			if !errors.Is(err, c.want) {
				t.Errorf("got %v, want %v", err, c.want)
			}
			nothingLeft(t, s, outside)
		})
	}
}

func TestBuild_old_docker_archive_with_links_for_equal_layers(t *testing.T) {
	r := small(t)
	r.layers[1] = r.layers[0]
	files := r.dockerArchive(t)
	want := build(t, "docker-archive:"+files.archive(t))
	first := strings.TrimPrefix(digestOf(r.layers[0]), "sha256:")
	files["manifest.json"] = bytes.Replace(files["manifest.json"], []byte(first+"/layer.tar"), []byte("0123/layer.tar"), 1)
	stream := files.tar(t)
	stream = append(stream[:len(stream)-1024], imagetest.TarOf(t, nil, imagetest.Sym("0123/layer.tar", "../"+first+"/layer.tar"))...)
	file := filepath.Join(t.TempDir(), "x.tar")
	imagetest.Write(t, file, string(stream))
	if got := build(t, "docker-archive:"+file); got.ID != want.ID {
		t.Errorf("id %s, want %s", got.ID, want.ID)
	}
}

func TestBuild_image_of_several_platforms_is_chosen(t *testing.T) {
	f := ociFiles{"oci-layout": []byte(`{"imageLayoutVersion":"1.0.0"}`)}
	var list []doc
	for _, p := range []doc{{"os": "linux", "architecture": "arm64", "variant": "v8"}, {"os": "linux", "architecture": "amd64"},
		{"os": "windows", "architecture": "amd64"}, {"os": "unknown", "architecture": "unknown"}} {
		d := recipe{layers: [][]byte{imagetest.LayerOf(t, imagetest.Reg(fmt.Sprintf("%v=1", p["architecture"])))}, arch: fmt.Sprint(p["architecture"])}.manifest(t, f)
		d["platform"] = p
		if p["os"] == "unknown" {
			d["annotations"] = doc{"vnd.docker.reference.type": "attestation-manifest"}
		}
		list = append(list, d)
	}
	d := f.typed(typeIndex, jsonOf(t, doc{"schemaVersion": 2, "manifests": list}))
	f["index.json"] = jsonOf(t, doc{"schemaVersion": 2, "manifests": []doc{d}})
	dir := f.dir(t)
	for platform, want := range map[string]string{"linux/amd64": "amd64", "linux/arm64": "arm64", "linux/arm64/v8": "arm64", "linux/s390x": "", "linux/arm64/v7": ""} {
		img, err := Build(t.Context(), Options{Store: newStore(t), From: "oci:" + dir, Platform: platform})
		switch {
		case want == "":
			if !errors.Is(err, image.ErrNoPlatform) || !strings.Contains(err.Error(), "linux/arm64") {
				t.Errorf("%s: got %v", platform, err)
			}
		case err != nil:
			t.Errorf("%s: %v", platform, err)
		default:
			if got, _ := imagetest.DumpImage(t, img.Path()); got[want].Size != 1 || img.Architecture != want {
				t.Errorf("%s: got %v", platform, got)
			}
		}
	}
	// The digest of one of them selects it too.
	img, err := Build(t.Context(), Options{Store: newStore(t), From: "oci:" + dir + "@" + d["digest"].(string), Platform: "linux/amd64"})
	if err != nil || img.Architecture != "amd64" {
		t.Errorf("by digest: %v", err)
	}
	if _, err := Build(t.Context(), Options{Store: newStore(t), From: "oci:" + dir + ":nothing", Platform: "linux/amd64"}); !errors.Is(err, image.ErrNoSource) {
		t.Errorf("a name that is not there: %v", err)
	}
}

func TestBuild_layout_of_several_images_wants_a_name(t *testing.T) {
	f := ociFiles{"oci-layout": []byte(`{"imageLayoutVersion":"1.0.0"}`)}
	var list []doc
	for _, tag := range []string{"one", "two"} {
		list = append(list, recipe{layers: [][]byte{imagetest.LayerOf(t, imagetest.Reg(tag+"=1"))}, tag: tag}.manifest(t, f))
	}
	named := recipe{layers: [][]byte{imagetest.LayerOf(t, imagetest.Reg("three=1"))}}.manifest(t, f)
	named["annotations"] = doc{"io.containerd.image.name": "docker.io/me/three:latest"}
	named["platform"] = doc{"os": "linux", "architecture": "amd64"}
	other := recipe{layers: [][]byte{imagetest.LayerOf(t, imagetest.Reg("arm=1"))}, tag: "one", arch: "arm64"}.manifest(t, f)
	other["platform"] = doc{"os": "linux", "architecture": "arm64"}
	list[0]["platform"] = doc{"os": "linux", "architecture": "amd64"}
	f["index.json"] = jsonOf(t, doc{"schemaVersion": 2, "manifests": append(list, named, other)})
	dir := f.dir(t)
	for from, want := range map[string]string{"": "", ":one": "one", ":two": "two", ":me/three": "three", ":four": "", "@" + list[1]["digest"].(string): "two"} {
		img, err := Build(t.Context(), Options{Store: newStore(t), From: "oci:" + dir + from, Platform: "linux/amd64"})
		switch {
		case want == "":
			if !errors.Is(err, image.ErrNoSource) || !strings.Contains(err.Error(), "two") {
				t.Errorf("%q: got %v, want that a name is missing", from, err)
			}
		case err != nil:
			t.Errorf("%q: %v", from, err)
		default:
			if got, _ := imagetest.DumpImage(t, img.Path()); got[want].Size != 1 {
				t.Errorf("%q: got %v", from, got)
			}
		}
	}
}

func TestBuild_cancelled_while_it_reads_leaves_nothing(t *testing.T) {
	outside := t.TempDir()
	s, err := image.OpenStore(filepath.Join(outside, "store"))
	imagetest.Must(t, err)
	r, w := io.Pipe()
	defer w.Close()
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("enough")
	stream := imagetest.TarOf(t, map[string][]byte{"f": make([]byte, 1<<20)}, imagetest.Reg("f"))
	go func() {
		if _, err := w.Write(stream[:1<<19]); err == nil {
			cancel(cause)
			_, _ = w.Write(stream[1<<19:])
			w.Close()
		}
	}()
	if _, err := Build(ctx, Options{Store: s, From: "tar:-", Stdin: r}); !errors.Is(err, cause) {
		t.Errorf("got %v, want %v", err, cause)
	}
	r.Close()
	nothingLeft(t, s, outside)
}
