package control

import (
	"os"
	"testing"
)

func TestHasReader_of_a_pipe(t *testing.T) {
	t.Parallel()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if !HasReader(w) {
		t.Error("with a reader: it has none")
	}
	if _, err := w.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if !HasReader(w) {
		t.Error("with a reader that has not read yet: it has none")
	}
	r.Close()
	if HasReader(w) {
		t.Error("without a reader: it has one")
	}
}
