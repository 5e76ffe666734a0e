package proc

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"testing/synctest"
)

func TestOutput_that_is_held_waits_without_a_reader_and_has_half_of_its_limit_again(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const limit, all = 10000, 50000
		o := newOutput(limit, true)
		o.hold = true
		var want []byte
		for i := range all {
			want = append(want, byte(i), byte(i>>8))
		}
		go func() {
			for p := want; len(p) > 0; p = p[min(len(p), 777):] {
				o.Write(len(p)%2 == 0, p[:min(len(p), 777)])
			}
			o.finish()
		}()
		var got []byte
		for lost := 0; ; lost = (lost + 1777) % (limit / 2) {
			synctest.Wait() // the writer waits, or has written all
			if start, end := o.Bounds(); end-start > limit || end < uint64(len(want)) && end-start < limit/2 {
				t.Fatalf("held from %d to %d", start, end)
			}
			got = got[:max(0, len(got)-lost)] // its client has lost so much
			at, reader := o.attach(uint64(len(got)))
			if at != uint64(len(got)) {
				t.Fatalf("attached at %d, want %d", at, len(got))
			}
			for range 6 {
				buf := make([]byte, 999)
				n, _, _, ended := o.read(reader, buf)
				if got = append(got, buf[:n]...); ended {
					if !bytes.Equal(got, want) {
						t.Errorf("%d bytes, want %d, or others", len(got), len(want))
					}
					return
				}
				o.took(reader, uint64(len(got)))
				synctest.Wait()
			}
			o.detach(held)
		}
	})
}

// A reader may have more than it had acknowledged when it was cut off, and have all: then it acknowledges nothing more.
func TestOutput_that_is_held_goes_on_for_a_reader_that_comes_back_with_all_of_it(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const limit = 4 * firstOutput
		o := newOutput(limit, true)
		o.hold = true
		o.attach(0)
		go func() {
			o.Write(false, make([]byte, limit))
			o.Write(false, []byte("more"))
		}()
		synctest.Wait()
		o.detach(held)
		synctest.Wait()
		if start, _ := o.attach(limit); start != limit {
			t.Fatalf("attached at %d", start)
		}
		synctest.Wait()
		if _, end := o.Bounds(); end != limit+4 {
			t.Errorf("the writer waits at %d", end)
		}
		o.detach(dropped)
	})
}

func TestOutput_random_writes_and_reads_keep_order_streams_and_bounds(t *testing.T) {
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 1))
		keep := seed%2 == 0
		const limit = 10000 // no power of two, so that the ring wraps unevenly
		o := newOutput(limit, keep)
		_, reader := o.attach(0)
		var want, got [2]bytes.Buffer
		written, read := uint64(0), uint64(0)
		for range 2000 {
			if stderr := r.IntN(2) == 1; r.IntN(2) == 0 {
				p := make([]byte, r.IntN(3000))
				for i := range p {
					p[i] = byte(r.Uint32())
				}
				if int(written-read)+len(p) > limit {
					continue // would wait for a reader that is us
				}
				o.Write(stderr, p)
				written += uint64(len(p))
				want[b2i(stderr)].Write(p)
				continue
			}
			buf := make([]byte, 1+r.IntN(4000))
			n, stderr, off, ended := o.read(reader, buf)
			if n > 0 && off != read || ended {
				t.Fatalf("seed %d: offset %d, want %d; ended %v", seed, off, read, ended)
			}
			read += uint64(n)
			got[b2i(stderr)].Write(buf[:n])
			o.took(reader, read)
			if len(o.buf) > limit {
				t.Fatalf("seed %d: %d bytes held", seed, len(o.buf))
			}
		}
		o.finish()
		for {
			buf := make([]byte, 777)
			n, stderr, _, ended := o.read(reader, buf)
			got[b2i(stderr)].Write(buf[:n])
			if ended {
				break
			}
		}
		for i := range want {
			if !bytes.Equal(got[i].Bytes(), want[i].Bytes()) {
				t.Fatalf("seed %d, stream %d: %d bytes, want %d, or others", seed, i, got[i].Len(), want[i].Len())
			}
		}
	}
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

func TestOutput_alternating_single_bytes_stay_bounded(t *testing.T) {
	o := newOutput(1<<20, true)
	o.detach(kept)
	for i := range 3 * maxSegments {
		o.Write(i%2 == 0, []byte{1})
	}
	if start, end := o.Bounds(); len(o.segs) > maxSegments || end != 3*maxSegments || end-start > maxSegments {
		t.Errorf("%d segments, offsets %d to %d", len(o.segs), start, end)
	}
}

