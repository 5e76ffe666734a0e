package builder

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/debian"
)

func TestParseSource(t *testing.T) {
	wd, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	digest := "sha256:" + strings.Repeat("0a", 32)
	for in, want := range map[string]Source{
		"debian:bookworm": {Kind: KindDebian, Suite: "bookworm"},
		"debian:sid":      {Kind: KindDebian, Suite: "sid"},
		"dir:/srv/root/":  {Kind: KindDir, Path: "/srv/root"},
		"dir:sub/../x:y":  {Kind: KindDir, Path: filepath.Join(wd, "x:y")},

		"tar:x:y.tar.gz":                       {Kind: KindTar, Path: filepath.Join(wd, "x:y.tar.gz")},
		"tar:-":                                {Kind: KindTar, Path: "-"},
		"oci:/x":                               {Kind: KindOCI, Path: "/x"},
		"oci:x:v1":                             {Kind: KindOCI, Path: filepath.Join(wd, "x"), Ref: "v1"},
		"oci:-":                                {Kind: KindOCI, Path: filepath.Join(wd, "-")},
		"oci:/x@" + digest:                     {Kind: KindOCI, Path: "/x", Ref: "@" + digest},
		"oci-archive:-":                        {Kind: KindOCIArchive, Path: "-"},
		"oci-archive:/x.tar:ghcr.io/me/app:v1": {Kind: KindOCIArchive, Path: "/x.tar", Ref: "ghcr.io/me/app:v1"},
		"docker-archive:/x.tar:me/app:v1":      {Kind: KindDockerArchive, Path: "/x.tar", Ref: "me/app:v1"},
		"docker-archive:-:app":                 {Kind: KindDockerArchive, Path: "-", Ref: "app"},
		"docker://debian":                      {Kind: KindRegistry, Ref: "index.docker.io/library/debian:latest"},
		"docker://ghcr.io/me/app@" + digest:    {Kind: KindRegistry, Ref: "ghcr.io/me/app@" + digest},
		"docker://localhost:5000/app:v1":       {Kind: KindRegistry, Ref: "localhost:5000/app:v1"},
	} {
		got, err := ParseSource(in)
		if err != nil || got != want {
			t.Errorf("%q: got %+v (%v), want %+v", in, got, err, want)
		}
		if again, err := ParseSource(got.String()); err != nil || again != got {
			t.Errorf("%q does not survive String: %+v (%v)", in, again, err)
		}
	}
	if a, err := ParseSource("registry:debian"); err != nil || a.String() != "docker://index.docker.io/library/debian:latest" {
		t.Errorf("registry:debian: %v (%v)", a, err)
	}
	for in, text := range map[string]string{
		"":                 "debian:SUITE",
		"bookworm":         "no kind in front",
		"qcow2:disk":       "dir:PATH",
		"debian:":          "suite",
		"debian:Book worm": "suite",
		"debian:-oops":     "suite",
		"debian:../x":      "suite",
		"dir:":             "path is empty",
	} {
		if _, err := ParseSource(in); !errors.Is(err, image.ErrUnsupportedSource) || !strings.Contains(err.Error(), text) {
			t.Errorf("%q: got %v, want ErrUnsupportedSource with %q", in, err, text)
		}
	}
}

func TestNormalizePackages(t *testing.T) {
	got, err := debian.NormalizePackages([]string{"python3,git", "git", " libc6:amd64 ", "vim=2:9.0.1378-2", "g++"})
	if want := []string{"g++", "git", "libc6:amd64", "python3", "vim=2:9.0.1378-2"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("got %v (%v), want %v", got, err, want)
	}
	for _, bad := range []string{"Python", "-oDebug=1", "a;b", "x", "?essential", "../x", "py*"} {
		if _, err := debian.NormalizePackages([]string{bad}); !errors.Is(err, image.ErrInvalidOption) {
			t.Errorf("%q: got %v, want ErrInvalidOption", bad, err)
		}
	}
	if _, err := debian.NormalizePackages([]string{strings.Repeat("aa,", 5) + manyPackages()}); !errors.Is(err, image.ErrInvalidOption) {
		t.Errorf("%d packages: got %v, want ErrInvalidOption", 1000+1, err)
	}
}

func manyPackages() string {
	var b strings.Builder
	for i := range 1000 + 1 {
		b.WriteString("p" + strings.Repeat("x", i%50) + string(rune('a'+i/50)) + ",")
	}
	return b.String()
}

func TestTags(t *testing.T) {
	for in, want := range map[string]string{"a": "a:latest", "ghcr.io/me/app": "ghcr.io/me/app:latest", "localhost:5000/app:v1": "localhost:5000/app:v1", "h:1/a": "h:1/a:latest", "me/my-image:V1.0_x": "me/my-image:V1.0_x"} {
		if got, err := image.NormalizeTag(in); err != nil || got != want {
			t.Errorf("%q: got %q (%v), want %q", in, got, err, want)
		}
	}
	for _, in := range []string{"", ":v", "a:", "A", "a b", "a//b", "../a", "a:-v", "a:b:c", "h:x/a", "h:/a", "h:1/", strings.Repeat("a", 300)} {
		if got, err := image.NormalizeTag(in); !errors.Is(err, image.ErrInvalidOption) {
			t.Errorf("%q: got %q (%v), want ErrInvalidOption", in, got, err)
		}
	}
	for _, c := range []struct {
		from    string
		include []string
		want    string
	}{
		{"debian:bookworm", nil, "debian:latest"},
		{"debian:bookworm", []string{"python3,git"}, "debian-python:latest"},
		{"debian:sid", []string{"g++", "git"}, "debian-g:latest"},
		{"debian:sid", []string{"git=1:2.3"}, "debian-git:latest"},
		{"dir:/srv/My Root_1", nil, "dir-my-root-1:latest"},
		{"dir:/", nil, "dir:latest"},
		{"tar:/x/Root FS.tar.gz", nil, "root-fs:latest"},
		{"tar:-", nil, "image:latest"},
		{"oci:/x/app:v1", nil, "app:v1"},
		{"oci-archive:/x/app.tar:ghcr.io/me/app:v1", nil, "app:latest"},
		{"docker-archive:/x/all.tar:me/app:v1", nil, "me/app:v1"},
		{"docker-archive:-", nil, "image:latest"},
		{"docker://debian:bookworm", nil, "debian:bookworm"},
		{"docker://docker.io/library/debian", nil, "debian:latest"},
		{"docker://ghcr.io/me/app", nil, "ghcr.io/me/app:latest"},
		{"docker://localhost:5000/app:v1", nil, "localhost:5000/app:v1"},
		{"docker://ghcr.io/me/app@sha256:" + strings.Repeat("0a", 32), nil, "ghcr.io/me/app:sha256-" + strings.Repeat("0a", 32)},
	} {
		s, err := ParseSource(c.from)
		if err != nil {
			t.Fatal(err)
		}
		got := defaultTag(s, c.include)
		if n, err := image.NormalizeTag(got); got != c.want || n != got || err != nil {
			t.Errorf("%s %v: got %q (%v), want %q", c.from, c.include, got, err, c.want)
		}
	}
}
