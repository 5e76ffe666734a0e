package confine

import (
	"io"
	"os"
	"testing"
)

// BenchmarkStart starts a child, waits until it is locked, and closes it.
func BenchmarkStart(b *testing.B) {
	limits := Limits{MemoryBytes: 1 << 30, Pids: 200}
	if asUser() {
		limits = Limits{}
	}
	for b.Loop() {
		in, inW, err1 := os.Pipe()
		out, outW, err2 := os.Pipe()
		if err1 != nil || err2 != nil {
			b.Fatal(err1, err2)
		}
		c, err := Start(b.Context(), Profile{Program: self("idle"), Files: []*os.File{in}, Output: outW, Name: "bench", Limits: limits})
		if err != nil {
			b.Fatal(err)
		}
		outW.Close()
		if _, err := io.ReadFull(out, make([]byte, 6)); err != nil {
			b.Fatal(err)
		}
		if err := c.Close(); err != nil {
			b.Fatal(err)
		}
		for _, f := range []*os.File{in, inW, out} {
			f.Close()
		}
	}
}
