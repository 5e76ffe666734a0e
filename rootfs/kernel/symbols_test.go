package kernel

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const systemMap = `0000000000000000 D __per_cpu_start
0000000000004000 d a_per_cpu_variable
ffffffff81000000 T _stext
ffffffff81000000 T _text
ffffffff81000000 T startup_64
ffffffff81000060 T secondary_startup_64
ffffffff81000100 t helper
ffffffff81000100 t helper_alias
ffffffff81000180 W weak_one
ffffffff81000200 T _etext
ffffffff81000400 D linux_banner
ffffffff81000800 D __init_begin
ffffffff81000800 T _sinittext
ffffffff81000820 t init_setup
ffffffff81000900 T _einittext
ffffffff81000a00 t exit_setup
`

func TestSymbolize_names_function_and_offset(t *testing.T) {
	path := filepath.Join(t.TempDir(), "System.map")
	if err := os.WriteFile(path, []byte(systemMap), 0o644); err != nil {
		t.Fatal(err)
	}
	k := &Kernel{SymbolMap: path}
	for _, c := range []struct {
		name string
		addr uint64
		want string
		off  uint64
		ok   bool
	}{
		{"first byte of the kernel", 0xffffffff81000000, "startup_64", 0, true},
		{"inside a function", 0xffffffff810000f0, "secondary_startup_64", 0x90, true},
		{"two names: the first in the map", 0xffffffff81000104, "helper", 4, true},
		{"weak function, last of the text", 0xffffffff810001ff, "weak_one", 0x7f, true},
		{"init code", 0xffffffff81000821, "init_setup", 1, true},
		{"end of the text", 0xffffffff81000200, "", 0, false},
		{"data between text and init code", 0xffffffff81000410, "", 0, false},
		{"end of init code", 0xffffffff81000900, "", 0, false},
		{"below the kernel", 0xffffffff80ffffff, "", 0, false},
		{"a per-CPU offset is no code", 0x4000, "", 0, false},
		{"user space", 0x401000, "", 0, false},
		{"above the last symbol", 0xffffffffffffffff, "", 0, false},
	} {
		name, off, ok := k.Symbolize(c.addr)
		if name != c.want || off != c.off || ok != c.ok {
			t.Errorf("%s: %#x is %q+%#x %v, want %q+%#x %v", c.name, c.addr, name, off, ok, c.want, c.off, c.ok)
		}
	}
}

func TestSymbolize_without_map_or_with_bad_one_finds_nothing(t *testing.T) {
	bad := filepath.Join(t.TempDir(), "bad")
	if err := os.WriteFile(bad, []byte("not a map\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"", bad, bad + "x"} {
		if name, _, ok := (&Kernel{SymbolMap: path}).Symbolize(0xffffffff81000000); ok {
			t.Errorf("map %q: found %q", path, name)
		}
	}
}

func TestParse_symbols_refuses_bad_lines(t *testing.T) {
	for _, text := range []string{"zz T name\n", "ffffffff81000000 T\n", "ffffffff81000000 T a b\n", strings.Repeat("x", 2*maxSymbolLine)} {
		if syms, err := parseSymbols(strings.NewReader(text)); err == nil {
			t.Errorf("%.30q gave %v", text, syms)
		}
	}
}
