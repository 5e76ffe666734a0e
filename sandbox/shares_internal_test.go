package sandbox

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/rootfs/kernel"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state/statetest"
)

func TestParse_share_is_read_only_unless_said_otherwise(t *testing.T) {
	wd, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for in, want := range map[string]spec.Share{
		"/a:/b":      {Source: "/a", Path: "/b", Writable: false},
		"/a:/b:ro":   {Source: "/a", Path: "/b", Writable: false},
		"/a:/b:rw":   {Source: "/a", Path: "/b", Writable: true},
		"/a:c:/b:rw": {Source: "/a:c", Path: "/b", Writable: true},
		"x/../y/:/b": {Source: filepath.Join(wd, "y"), Path: "/b", Writable: false},
	} {
		if got, err := spec.ParseShare(in); err != nil || got != want {
			t.Errorf("%q: %+v, %v", in, got, err)
		}
	}
	for _, in := range []string{"", "/a", ":/b", "rw"} {
		if got, err := spec.ParseShare(in); !errors.Is(err, ErrSpec) {
			t.Errorf("%q: %+v, %v", in, got, err)
		}
	}
}

func TestShares_that_cannot_be_are_refused(t *testing.T) {
	many := func(n int) (all []spec.Share) {
		for i := range n {
			all = append(all, spec.Share{Source: "/srv", Path: fmt.Sprint("/mnt/", i)})
		}
		return all
	}
	var volumes []spec.VolumeMount
	for i := range spec.MaxVolumes {
		volumes = append(volumes, spec.VolumeMount{Name: fmt.Sprint("v", i), Path: fmt.Sprint("/v", i)})
	}
	for name, c := range map[string]struct {
		shares  []spec.Share
		volumes []spec.VolumeMount
		says    string
	}{
		"relative source":          {[]spec.Share{{Source: "srv", Path: "/b"}}, nil, "absolute"},
		"source with a way up":     {[]spec.Share{{Source: "/srv/../etc", Path: "/b"}}, nil, "absolute"},
		"path of the guest system": {[]spec.Share{{Source: "/srv", Path: "/proc/x"}}, nil, "system"},
		"path with a comma":        {[]spec.Share{{Source: "/srv", Path: "/a,b"}}, nil, "letters"},
		"no path":                  {[]spec.Share{{Source: "/srv"}}, nil, "letters"},
		"the same path twice":      {[]spec.Share{{Source: "/srv", Path: "/b"}, {Source: "/opt", Path: "/b"}}, nil, "once"},
		"the path of a volume":     {[]spec.Share{{Source: "/srv", Path: "/v1"}}, volumes, "once"},
		"too many":                 {many(spec.MaxShares + 1), nil, "at most 8"},
		"too many besides volumes": {many(5), volumes, "at most 12"},
	} {
		t.Run(name, func(t *testing.T) {
			if err := spec.ValidateShares(c.shares, c.volumes); !errors.Is(err, ErrSpec) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%v, want %q", err, c.says)
			}
		})
	}
	if err := spec.ValidateShares(many(4), volumes); err != nil {
		t.Error(err)
	}
}

func TestShares_of_what_is_missing_or_the_state_itself_are_refused(t *testing.T) {
	dir := t.TempDir()
	state := filepath.Join(dir, "state")
	s, err := Open(state)
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
		if err := s.findShares([]spec.Share{{Source: source, Path: "/b"}}); !errors.Is(err, spec.ErrShare) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := s.findShares([]spec.Share{{Source: filepath.Join(dir, "good"), Path: "/b"}}); err != nil {
		t.Error(err)
	}
}

func TestKernel_without_virtiofs_is_refused_for_shares(t *testing.T) {
	s, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	statetest.PutKernel(t, s.State, "built-1", kernel.Built, "CONFIG_FUSE_FS=y\nCONFIG_VIRTIO_FS=y\n")
	statetest.PutKernel(t, s.State, "debian-1", kernel.Debian, "CONFIG_FUSE_FS=y\nCONFIG_VIRTIO_FS=m\n")
	own := Spec{Shares: []spec.Share{{}}}.Features()
	if k, err := s.findKernel("", kernel.Hardware, "", own...); err != nil || k.ID != "built-1" {
		t.Errorf("%v, %v", k, err)
	}
	if _, err := s.findKernel("debian", kernel.Hardware, "", own...); !errors.Is(err, kernel.ErrFeature) || !strings.Contains(err.Error(), "--module virtiofs") {
		t.Error(err)
	}
	if k, err := s.findKernel("debian", kernel.Hardware, "", Spec{}.Features()...); err != nil || k.ID != "debian-1" {
		t.Errorf("without shares: %v, %v", k, err)
	}
}
