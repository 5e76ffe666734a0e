package builder

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/imagetest"
	"github.com/drowse-vm/drowse/rootfs/image/oci"
)

// export returns an image of a store of its own in the given format.
func export(t *testing.T, img *image.Image, f oci.Format) []byte {
	t.Helper()
	s := imagetest.Must(image.OpenStore(filepath.Dir(filepath.Dir(filepath.Dir(img.Path())))))
	var out bytes.Buffer
	var last, all int64
	if err := oci.Export(t.Context(), s, img, f, &out, func(done, total int64) { last, all = done, total }); err != nil {
		t.Fatal(err)
	}
	if last != all || all == 0 {
		t.Errorf("%s: told of %d bytes of %d", f, last, all)
	}
	return out.Bytes()
}

func TestExport_and_build_again_gives_the_same_image(t *testing.T) {
	file := filepath.Join(t.TempDir(), "all.tar")
	imagetest.Write(t, file, string(imagetest.Everything(t)))
	plain := buildTarFile(t, file, nil)
	r := recipe{layers: [][]byte{imagetest.Everything(t)}, config: small(t).config}
	configured := build(t, "oci:"+r.layout(t).dir(t))
	for name, img := range map[string]*image.Image{"plain": plain, "with a configuration": configured} {
		if b := export(t, img, oci.FormatEROFS); !bytes.Equal(b, imagetest.Must(os.ReadFile(img.Path()))) {
			t.Errorf("%s: erofs differs", name)
		}
		stream := export(t, img, oci.FormatTar)
		imagetest.Compare(t, name+", tar", imagetest.Must2(imagetest.DumpImage(t, img.Path())), imagetest.DumpTar(t, bytes.NewReader(stream)))
		again := buildTarFile(t, "-", bytes.NewReader(stream))
		if img == plain && again.ID != img.ID {
			t.Errorf("%s: built again from its tar: %s, want %s", name, again.ID, img.ID)
		}
		archive := export(t, img, oci.FormatOCIArchive)
		if !bytes.Equal(archive, export(t, img, oci.FormatOCIArchive)) {
			t.Errorf("%s: two archives of one image differ", name)
		}
		oci, err := Build(t.Context(), Options{Store: newStore(t), From: "oci-archive:-", Stdin: bytes.NewReader(archive)})
		if err != nil {
			t.Fatal(err)
		}
		if docker, err := Build(t.Context(), Options{Store: newStore(t), From: "docker-archive:-:" + img.Tags[0], Stdin: bytes.NewReader(archive)}); err != nil || docker.ID != img.ID {
			t.Errorf("%s: built again from its archive as one of docker's: %v", name, err)
		}
		if oci.ID != img.ID || !slices.Equal(oci.Env, img.Env) || oci.User != img.User {
			t.Errorf("%s: built again from its archive: %s %v, want %s", name, oci.ID, oci.RunConfig, img.ID)
		}
	}
}

func TestExport_refuses(t *testing.T) {
	file := filepath.Join(t.TempDir(), "x.tar")
	imagetest.Write(t, file, string(imagetest.LayerOf(t, imagetest.Reg("d/.wh.f=1"))))
	img := buildTarFile(t, file, nil)
	s := imagetest.Must(image.OpenStore(filepath.Dir(filepath.Dir(filepath.Dir(img.Path())))))
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("enough")
	cancel(cause)
	for name, c := range map[string]struct {
		ctx    context.Context
		format oci.Format
		want   error
	}{
		"a format that is not there":   {t.Context(), "iso", image.ErrInvalidOption},
		"a whiteout's name in a layer": {t.Context(), oci.FormatOCIArchive, image.ErrInvalidOption},
		"what was cancelled":           {ctx, oci.FormatTar, cause},
		"what was cancelled, as erofs": {ctx, oci.FormatEROFS, cause},
	} {
		if err := oci.Export(c.ctx, s, img, c.format, &bytes.Buffer{}, nil); !errors.Is(err, c.want) {
			t.Errorf("%s: got %v, want %v", name, err, c.want)
		}
	}
	if err := os.Truncate(img.Path(), img.Size-1); err != nil {
		t.Fatal(err)
	}
	if err := oci.Export(t.Context(), s, img, oci.FormatTar, &bytes.Buffer{}, nil); !errors.Is(err, image.ErrTruncated) {
		t.Errorf("a cut image: %v", err)
	}
	if left := imagetest.Must(os.ReadDir(filepath.Join(s.Dir(), "tmp"))); len(left) != 0 {
		t.Errorf("left in tmp: %v", left)
	}
}
