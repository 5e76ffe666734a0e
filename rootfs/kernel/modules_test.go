package kernel

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// set makes a module set from "name: dependency dependency" lines. A leading '~' marks a soft dependency.
func set(builtin []string, lines ...string) *moduleSet {
	s := &moduleSet{files: map[string]string{}, builtin: map[string]bool{}}
	infos := map[string]moduleInfo{}
	for _, b := range builtin {
		s.builtin[b] = true
	}
	for _, l := range lines {
		name, deps, _ := strings.Cut(l, ":")
		var info moduleInfo
		for d := range strings.FieldsSeq(deps) {
			if soft, ok := strings.CutPrefix(d, "~"); ok {
				info.softPre = append(info.softPre, soft)
			} else {
				info.depends = append(info.depends, d)
			}
		}
		s.files[name] = name + ".ko"
		infos[name+".ko"] = info
	}
	s.info = func(path string) (moduleInfo, error) { return infos[path], nil }
	return s
}

func TestModuleOrder(t *testing.T) {
	virtio := []string{"virtio_ring:", "virtio: virtio_ring", "virtio_blk: virtio virtio_ring", "virtio_rng: virtio_ring virtio"}
	deep := make([]string, 0, maxModuleDepth+3)
	for i := range maxModuleDepth + 2 {
		deep = append(deep, strings.Repeat("m", i+1)+": "+strings.Repeat("m", i+2))
	}
	for _, c := range []struct {
		name     string
		set      *moduleSet
		wanted   []string
		optional []string
		want     string
		err      string
	}{
		{"dependencies come first, once", set(nil, virtio...), []string{"virtio_blk", "virtio_rng"}, nil,
			"virtio_ring virtio virtio_blk virtio_rng", ""},
		{"dash and underscore are the same", set(nil, virtio...), []string{"virtio-rng"}, nil, "virtio_ring virtio virtio_rng", ""},
		{"what is built in is left out", set([]string{"ext4"}, virtio...), []string{"ext4", "virtio"}, nil, "virtio_ring virtio", ""},
		{"built-in dependency is left out", set([]string{"jbd2"}, "ext4: jbd2"), []string{"ext4"}, nil, "ext4", ""},
		{"a file goes before a built-in of the same name", set([]string{"a"}, "a:"), []string{"a"}, nil, "a", ""},
		{"soft dependency that is a module", set(nil, "libcrc32c: ~crc32c", "crc32c:"), []string{"libcrc32c"}, nil, "crc32c libcrc32c", ""},
		{"soft dependency that is only an alias", set(nil, "libcrc32c: ~crc32c"), []string{"libcrc32c"}, nil, "libcrc32c", ""},
		{"soft dependency that goes in a circle", set(nil, "a: ~b", "b: a"), []string{"a"}, nil, "", "depends on itself"},
		{"optional and missing", set(nil, virtio...), []string{"pvpanic_mmio", "virtio"}, []string{"pvpanic_mmio"}, "virtio_ring virtio", ""},
		{"wanted and missing", set(nil, virtio...), []string{"overlay"}, nil, "", "no module overlay"},
		{"dependency missing", set(nil, "a: b"), []string{"a"}, nil, "", "no module b, which a needs"},
		{"optional with a missing dependency", set(nil, "a: b"), []string{"a"}, []string{"a"}, "", "no module b"},
		{"circle", set(nil, "a: b", "b: a"), []string{"a"}, nil, "", "depends on itself"},
		{"deeper than the limit", set(nil, deep...), []string{"m"}, nil, "", "deep"},
	} {
		got, err := c.set.order(c.wanted, c.optional)
		if c.err != "" {
			if err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%s: error %v, want %q", c.name, err, c.err)
			}
			continue
		}
		names := strings.ReplaceAll(strings.Join(got, " "), ".ko", "")
		if err != nil || names != c.want {
			t.Errorf("%s: got %q, %v; want %q", c.name, names, err, c.want)
		}
	}
}

