package kernel

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// feature returns the feature of a kernel with the given name.
func feature(t *testing.T, all []Feature, name string) Feature {
	t.Helper()
	for _, f := range all {
		if f.Name == name {
			return f
		}
	}
	t.Fatalf("there is no feature %q", name)
	return Feature{}
}

func TestFeature_has_the_least_of_its_options(t *testing.T) {
	for _, c := range []struct {
		name, feature string
		cfg           kernelConfig
		loaded        []string
		has           Has
		lacks         string
		modules       string
	}{
		{"built in", "fuse", kernelConfig{"CONFIG_FUSE_FS": "y"}, nil, Yes, "", ""},
		{"a module that nobody loads", "fuse", kernelConfig{"CONFIG_FUSE_FS": "m"}, nil, Module, "CONFIG_FUSE_FS", "fuse"},
		{"a module that is loaded at boot", "fuse", kernelConfig{"CONFIG_FUSE_FS": "m"}, []string{"fuse"}, Yes, "", ""},
		{"not there", "fuse", kernelConfig{}, nil, No, "CONFIG_FUSE_FS", ""},
		{"half of it there", "secrets", kernelConfig{"CONFIG_FUSE_FS": "y"}, nil, No, "CONFIG_X86_IOPL_IOPERM", ""},
		{"half of it a module", "secrets", kernelConfig{"CONFIG_FUSE_FS": "m", "CONFIG_X86_IOPL_IOPERM": "y"}, nil, Module, "CONFIG_FUSE_FS", "fuse"},
		{"one part a module, one not there", "secrets", kernelConfig{"CONFIG_FUSE_FS": "m"}, nil, No, "CONFIG_FUSE_FS CONFIG_X86_IOPL_IOPERM", ""},
		{"an option of another value", "fuse", kernelConfig{"CONFIG_FUSE_FS": "1"}, nil, No, "CONFIG_FUSE_FS", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			loaded := map[string]bool{}
			for _, m := range c.loaded {
				loaded[m] = true
			}
			f := feature(t, featuresOf(c.cfg, loaded), c.feature)
			if f.Has != c.has || strings.Join(f.Lacks(), " ") != c.lacks || strings.Join(f.Modules(), " ") != c.modules {
				t.Errorf("has %q, lacks %q, modules %q", f.Has, f.Lacks(), f.Modules())
			}
		})
	}
}

func TestOption_of_two_modules_needs_both(t *testing.T) {
	cfg := kernelConfig{}
	for _, o := range strings.Fields("NF_TABLES NF_TABLES_IPV4 NF_TABLES_IPV6 NFT_COMPAT NFT_MASQ NFT_CT NETFILTER_XTABLES") {
		cfg["CONFIG_"+o] = "y"
	}
	cfg["CONFIG_NFT_NAT"] = "m"
	loaded := map[string]bool{"nft_nat": true}
	if f := feature(t, featuresOf(cfg, loaded), "iptables-nft"); f.Has != Module {
		t.Errorf("with one of two modules: %q", f.Has)
	}
	loaded["nft_chain_nat"] = true
	if f := feature(t, featuresOf(cfg, loaded), "iptables-nft"); f.Has != Yes {
		t.Errorf("with both modules: %q, lacks %q", f.Has, f.Lacks())
	}
}

// putConfig publishes a kernel with a configuration.
func putConfig(t *testing.T, cache string, kind Kind, hash, config string, own bool) *Kernel {
	t.Helper()
	k := put(t, cache, kind, hash)
	if err := os.WriteFile(k.Config, []byte(config), 0o644); err != nil {
		t.Fatal(err)
	}
	if own {
		edit(t, k, func(m map[string]any) { m["inputs"] = map[string]string{ownConfigInput: "x"} })
	}
	return k
}

