package network

import (
	"net"
	"os"
	"slices"
	"testing"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/hostnet"
	"github.com/drowse-vm/drowse/netpolicy/link"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// left reports whether the host has a TAP device or programs of an id.
func left(t *testing.T, id string) bool {
	t.Helper()
	names, err := link.Endpoints("")
	if err != nil {
		t.Fatal(err)
	}
	_, err = net.InterfaceByName(hostnet.InterfaceName(id))
	return err == nil || slices.Contains(names, id)
}

func TestNetwork_leaves_nothing_on_the_host_whether_it_could_be_set_up_or_not(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("makes TAP devices: needs root")
	}
	good := os.Getenv(hostnet.RangeEnv)
	for name, c := range map[string]struct {
		ranges string
		ahead  bool
	}{
		"good": {good, false}, "good, made ahead": {good, true},
		"no addresses": {"none", false}, "no addresses, made ahead": {"none", true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv(hostnet.RangeEnv, c.ranges)
			cfg := Config{Name: "a", ID: spec.NewID()}
			id := cfg.ID
			if c.ahead {
				cfg.Prebuilt = NewPrebuilt()
				defer cfg.Prebuilt.Close()
				id = cfg.Prebuilt.ID()
			}
			n, err := New(cfg)
			if err != nil {
				t.Fatal(err)
			}
			if n.TAP().FD() < 0 || !left(t, id) {
				t.Error("it has no TAP device at once")
			}
			if err := n.Wait(t.Context()); (err == nil) != (c.ranges == good) {
				t.Errorf("it is ready with %v", err)
			} else if err == nil && (!n.Info().Address.IsValid() || n.Info().TAP != hostnet.InterfaceName(id)) {
				t.Errorf("it is %+v", n.Info())
			}
			if err := n.Close(); err != nil {
				t.Error(err)
			}
			if left(t, id) {
				t.Error("something is left of it")
			}
		})
	}
}

func TestNetwork_denies_everything_without_a_policy(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("makes TAP devices: needs root")
	}
	n, err := New(Config{Name: "a"})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	if err := n.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	if d := n.policy.Default; d.Egress == netpolicy.Allow || d.Ingress == netpolicy.Allow || len(n.policy.Rules) > 0 {
		t.Errorf("its policy is %+v", n.policy)
	}
	in, out := n.Bytes()
	if ever, _ := n.LastPacket(); ever || in+out > 0 {
		t.Errorf("%d and %d bytes have passed", in, out)
	}
}
