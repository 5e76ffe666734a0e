package sandbox

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/rootfs/kernel"
)

func TestParseShareIsReadOnlyUnlessSaidOtherwise(t *testing.T) {
	wd, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for in, want := range map[string]ShareSpec{
		"/a:/b":      {"/a", "/b", false},
		"/a:/b:ro":   {"/a", "/b", false},
		"/a:/b:rw":   {"/a", "/b", true},
		"/a:c:/b:rw": {"/a:c", "/b", true},
		"x/../y/:/b": {filepath.Join(wd, "y"), "/b", false},
	} {
		if got, err := ParseShare(in); err != nil || got != want {
			t.Errorf("%q: %+v, %v", in, got, err)
		}
	}
	for _, in := range []string{"", "/a", ":/b", "rw"} {
		if got, err := ParseShare(in); !errors.Is(err, ErrSpec) {
			t.Errorf("%q: %+v, %v", in, got, err)
		}
	}
}

func TestSharesThatCannotBeAreRefused(t *testing.T) {
	many := func(n int) (all []ShareSpec) {
		for i := range n {
			all = append(all, ShareSpec{Source: "/srv", Path: fmt.Sprint("/mnt/", i)})
		}
		return all
	}
	var volumes []VolumeMount
	for i := range MaxVolumes {
		volumes = append(volumes, VolumeMount{Name: fmt.Sprint("v", i), Path: fmt.Sprint("/v", i)})
	}
	for name, c := range map[string]struct {
		shares  []ShareSpec
		volumes []VolumeMount
		says    string
	}{
		"relative source":          {[]ShareSpec{{Source: "srv", Path: "/b"}}, nil, "absolute"},
		"source with a way up":     {[]ShareSpec{{Source: "/srv/../etc", Path: "/b"}}, nil, "absolute"},
		"path of the guest system": {[]ShareSpec{{Source: "/srv", Path: "/proc/x"}}, nil, "system"},
		"path with a comma":        {[]ShareSpec{{Source: "/srv", Path: "/a,b"}}, nil, "letters"},
		"no path":                  {[]ShareSpec{{Source: "/srv"}}, nil, "letters"},
		"the same path twice":      {[]ShareSpec{{Source: "/srv", Path: "/b"}, {Source: "/opt", Path: "/b"}}, nil, "once"},
		"the path of a volume":     {[]ShareSpec{{Source: "/srv", Path: "/v1"}}, volumes, "once"},
		"too many":                 {many(MaxShares + 1), nil, "at most 8"},
		"too many besides volumes": {many(5), volumes, "at most 12"},
	} {
		t.Run(name, func(t *testing.T) {
			if err := checkShares(c.shares, c.volumes); !errors.Is(err, ErrSpec) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%v, want %q", err, c.says)
			}
		})
	}
	if err := checkShares(many(4), volumes); err != nil {
		t.Error(err)
	}
}

func TestSharesOfWhatIsMissingOrTheStateItselfAreRefused(t *testing.T) {
	dir := t.TempDir()
	state := filepath.Join(dir, "state")
	s, err := OpenStore(state)
	if err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(dir, "link")
	if err := errors.Join(os.Symlink(state, link), os.MkdirAll(filepath.Join(state, "vms"), 0o700), os.Mkdir(filepath.Join(dir, "good"), 0o755),
		os.WriteFile(filepath.Join(dir, "file"), nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	for name, source := range map[string]string{
		"missing": filepath.Join(dir, "missing"), "a file": filepath.Join(dir, "file"), "proc": "/proc",
		"the state": state, "in the state": filepath.Join(state, "vms"), "above the state": dir, "everything": "/", "a link to the state": link,
	} {
		if err := s.findShares([]ShareSpec{{Source: source, Path: "/b"}}); !errors.Is(err, ErrShare) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := s.findShares([]ShareSpec{{Source: filepath.Join(dir, "good"), Path: "/b"}}); err != nil {
		t.Error(err)
	}
}

func TestKernelWithoutVirtiofsIsRefusedForShares(t *testing.T) {
	s, err := OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	putKernel(t, s, "built-1", kernel.Built, "CONFIG_FUSE_FS=y\nCONFIG_VIRTIO_FS=y\n")
	putKernel(t, s, "debian-1", kernel.Debian, "CONFIG_FUSE_FS=y\nCONFIG_VIRTIO_FS=m\n")
	own := Spec{Shares: []ShareSpec{{}}}.own()
	if k, err := s.findKernel("", kernel.Hardware, "", own...); err != nil || k.ID != "built-1" {
		t.Errorf("%v, %v", k, err)
	}
	if _, err := s.findKernel("debian", kernel.Hardware, "", own...); !errors.Is(err, kernel.ErrFeature) || !strings.Contains(err.Error(), "--module virtiofs") {
		t.Error(err)
	}
	if k, err := s.findKernel("debian", kernel.Hardware, "", Spec{}.own()...); err != nil || k.ID != "debian-1" {
		t.Errorf("without shares: %v, %v", k, err)
	}
}
