package kernel

import (
	"errors"
	"strings"
	"testing"
)

func TestMerge_replaces_options_and_check_accepts_result(t *testing.T) {
	base := "CONFIG_A=y\n# CONFIG_B is not set\nCONFIG_C=m\nCONFIG_AB=y\n"
	fragment := "# why\nCONFIG_A=n\nCONFIG_B=y\nCONFIG_NAME=\"x=y\"\n"
	merged, err := mergeConfig(base, fragment)
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := parseConfig(merged, false)
	if err != nil {
		t.Fatalf("%v in\n%s", err, merged)
	}
	want := kernelConfig{"CONFIG_B": "y", "CONFIG_C": "m", "CONFIG_AB": "y", "CONFIG_NAME": `"x=y"`}
	if len(cfg) != len(want) {
		t.Errorf("got %v, want %v", cfg, want)
	}
	for k, v := range want {
		if cfg[k] != v {
			t.Errorf("%s is %q, want %q", k, cfg[k], v)
		}
	}
	if err := checkConfig(merged, fragment); err != nil {
		t.Error(err)
	}
}

func TestCheck_config_names_every_option_that_does_not_hold(t *testing.T) {
	fragment := "CONFIG_LOST=y\nCONFIG_STAYS=n\nCONFIG_SIZE=15\nCONFIG_GONE=n\nCONFIG_RIGHT=y\n"
	finished := "CONFIG_STAYS=y\nCONFIG_SIZE=17\nCONFIG_RIGHT=y\n# CONFIG_LOST is not set\n"
	err := checkConfig(finished, fragment)
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{"CONFIG_LOST is n, not y", "CONFIG_STAYS is y, not n", "CONFIG_SIZE is 17, not 15"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in %q", want, err)
		}
	}
	for _, not := range []string{"RIGHT", "GONE"} {
		if strings.Contains(err.Error(), not) {
			t.Errorf("%q is in %q", not, err)
		}
	}
}

func TestParse_config_refuses_bad_lines(t *testing.T) {
	for name, text := range map[string]string{
		"contradiction":   "CONFIG_A=y\nCONFIG_A=n\n",
		"set and not set": "CONFIG_A=y\n# CONFIG_A is not set\n",
		"no value":        "CONFIG_A\n",
		"empty value":     "CONFIG_A=\n",
		"something else":  "option A\n",
	} {
		if cfg, err := parseConfig(text, false); err == nil {
			t.Errorf("%s: got %v", name, cfg)
		}
	}
}

func TestGuest_config_has_what_the_VMM_rely_on(t *testing.T) {
	cfg, err := parseConfig(guestConfig, false)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range vmmNeeds {
		if cfg["CONFIG_"+want] != "y" {
			t.Errorf("CONFIG_%s is %q", want, cfg["CONFIG_"+want])
		}
	}
	for not := range vmmRefuses {
		if v, ok := cfg["CONFIG_"+not]; ok {
			t.Errorf("CONFIG_%s is %s", not, v)
		}
	}
	if cfg["CONFIG_NR_CPUS"] != "8" {
		t.Errorf("CONFIG_NR_CPUS is %s", cfg["CONFIG_NR_CPUS"])
	}
}

func TestPatches_are_in_order_and_in_the_form_of_patch(t *testing.T) {
	ps, err := patches()
	if err != nil || len(ps) == 0 {
		t.Fatalf("%d patches, %v", len(ps), err)
	}
	for i, p := range ps {
		if i > 0 && p.name <= ps[i-1].name {
			t.Errorf("%s after %s", p.name, ps[i-1].name)
		}
		if !strings.HasPrefix(p.text, "Subject: ") || !strings.Contains(p.text, "\n--- a/") && !strings.Contains(p.text, "\n--- /dev/null") {
			t.Errorf("%s has no subject or no change", p.name)
		}
	}
}

func TestOwn_options_take_the_place_of_the_guests_or_are_refused(t *testing.T) {
	for _, c := range []struct{ name, own, want, err string }{
		{"an option that was not there", "CONFIG_VXLAN=y\n", "CONFIG_VXLAN=y", ""},
		{"another value", "CONFIG_NR_CPUS=4\n", "CONFIG_NR_CPUS=4", ""},
		{"an option that is set to n", "# CONFIG_SQUASHFS is not set\n", "", ""},
		{"a module", "CONFIG_VXLAN=m\n", "", "CONFIG_VXLAN=m: nothing brings modules"},
		{"modules", "CONFIG_MODULES=y\n", "", "CONFIG_MODULES: nothing brings modules"},
		{"what drowse needs, not set", "CONFIG_VIRTIO_BLK=n\n", "", "CONFIG_VIRTIO_BLK must be y"},
		{"what hangs on a soft KVM", "CONFIG_PTP_1588_CLOCK_KVM=y\n", "", "vmcall"},
		{"what is not there anyway, not set", "CONFIG_PCI=n\n", "", ""},
		{"no option", "# a comment\n", "", "there are none"},
		{"two values", "CONFIG_A=y\nCONFIG_A=n\n", "", "line 2"},
		{"no configuration", "#!/bin/sh\necho\n", "", "neither an option nor a comment"},
		{"too long", strings.Repeat("#", maxOwnConfig+1), "", "more than"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := withOwn(guestConfig, c.own)
			if c.err != "" {
				if !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), c.err) {
					t.Errorf("got %v, want %q", err, c.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if err := checkConfig(got, c.own); err != nil {
				t.Error(err)
			}
			cfg, err := parseConfig(got, false)
			if err != nil {
				t.Fatal(err)
			}
			if name, value, ok := strings.Cut(c.want, "="); ok && cfg[name] != value {
				t.Errorf("%s is %q", name, cfg[name])
			}
			if cfg["CONFIG_VIRTIO_BLK"] != "y" {
				t.Error("the guest's own options are gone")
			}
		})
	}
}
