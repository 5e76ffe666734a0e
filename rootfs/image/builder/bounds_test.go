package builder

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/fstree"
	"github.com/drowse-vm/drowse/rootfs/image/imagetest"
)

func TestDpkg_status_gives_installed_packages(t *testing.T) {
	got, err := parseDpkgStatus(`Package: git
Status: install ok installed
Architecture: amd64
Version: 1:2.39.5-0+deb12u2
Description: fast
 Version: 9
 .
 more

Package: gone
Status: deinstall ok config-files
Version: 1

Package: held
Status: hold ok installed
Architecture: all
Version: 2
`)
	want := []image.Package{{Name: "git", Version: "1:2.39.5-0+deb12u2", Architecture: "amd64"}, {Name: "held", Version: "2", Architecture: "all"}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v (%v), want %+v", got, err, want)
	}
}

func TestBuild_archive_of_more_files_than_it_may_have_is_refused(t *testing.T) {
	deep := strings.Repeat("d/", 200)
	for name, c := range map[string]struct {
		stream []byte
		max    int
		want   error
	}{
		"as many entries as possible":   {stream: imagetest.LayerOf(t, imagetest.Reg("a"), imagetest.Reg("b"), imagetest.Reg("c")), max: 3},
		"an entry too many":             {stream: imagetest.LayerOf(t, imagetest.Reg("a"), imagetest.Reg("b"), imagetest.Reg("c"), imagetest.Reg("d")), max: 3, want: image.ErrTooLarge},
		"one file many times":           {stream: imagetest.LayerOf(t, imagetest.Reg("a"), imagetest.Reg("a"), imagetest.Reg("a"), imagetest.Reg("a")), max: 3, want: image.ErrTooLarge},
		"as many implied directories":   {stream: imagetest.LayerOf(t, imagetest.Reg(deep+"f")), max: 201},
		"an implied directory too many": {stream: imagetest.LayerOf(t, imagetest.Reg(deep+"f")), max: 200, want: image.ErrTooLarge},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Build(t.Context(), Options{Store: newStore(t), From: "tar:-", Stdin: bytes.NewReader(c.stream), MaxFiles: c.max})
			if !errors.Is(err, c.want) || c.want == nil && err != nil {
				t.Errorf("got %v, want %v", err, c.want)
			}
			if c.want != nil && !strings.Contains(fmt.Sprint(err), "--max-files") {
				t.Errorf("%v does not say how to take it", err)
			}
		})
	}
	for _, bad := range []int{-1, fstree.MaxInodes + 1} {
		if _, err := Build(t.Context(), Options{Store: newStore(t), From: "tar:-", MaxFiles: bad}); !errors.Is(err, image.ErrInvalidOption) {
			t.Errorf("MaxFiles %d: %v", bad, err)
		}
	}
}

func TestDpkgStatus_of_somebody_else_is_bounded(t *testing.T) {
	installed := func(n, length int) string {
		return strings.Repeat("Package: "+strings.Repeat("<", length)+"\nStatus: install ok installed\n\n", n)
	}
	for name, c := range map[string]struct {
		text string
		n    int
		want error
	}{
		"a million stanzas of nothing":  {text: strings.Repeat("a:\n\n", 1<<20)},
		"a field of a million lines":    {text: "Package: p\nStatus: install ok installed\nDescription: d\n" + strings.Repeat(" x\n", 1<<20), n: 1},
		"as many packages as possible":  {text: installed(maxInstalled, 32), n: maxInstalled},
		"a package too many":            {text: installed(maxInstalled+1, 1), want: image.ErrTooLarge},
		"more of names than possible":   {text: installed(2, maxInstalledText/2+1), want: image.ErrTooLarge},
		"packages that are not there":   {text: strings.Repeat("Package: p\nStatus: deinstall ok config-files\n\n", maxInstalled+1)},
		"no newline at the end of it":   {text: "Package: p\nStatus: install ok installed", n: 1},
		"two stanzas and no name":       {text: "Status: hold ok installed\n\n\n\nStatus: hold ok installed\n", n: 2},
		"a status that goes on further": {text: "Package: p\nStatus: install ok\n installed\n"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := parseDpkgStatus(c.text)
			if len(got) != c.n || !errors.Is(err, c.want) || c.want == nil && err != nil {
				t.Fatalf("%d packages, %v; want %d, %v", len(got), err, c.n, c.want)
			}
			// The record of an accepted image can be read again, whatever JSON makes of its bytes.
			if c.want != nil {
				return
			}
			store := newStore(t)
			stream := imagetest.TarOf(t, map[string][]byte{"var/lib/dpkg/status": []byte(c.text)}, imagetest.Reg("var/lib/dpkg/status"))
			img, err := Build(t.Context(), Options{Store: store, From: "tar:-", Stdin: bytes.NewReader(stream)})
			if err != nil {
				t.Fatal(err)
			}
			if again, err := store.ByID(img.ID); err != nil || len(again.Packages) != c.n {
				t.Errorf("the record cannot be read: %v", err)
			}
		})
	}
}

func TestBuild_architecture_is_not_any_text(t *testing.T) {
	for text, want := range map[string]string{"armhf\namd64\n": "armhf", "\x1b[2Jx\n": runtime.GOARCH, strings.Repeat("x", 33): runtime.GOARCH, "": runtime.GOARCH} {
		stream := imagetest.TarOf(t, map[string][]byte{"var/lib/dpkg/arch": []byte(text)}, imagetest.Reg("var/lib/dpkg/arch"))
		img, err := Build(t.Context(), Options{Store: newStore(t), From: "tar:-", Stdin: bytes.NewReader(stream)})
		if err != nil || img.Architecture != want {
			t.Errorf("%.40q: %v, want %q", text, err, want)
		}
	}
	// For an image of layers the configuration gives the architecture.
	r := recipe{layers: [][]byte{imagetest.TarOf(t, map[string][]byte{"var/lib/dpkg/arch": []byte("i386\n")}, imagetest.Reg("var/lib/dpkg/arch"))}}
	if img := build(t, "oci:"+r.layout(t).dir(t)); img.Architecture != "amd64" {
		t.Errorf("of layers: %q", img.Architecture)
	}
}

func TestBuild_tar_of_an_image_archive_says_which_kind_it_is(t *testing.T) {
	r := small(t)
	for name, c := range map[string]struct {
		stream []byte
		says   string // "" when Build accepts it
	}{
		"of an OCI layout":                        {r.layout(t).tar(t), "oci-archive:"},
		"of docker's":                             {r.dockerArchive(t, "a:b").tar(t), "docker-archive:"},
		"a root filesystem with such names":       {imagetest.LayerOf(t, imagetest.Reg("oci-layout"), imagetest.Reg("index.json"), imagetest.Reg("manifest.json"), imagetest.Reg("etc/f")), ""},
		"a root filesystem without the usual one": {imagetest.LayerOf(t, imagetest.Reg("app/index.json"), imagetest.Reg("oci-layout")), ""},
	} {
		_, err := Build(t.Context(), Options{Store: newStore(t), From: "tar:-", Stdin: bytes.NewReader(c.stream)})
		if c.says == "" && err != nil || c.says != "" && (!errors.Is(err, image.ErrUnsupportedSource) || !strings.Contains(err.Error(), c.says)) {
			t.Errorf("%s: got %v, want %q", name, err, c.says)
		}
	}
}
