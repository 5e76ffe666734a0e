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

func TestHasReader_of_a_pipe_that_is_being_closed(t *testing.T) {
	t.Parallel()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	closed := make(chan struct{})
	go func() { defer close(closed); w.Close() }()
	for range 100 {
		if !HasReader(w) {
			t.Fatal("it has a reader, and none is seen")
		}
	}
	<-closed
	if !HasReader(w) {
		t.Error("closed: it has no reader")
	}
}