func TestChoose_takes_the_host_and_the_image_into_account(t *testing.T) {
	const fuse, vxlan = "CONFIG_FUSE_FS=y\n", "CONFIG_VXLAN=y\nCONFIG_IP_VS=y\n"
	cache := t.TempDir()
	old := putConfig(t, cache, Built, "aaaa", fuse, false)
	age(t, old, time.Hour)
	built := putConfig(t, cache, Built, "bbbb", fuse, false)
	age(t, built, 30*time.Minute)
	own := putConfig(t, cache, Built, "cccc", fuse+vxlan, true)
	debian := putConfig(t, cache, Debian, "dddd", fuse+vxlan+"CONFIG_SWAP=y\nCONFIG_TUN=m\n", false)
	for _, c := range []struct {
		name  string
		host  Host
		needs string
		want  string
		err   error
		says  string
	}{
		{"no needs", Soft, "", built.ID, nil, ""},
		{"no needs, hardware", Hardware, "", built.ID, nil, ""},
		{"what the usual one has", Soft, "fuse", built.ID, nil, ""},
		{"what only an own one and Debian's have", Hardware, "fuse,vxlan", own.ID, nil, ""},
		{"what only Debian's has", Hardware, "fuse swap", debian.ID, nil, ""},
		{"what only Debian's has, on a host that cannot run it", Soft, "fuse,swap", "", ErrFeature, "CONFIG_SWAP"},
		{"what Debian's has as a module", Hardware, "swap,tun", "", ErrFeature, "--module tun"},
		{"what nobody has", Hardware, "wireguard", "", ErrFeature, "CONFIG_WIREGUARD"},
	} {
		t.Run(c.name, func(t *testing.T) {
			needs, err := ParseNeeds(c.needs)
			if err != nil {
				t.Fatal(err)
			}
			k, err := Choose(cache, c.host, needs)
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
	if k, err := Find(cache, "built"); err != nil || k.ID != built.ID {
		t.Errorf("built is %v, %v; not the usual one %s", k, err, built.ID)
	}
	if err := os.Remove(debian.Config); err != nil {
		t.Fatal(err)
	}
	if _, err := debian.Features(); !errors.Is(err, ErrDamaged) {
		t.Errorf("without its configuration: %v", err)
	}
}

func TestChoose_without_a_kernel_that_could_run_says_what_to_do(t *testing.T) {
	cache := t.TempDir()
	if _, err := Choose(cache, Hardware, nil); !errors.Is(err, ErrNotFound) || !strings.Contains(err.Error(), "kernel.Build") {
		t.Errorf("an empty cache: %v", err)
	}
	put(t, cache, Debian, "aaaa")
	if _, err := Choose(cache, Soft, nil); !errors.Is(err, ErrNotFound) || !strings.Contains(err.Error(), "kernel.Build") {
		t.Errorf("only Debian's on a soft KVM: %v", err)
	}
	own := putConfig(t, cache, Built, "bbbb", "CONFIG_A=y\n", true)
	if k, err := Choose(cache, Soft, nil); err != nil || k.ID != own.ID {
		t.Errorf("only one with own options: %v, %v", k, err)
	}
	if k, err := Find(cache, "built"); err != nil || k.ID != own.ID {
		t.Errorf("only one with own options, by its kind: %v, %v", k, err)
	}
}

func TestParse_needs_refuses_what_is_not_known(t *testing.T) {
	if got, err := ParseNeeds(" fuse, tun ,,nftables "); err != nil || !slices.Equal(got, []string{"fuse", "tun", "nftables"}) {
		t.Errorf("got %q, %v", got, err)
	}
	if _, err := ParseNeeds("fuse,fusee"); !errors.Is(err, ErrFeature) || !strings.Contains(err.Error(), `"fusee"`) || !strings.Contains(err.Error(), "nftables") {
		t.Errorf("an unknown one: %v", err)
	}
	if _, err := ParseNeeds(strings.Repeat("fuse,", maxNeeds+1)); !errors.Is(err, ErrFeature) {
		t.Errorf("too many: %v", err)
	}
}

func TestGuest_config_is_known_to_the_features(t *testing.T) {
	// Each feature has a name of its own, a purpose, and options in upper case without CONFIG_.
	seen := map[string]bool{}
	for _, w := range wants {
		if seen[w.name] || w.purpose == "" || len(strings.Fields(w.options)) == 0 {
			t.Errorf("feature %q is there twice, or says nothing", w.name)
		}
		seen[w.name] = true
		for o := range strings.FieldsSeq(w.options) {
			if strings.HasPrefix(o, "CONFIG_") || strings.ToUpper(o) != o {
				t.Errorf("feature %s: option %q", w.name, o)
			}
		}
	}
}

// The table in the documentation has what the code knows, and says what the two kernels have. TestRealBuild checks
// the latter.
func TestDocumented_features_are_those_that_are_known(t *testing.T) {
	doc := documented(t)
	if len(doc) != len(wants) {
		t.Errorf("%d features are documented, %d are known", len(doc), len(wants))
	}
	for i, w := range wants {
		if i >= len(doc) {
			break
		}
		if got := doc[i]; got.name != w.name || got.purpose != w.purpose {
			t.Errorf("row %d is %+v, want | `%s` | %s | | |", i, got, w.name, w.purpose)
		}
	}
}

type documentedFeature struct{ name, purpose, built, debian string }

func documented(t *testing.T) (out []documentedFeature) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "docs", "reference", "KERNELS.md"))
	if err != nil {
		t.Fatal(err)
	}
	inTable := false
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "| feature | for |"):
			inTable = true
		case !inTable || strings.HasPrefix(line, "|---"):
		case !strings.HasPrefix(line, "|"):
			inTable = false
		default:
			cells := strings.Split(strings.Trim(line, "|"), "|")
			if len(cells) != 4 {
				t.Fatalf("a row of %d cells: %s", len(cells), line)
			}
			for i := range cells {
				cells[i] = strings.TrimSpace(cells[i])
			}
			out = append(out, documentedFeature{strings.Trim(cells[0], "`"), cells[1], cells[2], cells[3]})
		}
	}
	return out
}

// checkFeatures compares the features of real kernels with the documentation.
func checkFeatures(t *testing.T, built, debian *Kernel) {
	t.Helper()
	doc := documented(t)
	for _, c := range []struct {
		k   *Kernel
		has func(documentedFeature) string
	}{
		{built, func(d documentedFeature) string { return d.built }},
		{debian, func(d documentedFeature) string { return d.debian }},
	} {
		all, err := c.k.Features()
		if err != nil {
			t.Fatal(err)
		}
		for i, f := range all {
			if i < len(doc) && string(f.Has) != c.has(doc[i]) {
				t.Errorf("%s of the %s kernel is documented as %q and is %q: it lacks %q", f.Name, c.k.Kind, c.has(doc[i]), f.Has, f.Lacks())
			}
		}
	}
	// Debian's modules can be found by the names that the features give.
	all, err := debian.Features()
	if err != nil {
		t.Fatal(err)
	}
	set, err := readModules(debian.ModulesDir)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range all {
		if _, err := set.order(f.Modules(), nil); err != nil {
			t.Errorf("the modules of %s: %v", f.Name, fmt.Errorf("%q: %w", f.Modules(), err))
		}
	}
}