func TestParseModinfo(t *testing.T) {
	got := parseModinfo([]byte("license=GPL\x00depends=virtio,virtio-ring\x00softdep=pre: crc32c aes-x post: later pre: more\x00name=a\x00\x00"))
	want := moduleInfo{depends: []string{"virtio", "virtio_ring"}, softPre: []string{"crc32c", "aes_x", "more"}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if got := parseModinfo([]byte("depends=\x00")); len(got.depends) != 0 {
		t.Errorf("empty list gave %q", got.depends)
	}
}

// moduleELF returns a relocatable x86-64 ELF file (System V ABI, gABI chapter 4) with one section .modinfo.
func moduleELF(modinfo string) []byte {
	const ehsize, shentsize = 64, 64
	strtab := "\x00.modinfo\x00.shstrtab\x00"
	var b bytes.Buffer
	w := func(v ...any) {
		for _, x := range v {
			_ = binary.Write(&b, binary.LittleEndian, x)
		}
	}
	data := uint64(ehsize)
	str := data + uint64(len(modinfo))
	sh := str + uint64(len(strtab))
	w([]byte("\x7fELF\x02\x01\x01"), make([]byte, 9), uint16(1), uint16(62), uint32(1), uint64(0), uint64(0), sh, uint32(0),
		uint16(ehsize), uint16(0), uint16(0), uint16(shentsize), uint16(3), uint16(2))
	b.WriteString(modinfo + strtab)
	section := func(name, typ uint32, off, size uint64) {
		w(name, typ, uint64(0), uint64(0), off, size, uint32(0), uint32(0), uint64(1), uint64(0))
	}
	section(0, 0, 0, 0)
	section(1, 1, data, uint64(len(modinfo)))
	section(10, 3, str, uint64(len(strtab)))
	return b.Bytes()
}

func writeTree(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, content := range files {
		p := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func TestRead_modules_finds_files_builtins_and_their_dependencies(t *testing.T) {
	dir := t.TempDir()
	writeTree(t, dir, map[string]string{
		"modules.builtin":                     "kernel/fs/ext4/ext4.ko\nkernel/lib/crc-ccitt.ko\n",
		"kernel/drivers/virtio/virtio.ko":     string(moduleELF("depends=virtio_ring\x00")),
		"kernel/drivers/virtio/virtio-net.ko": string(moduleELF("license=GPL\x00depends=virtio,ext4\x00")),
		"kernel/drivers/virtio_ring.ko":       string(moduleELF("depends=\x00")),
		"kernel/README":                       "no module",
	})
	s, err := readModules(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(s.files) != 3 || !s.builtin["crc_ccitt"] || !s.builtin["ext4"] {
		t.Errorf("got files %v, built in %v", s.files, s.builtin)
	}
	got, err := s.order([]string{"virtio_net"}, nil)
	want := []string{"kernel/drivers/virtio_ring.ko", "kernel/drivers/virtio/virtio.ko", "kernel/drivers/virtio/virtio-net.ko"}
	for i := range want {
		want[i] = filepath.Join(dir, want[i])
	}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("got %q, %v; want %q", got, err, want)
	}
}

func TestRead_modules_refuses_what_it_cannot_use(t *testing.T) {
	for name, files := range map[string]map[string]string{
		"compressed module":       {"modules.builtin": "", "kernel/a.ko.xz": "x"},
		"two modules of one name": {"modules.builtin": "", "kernel/x/a-b.ko": "x", "kernel/y/a_b.ko": "x"},
		"no list of built-ins":    {"kernel/a.ko": "x"},
		"no modules":              {"modules.builtin": ""},
	} {
		dir := t.TempDir()
		writeTree(t, dir, files)
		if s, err := readModules(dir); err == nil {
			t.Errorf("%s: got %v", name, s.files)
		}
	}
	dir := t.TempDir()
	writeTree(t, dir, map[string]string{"modules.builtin": "", "kernel/a.ko": "not an ELF file"})
	s, err := readModules(dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.order([]string{"a"}, nil); err == nil || errors.Is(err, ErrUnsupported) {
		t.Errorf("module that is not ELF: %v", err)
	}
}
