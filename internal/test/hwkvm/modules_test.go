package hwkvm

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/u-root/u-root/pkg/cpio"

	"github.com/drowse-vm/drowse/internal/test/hwkvm/wire"
)

// fakeTree makes a module tree from "name: dep dep | softdep softdep" lines.
func fakeTree(builtin []string, lines ...string) *moduleTree {
	infos := map[string]moduleInfo{}
	t := &moduleTree{files: map[string]string{}, builtin: map[string]bool{}, cache: map[string]moduleInfo{}}
	for _, b := range builtin {
		t.builtin[b] = true
	}
	for _, l := range lines {
		name, rest, _ := strings.Cut(l, ":")
		deps, pre, _ := strings.Cut(rest, "|")
		t.files[name] = name
		infos[name] = moduleInfo{depends: strings.Fields(deps), pre: strings.Fields(pre), aliases: []string{"alias-" + name}}
	}
	t.info = func(path string) (moduleInfo, error) { return infos[path], nil }
	return t
}

func TestModuleOrder(t *testing.T) {
	tree := fakeTree([]string{"built"},
		"a: b c", "b: d", "c: d built", "d:", "soft: d | missing hyphen-ed", "hyphen_ed:", "broken: nowhere",
		"x: y", "y: x", "p: | q", "q: p", "twice: p q", "self: self")
	for _, c := range []struct {
		name string
		want []string
		of   []string
		err  string
	}{
		{"a module alone", []string{"d"}, []string{"d"}, ""},
		{"dependencies come before, each once", []string{"d", "b", "c", "a"}, []string{"a"}, ""},
		{"what was listed is not listed again", []string{"d", "c", "b", "a"}, []string{"c", "a"}, ""},
		{"built-in modules are left out", nil, []string{"built"}, ""},
		{"soft dependencies come before if they exist", []string{"hyphen_ed", "d", "soft"}, []string{"soft"}, ""},
		{"dashes are underscores", []string{"hyphen_ed"}, []string{"hyphen-ed"}, ""},
		{"a soft dependency that needs its needer is passed over", []string{"p"}, []string{"p"}, ""},
		{"what was passed over once can still be listed", []string{"p", "q", "twice"}, []string{"twice"}, ""},
		{"a missing dependency", nil, []string{"broken"}, "nowhere (wanted by broken)"},
		{"a cycle", nil, []string{"x"}, "depend on each other"},
		{"a module that needs itself", nil, []string{"self"}, "depend on each other"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := tree.order(c.of...)
			if c.err != "" {
				if err == nil || !strings.Contains(err.Error(), c.err) {
					t.Fatalf("got %q, error %v; want an error with %q", got, err, c.err)
				}
				return
			}
			if err != nil || !slices.Equal(got, c.want) {
				t.Errorf("got %q, error %v; want %q", got, err, c.want)
			}
		})
	}
}

func TestModule_order_follows_a_soft_dependency_that_leads_back_no_further(t *testing.T) {
	got, err := fakeTree(nil, "p: | q", "q: | p").order("p")
	if want := []string{"q", "p"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("got %q, error %v; want %q", got, err, want)
	}
}

func TestIndex_leaves_out_what_the_kernel_lacks_and_refuses_what_is_needed(t *testing.T) {
	tree := fakeTree(nil, "kvm_amd: kvm", "kvm:", "veth:")
	ix, err := tree.index([]string{"kvm_amd"}, []string{"veth", "absent"})
	if err != nil {
		t.Fatal(err)
	}
	want := wire.ModuleIndex{Boot: []string{"kvm", "kvm_amd"}, Modules: map[string]wire.Module{
		"kvm":     {Deps: []string{}, Aliases: []string{"alias-kvm"}},
		"kvm_amd": {Deps: []string{"kvm"}, Aliases: []string{"alias-kvm_amd"}, Params: moduleParams["kvm_amd"]},
		"veth":    {Deps: []string{}, Aliases: []string{"alias-veth"}},
	}}
	if !reflect.DeepEqual(ix, want) {
		t.Errorf("got %+v, want %+v", ix, want)
	}
	if _, err := tree.index([]string{"absent"}, nil); !errors.Is(err, ErrModule) {
		t.Errorf("a missing module that is needed gives %v, want ErrModule", err)
	}
}

func TestParse_module_info(t *testing.T) {
	got := parseModuleInfo([]byte("license=GPL\x00depends=kvm,ccp\x00alias=a-*\x00alias=b\x00softdep=pre: x y post: z\x00vermagic=6.1 SMP\x00\x00"))
	want := moduleInfo{depends: []string{"kvm", "ccp"}, pre: []string{"x", "y"}, aliases: []string{"a-*", "b"}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if got := parseModuleInfo([]byte("depends=\x00")); !reflect.DeepEqual(got, moduleInfo{}) {
		t.Errorf("no dependencies became %+v", got)
	}
}

func TestOpen_module_tree_knows_files_and_builtins(t *testing.T) {
	dir := t.TempDir()
	for _, f := range []string{"kernel/net/9p/9pnet_virtio.ko", "kernel/arch/x86/kvm/kvm-amd.ko.xz", "kernel/README"} {
		if err := os.MkdirAll(filepath.Join(dir, filepath.Dir(f)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, f), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "modules.builtin"), []byte("kernel/drivers/pci/virtio-rng.ko\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	tree, err := openModuleTree(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(tree.files) != 2 || tree.files["9pnet_virtio"] == "" || tree.files["kvm_amd"] == "" || !tree.builtin["virtio_rng"] {
		t.Errorf("files %v, built in %v", tree.files, tree.builtin)
	}
}

func TestInitramfs_holds_init_console_modules_and_index(t *testing.T) {
	index := wire.ModuleIndex{Boot: []string{"a", "b"}, Modules: map[string]wire.Module{"a": {}, "b": {Deps: []string{"a"}}}}
	var buf bytes.Buffer
	err := writeInitramfs(&buf, []byte("INIT"), index, func(name string) ([]byte, error) { return []byte("module " + name), nil })
	if err != nil {
		t.Fatal(err)
	}
	records, err := cpio.ReadAllRecords(cpio.Newc.Reader(bytes.NewReader(buf.Bytes())))
	if err != nil {
		t.Fatal(err)
	}
	content := map[string]string{}
	info := map[string]cpio.Info{}
	for _, r := range records {
		b, err := io.ReadAll(io.NewSectionReader(r, 0, int64(r.FileSize)))
		if err != nil {
			t.Fatal(err)
		}
		content[r.Name], info[r.Name] = string(b), r.Info
	}
	for name, want := range map[string]string{"init": "INIT", "modules/a.ko": "module a", "modules/b.ko": "module b"} {
		if content[name] != want {
			t.Errorf("%s holds %q, want %q", name, content[name], want)
		}
	}
	if m := info["init"].Mode; m != cpio.S_IFREG|0o755 {
		t.Errorf("mode of init is %#o", m)
	}
	if c := info["dev/console"]; c.Mode&cpio.S_IFMT != cpio.S_IFCHR || c.Rmajor != 5 || c.Rminor != 1 {
		t.Errorf("dev/console is %v", c)
	}
	var got wire.ModuleIndex
	if err := json.Unmarshal([]byte(content["modules/index.json"]), &got); err != nil || !reflect.DeepEqual(got, index) {
		t.Errorf("the index is %+v, error %v; want %+v", got, err, index)
	}
	failing := errors.New("unreadable")
	if err := writeInitramfs(io.Discard, nil, index, func(string) ([]byte, error) { return nil, failing }); !errors.Is(err, failing) {
		t.Errorf("an unreadable module gives %v", err)
	}
}
