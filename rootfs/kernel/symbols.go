package kernel

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
)

const (
	// maxSymbols bounds the symbols kept of a symbol map; the built kernel has about 50,000.
	maxSymbols = 1 << 20
	// maxSymbolLine bounds a line of it, in bytes. The kernel's own limit for a name is 512.
	maxSymbolLine = 4096
)

// symbol is a function in the kernel's text.
type symbol struct {
	addr uint64
	name string
}

// Symbolize returns the kernel function that contains the virtual address addr, and the distance of addr from its
// start in bytes. ok is false for an address outside the kernel's code, and for a kernel without a readable symbol
// map (Kernel.SymbolMap). The addresses are those of the ELF file: the built kernel runs there (RANDOMIZE_BASE is
// off).
func (k *Kernel) Symbolize(addr uint64) (name string, off uint64, ok bool) {
	k.symbols.once.Do(func() { k.symbols.syms, k.symbols.err = readSymbols(k.SymbolMap) })
	return lookup(k.symbols.syms, addr)
}

func readSymbols(path string) ([]symbol, error) {
	if path == "" {
		return nil, nil
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	syms, err := parseSymbols(f)
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", path, err)
	}
	return syms, nil
}

// parseSymbols reads the lines "address type name" of a System.map, as nm(1) prints them, and keeps the symbols in
// code: types t, T, w and W. It also keeps the marks at the ends of the sections (_etext, _einittext), which have
// type T or D: they end the range of a lookup.
func parseSymbols(r io.Reader) ([]symbol, error) {
	var syms []symbol
	s := bufio.NewScanner(r)
	s.Buffer(nil, maxSymbolLine)
	for line := 1; s.Scan(); line++ {
		f := strings.Fields(s.Text())
		if len(f) != 3 {
			return nil, fmt.Errorf("line %d is not an address, a type and a name", line)
		}
		if !strings.Contains("tTwW", f[1]) && !isTextEnd(f[2]) {
			continue
		}
		addr, err := strconv.ParseUint(f[0], 16, 64)
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", line, err)
		}
		if len(syms) == maxSymbols {
			return nil, fmt.Errorf("more than %d symbols", maxSymbols)
		}
		syms = append(syms, symbol{addr, f[2]})
	}
	if err := s.Err(); err != nil {
		return nil, err
	}
	// Of several names at one address the first in the map wins: sort stably and keep the first, but let an end of
	// text remain one.
	slices.SortStableFunc(syms, func(a, b symbol) int {
		return cmp.Or(cmp.Compare(a.addr, b.addr), cmp.Compare(rank(a.name), rank(b.name)))
	})
	return slices.CompactFunc(syms, func(a, b symbol) bool { return a.addr == b.addr }), nil
}

// isTextEnd reports whether name is the mark behind a section of code that the kernel's linker script
// (arch/x86/kernel/vmlinux.lds.S) sets.
func isTextEnd(name string) bool { return name == "_etext" || name == "_einittext" }

// isSectionStart reports whether name is a mark in front of code rather than a function.
func isSectionStart(name string) bool {
	switch name {
	case "_text", "_stext", "_sinittext", "__init_begin":
		return true
	}
	return false
}

// rank orders names at one address: functions first, then marks.
func rank(name string) int {
	switch {
	case isTextEnd(name):
		return 1
	case isSectionStart(name):
		return 2
	}
	return 0
}

// lookup finds the last symbol at or below addr.
func lookup(syms []symbol, addr uint64) (string, uint64, bool) {
	i, exact := slices.BinarySearchFunc(syms, addr, func(s symbol, a uint64) int { return cmp.Compare(s.addr, a) })
	if !exact {
		i--
	}
	if i < 0 || isTextEnd(syms[i].name) || i == len(syms)-1 {
		return "", 0, false // below the code, between its sections, or above it
	}
	return syms[i].name, addr - syms[i].addr, true
}
