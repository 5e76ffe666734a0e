package sandbox

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/rootfs/kernel"
)

// putKernel puts a kernel with a configuration into a store.
func putKernel(t *testing.T, s *Store, id string, kind kernel.Kind, config string) {
	t.Helper()
	dir := filepath.Join(s.KernelDir(), "kernels", id)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	record, err := json.Marshal(map[string]any{
		"format_version": 1, "id": id, "kind": kind, "version": "6.1", "arch": "amd64", "image": "vmlinux", "image_size": 1,
		"config": "config", "created": time.Unix(1e9, 0),
	})
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"kernel.json": string(record), "vmlinux": "x", "config": config} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func TestKernelIsTheOneThatIsNamedOrOneForHostAndImage(t *testing.T) {
	s, err := OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	putKernel(t, s, "built-1", kernel.Built, "CONFIG_TUN=y\n")
	putKernel(t, s, "debian-1", kernel.Debian, "CONFIG_TUN=y\nCONFIG_SWAP=y\n")
	for _, c := range []struct {
		name, kernel string
		host         kernel.Host
		needs        string
		want         string
		err          error
		says         string
	}{
		{"nothing is said", "", kernel.Hardware, "", "built-1", nil, ""},
		{"the image needs what the usual one has", "", kernel.Hardware, "tun", "built-1", nil, ""},
		{"the image needs what Debian's has", "", kernel.Hardware, "tun,swap", "debian-1", nil, ""},
		{"the image needs what no kernel has that the host runs", "", kernel.Soft, "tun,swap", "", kernel.ErrFeature, "CONFIG_SWAP"},
		{"a name counts more than the image", "built", kernel.Hardware, "swap", "built-1", nil, ""},
		{"the image needs what nobody knows", "", kernel.Hardware, "flux", "", kernel.ErrFeature, "label " + kernel.NeedsLabel},
		{"a name counts more than what nobody knows", "debian", kernel.Hardware, "flux", "debian-1", nil, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			k, err := s.findKernel(c.kernel, c.host, c.needs)
			if c.err != nil {
				if !errors.Is(err, c.err) || !strings.Contains(err.Error(), c.says) {
					t.Errorf("got %v, want %q", err, c.says)
				}
				return
			}
			if err != nil || k.ID != c.want {
				t.Errorf("got %v, %v; want %s", k, err, c.want)
			}
		})
	}
}
