package sparse

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"testing"
)

func TestWriter_writes_what_it_is_given(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	w := NewWriter(f)
	var want []byte
	for i, n := range []int{1, 4095, 4096, 3 << 20, 12345, 1 << 20, 7, 9000, 1<<20 + 1} {
		p := make([]byte, n)
		if i%2 == 0 {
			for j := range p {
				p[j] = byte(j * i)
			}
		}
		if _, err := w.Write(p); err != nil {
			t.Fatal(err)
		}
		want = append(want, p...)
	}
	// Going back and writing zeros over data must leave zeros.
	if _, err := w.Seek(0, io.SeekStart); err != nil {
		t.Fatal(err)
	}
	over := append(make([]byte, 8192), "over"...)
	if _, err := w.Write(over); err != nil {
		t.Fatal(err)
	}
	copy(want, over)
	if err := w.Finish(); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("file of %d bytes differs from the %d written", len(got), len(want))
	}
}
