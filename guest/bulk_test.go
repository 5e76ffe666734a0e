package guest_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"flag"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest"
)

var bulkMiB = flag.Int64("bulk-mib", 128, "copy files of so many MiB, and print as much: more than the heap may take")

// heapPeak watches the Go heap, of client and agent together, until the caller calls end.
func heapPeak() (end func() (mib uint64)) {
	var peak atomic.Uint64
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for {
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			peak.Store(max(peak.Load(), m.HeapInuse))
			select {
			case <-tick.C:
			case <-stop:
				return
			}
		}
	}()
	return func() uint64 { close(stop); <-done; return peak.Load() >> 20 }
}

// Client and agent run in this process, without a guest. The test shows that neither keeps what passes, and that a
// copy of any size can be cut.
func TestBulk_long_streams_take_no_memory_and_are_cut_and_resumed(t *testing.T) {
	const maxHeap = 64 // MiB, whatever the size
	size := *bulkMiB << 20
	v := startVM(t)
	dir := t.TempDir()
	src := filepath.Join(dir, "src")
	f, err := os.Create(src)
	if err != nil {
		t.Fatal(err)
	}
	h := sha256.New()
	_, err = io.CopyN(io.MultiWriter(f, h), rand.NewChaCha8([32]byte{1}), size)
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
	want := h.Sum(nil)
	same := func(path string) {
		t.Helper()
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		h := sha256.New()
		if _, err := io.Copy(h, f); err != nil || !bytes.Equal(h.Sum(nil), want) {
			t.Errorf("%s is another file, %v", path, err)
		}
	}
	show := func(what string, f func()) {
		t.Helper()
		end, begin := heapPeak(), time.Now()
		f()
		took, peak := time.Since(begin), end()
		t.Logf("%s: %.1f s, %.0f MiB/s, heap of client and agent together at most %d MiB", what, took.Seconds(), float64(*bulkMiB)/took.Seconds(), peak)
		if peak > maxHeap {
			t.Errorf("%s: a heap of %d MiB, more than %d", what, peak, maxHeap)
		}
	}
	in, out := filepath.Join(dir, "in"), filepath.Join(dir, "out")
	cp := map[string]func(guest.CopyOptions) (guest.CopyResult, error){
		"in":  func(o guest.CopyOptions) (guest.CopyResult, error) { return v.dial(t).CopyIn(t.Context(), src, in, o) },
		"out": func(o guest.CopyOptions) (guest.CopyResult, error) { return v.dial(t).CopyOut(t.Context(), in, out, o) },
	}
	for _, way := range []string{"in", "out"} {
		path := map[string]string{"in": in, "out": out}[way]
		show("copy "+way, func() {
			if _, err := cp[way](guest.CopyOptions{}); err != nil {
				t.Fatal(err)
			}
		})
		same(path)
		if way == "out" {
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
		}
		if way == "in" {
			if err := os.Rename(in, in+".first"); err != nil {
				t.Fatal(err)
			}
		}
		cut := false
		if _, err := cp[way](guest.CopyOptions{Progress: func(n int64) {
			if n > size/2 && !cut {
				cut = true
				v.reset()
			}
		}}); !errors.Is(err, guest.ErrConnectionLost) {
			t.Fatalf("cut: %v", err)
		}
		if _, err := os.Lstat(path); err == nil {
			t.Error("there is a half file")
		}
		show("copy "+way+", cut at half and resumed", func() {
			res, err := cp[way](guest.CopyOptions{Resume: true})
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("%d MiB were there, %d were copied", res.Kept>>20, res.Bytes>>20)
			if res.Kept+res.Bytes != size || res.Kept < size/3 {
				t.Errorf("%+v", res)
			}
		})
		same(path)
	}
	show("a command that prints as much", func() {
		h := sha256.New()
		cmd := guest.Cmd{Argv: []string{"cat", in}}
		cmd.Stdout = h
		if _, err := v.dial(t).Exec(t.Context(), cmd); err != nil || !bytes.Equal(h.Sum(nil), want) {
			t.Errorf("what it printed is something else, %v", err)
		}
	})
}
