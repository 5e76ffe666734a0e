package sandbox

import (
	"errors"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/rootfs/kernel"
	"github.com/drowse-vm/drowse/sandbox/state/statetest"
)

func TestKernel_is_the_one_that_is_named_or_one_for_host_and_image(t *testing.T) {
	s, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	statetest.PutKernel(t, s.State, "built-1", kernel.Built, "CONFIG_TUN=y\n")
	statetest.PutKernel(t, s.State, "debian-1", kernel.Debian, "CONFIG_TUN=y\nCONFIG_SWAP=y\n")
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