func TestOutput_a_full_one_holds_the_writer_until_it_is_read_or_left(t *testing.T) {
	for _, tt := range []struct {
		name string
		free func(o *Output, reader uint64)
	}{
		{"read", func(o *Output, reader uint64) { o.read(reader, make([]byte, 100)) }},
		{"left for good", func(o *Output, _ uint64) { o.detach(dropped) }},
		{"left to itself", func(o *Output, _ uint64) { o.detach(kept) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := newOutput(firstOutput, false)
				_, reader := o.attach(0)
				var written atomic.Bool
				go func() {
					o.Write(false, make([]byte, firstOutput+10))
					written.Store(true)
				}()
				synctest.Wait()
				if written.Load() {
					t.Fatal("the writer did not wait")
				}
				tt.free(o, reader)
				synctest.Wait()
				if !written.Load() {
					t.Fatal("the writer waits still")
				}
			})
		})
	}
}

func TestOutput_an_old_reader_gets_nothing_and_releases_nothing(t *testing.T) {
	o := newOutput(firstOutput, true)
	_, old := o.attach(0)
	o.Write(false, []byte("abc"))
	start, cur := o.attach(1)
	if start != 1 {
		t.Errorf("attached at %d, want 1", start)
	}
	if n, _, _, ended := o.read(old, make([]byte, 10)); n != 0 || ended {
		t.Errorf("the old reader got %d bytes, ended %v", n, ended)
	}
	o.took(old, 3)
	if o.taken != 1 {
		t.Error("the old reader released output")
	}
	if n, _, off, _ := o.read(cur, make([]byte, 10)); n != 2 || off != 1 {
		t.Errorf("the new reader got %d bytes at %d", n, off)
	}
}

func TestLookupAccount_follows_passwd_and_group(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	file("passwd", "# comment\nroot:x:0:0:root:/root:/bin/bash\nbroken line\nbad:x:nan:0::/:/bin/sh\ndev:x:1000:1000:Dev:/home/dev:/bin/zsh\n")
	file("group", "root:x:0:\ndev:x:1000:\ndocker:x:999:dev,ops\nwheel:x:10:ops,dev\ndeva:x:5:deva\n")
	for _, tt := range []struct {
		spec string
		want string
	}{
		{"", "{0 0 [] root /root /bin/sh}"},
		{"root", "{0 0 [] root /root /bin/bash}"},
		{"dev", "{1000 1000 [999 10] dev /home/dev /bin/zsh}"},
		{"1000", "{1000 1000 [999 10] dev /home/dev /bin/zsh}"},
		{"dev:docker", "{1000 999 [] dev /home/dev /bin/zsh}"},
		{"dev:77", "{1000 77 [] dev /home/dev /bin/zsh}"},
		{"4242", "{4242 0 [] 4242 / /bin/sh}"},
		{"4242:10", "{4242 10 [] 4242 / /bin/sh}"},
	} {
		a, err := lookupAccount(dir, tt.spec)
		if got := fmt.Sprint(a); err != nil || got != tt.want {
			t.Errorf("%q: %v, %v; want %v", tt.spec, got, err, tt.want)
		}
	}
	for _, spec := range []string{"ops", "bad", ":", "dev:nogroup", "-1", "4294967296"} {
		if a, err := lookupAccount(dir, spec); err == nil {
			t.Errorf("%q gives %v", spec, a)
		}
	}
}

func TestOutput_that_is_made_smaller_keeps_its_end(t *testing.T) {
	o := newOutput(64<<10, false)
	o.detach(kept)
	var all []byte
	for i := range 10_000 {
		line := fmt.Appendf(nil, "line %d\n", i)
		o.Write(i%2 == 0, line)
		all = append(all, line...)
	}
	for _, limit := range []int{64 << 10, 4096, 100, 8192} {
		o.Resize(limit)
		p := make([]byte, 128<<10)
		n, at, end := o.Look(0, p)
		want := all[len(all)-min(limit, n):]
		if end != uint64(len(all)) || at+uint64(n) != end || n > limit || !bytes.Equal(p[:n], want) {
			t.Fatalf("with %d bytes: %d from %d of %d, which are not its end", limit, n, at, end)
		}
		o.Write(false, []byte("more\n"))
		all = append(all, "more\n"...)
	}
	// A part from the middle.
	o.Resize(4096)
	end := uint64(len(all))
	p := make([]byte, 3)
	if n, at, _ := o.Look(end-4, p); n != 3 || at != end-4 || string(p) != "ore" {
		t.Errorf("a part: %q from %d", p[:n], at)
	}
}
