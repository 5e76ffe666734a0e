package main

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/drowse-vm/drowse/internal/test/hwkvm/wire"
)

func TestFindModule(t *testing.T) {
	ix := &index{wire.ModuleIndex{Modules: map[string]wire.Module{
		"sch_ingress": {Aliases: []string{"sch_clsact"}},
		"act_bpf":     {},
		"virtio_net":  {Aliases: []string{"virtio:d00000001v*"}},
		"vhost_vsock": {Aliases: []string{"char-major-10-241", "devname:vhost-vsock"}},
	}}}
	for _, c := range []struct{ name, request, want string }{
		{"by name", "act_bpf", "act_bpf"},
		{"by name with dashes", "act-bpf", "act_bpf"},
		{"by alias", "sch_clsact", "sch_ingress"},
		{"by device number", "char-major-10-241", "vhost_vsock"},
		{"by pattern", "virtio:d00000001v00001AF4", "virtio_net"},
		{"not at all", "net-pf-99", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			var want []string
			if c.want != "" {
				want = []string{c.want}
			}
			if got := ix.find(c.request); !slices.Equal(got, want) {
				t.Errorf("find(%q) is %q, want %q", c.request, got, want)
			}
		})
	}
}

func TestStaticNodes(t *testing.T) {
	for _, c := range []struct {
		name    string
		aliases []string
		want    []staticNode
	}{
		{"name and number make a node", []string{"devname:net/tun", "char-major-10-200"}, []staticNode{{"/dev/net/tun", 10, 200}}},
		{"a number alone makes none", []string{"char-major-10-200"}, nil},
		{"a name alone makes none", []string{"devname:kvm"}, nil},
		{"a name that leads out of /dev makes none", []string{"devname:../etc/x", "char-major-10-200"}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := staticNodes(c.aliases); !slices.Equal(got, c.want) {
				t.Errorf("got %v, want %v", got, c.want)
			}
		})
	}
}

func TestLook_path_uses_the_path_of_the_command(t *testing.T) {
	empty, full := t.TempDir(), t.TempDir()
	prog := filepath.Join(full, "prog")
	if err := os.WriteFile(prog, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(empty, "prog"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	got, err := lookPath("prog", []string{"X=1", "PATH=" + empty + ":" + full})
	if err != nil || got != prog {
		t.Errorf("got %q, error %v; want %q", got, err, prog)
	}
	if _, err := lookPath("prog", []string{"PATH=" + empty}); !errors.Is(err, exec.ErrNotFound) {
		t.Errorf("a file without the execute bit gives %v, want ErrNotFound", err)
	}
	if got, err := lookPath("./prog", nil); err != nil || got != "./prog" {
		t.Errorf("a name with a slash became %q, error %v", got, err)
	}
}
