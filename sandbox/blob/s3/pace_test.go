package s3

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/minio/minio-go/v7/pkg/credentials"
)

func TestPace_sends_bodies_one_after_the_other_at_its_rate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, begun := newPace(2), time.Now()
		var ends atomic.Int64
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				if err := p.turn(t.Context(), 1<<20); err != nil {
					t.Error(err)
				}
				n, err := io.Copy(io.Discard, p.reader(t.Context(), bytes.NewReader(make([]byte, 1<<20))))
				if n != 1<<20 || err != nil {
					t.Errorf("%d bytes, %v", n, err)
				}
				ends.Add(int64(time.Since(begun)))
			})
		}
		wg.Wait()
		// A body of a MiB takes half a second: they end after 0.5, 1, 1.5 and 2.
		if mean := time.Duration(ends.Load() / 4); mean < 1200*time.Millisecond || mean > 1250*time.Millisecond {
			t.Errorf("they end after %v on average", mean)
		}
		p.charge(2 << 20)
		if err := p.turn(t.Context(), 1); err != nil || time.Since(begun) < 3*time.Second {
			t.Errorf("after two MiB more it is the next one's turn after %v, %v", time.Since(begun), err)
		}
	})
}

func TestPace_ends_with_the_context(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPace(1)
		p.charge(1 << 30)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := p.turn(ctx, 1); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a turn ends with %v", err)
		}
		if n, err := io.Copy(io.Discard, p.reader(ctx, bytes.NewReader(make([]byte, 1<<20)))); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a body ends after %d bytes with %v", n, err)
		}
	})
}

// Each body is sent twice, since the first connection breaks. Both times count, and what arrives is whole.
func TestStore_with_a_bound_sends_and_reads_what_others_do(t *testing.T) {
	var tries atomic.Int64
	bodies := map[string][]byte{} // guarded by mu
	var mu sync.Mutex
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPut {
			if tries.Add(1)%2 == 1 {
				_, _ = io.CopyN(io.Discard, r.Body, 100_000)
				panic(http.ErrAbortHandler)
			}
			body, err := io.ReadAll(r.Body)
			if err != nil {
				panic(http.ErrAbortHandler)
			}
			if sum := sha256.Sum256(body); r.Header.Get("X-Amz-Content-Sha256") != hex.EncodeToString(sum[:]) {
				t.Errorf("the body has another hash than %q", r.Header.Get("X-Amz-Content-Sha256"))
			}
			mu.Lock()
			defer mu.Unlock()
			bodies[r.URL.Path] = body
			w.Header().Set("ETag", `"1"`)
			return
		}
		mu.Lock()
		defer mu.Unlock()
		http.ServeContent(w, r, "", time.Unix(1e9, 0), bytes.NewReader(bodies[r.URL.Path]))
	}))
	defer server.Close()
	s, err := Open(Options{Endpoint: server.URL, Region: "r", Bucket: "bucket", PathStyle: true, Credentials: credentials.NewStaticV4("k", "s", ""), Tries: 1, Upload: 8, Download: 8})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	begun, want := time.Now(), bytes.Repeat([]byte("drowse"), 100_000)
	for i := range 3 {
		key := fmt.Sprintf("o/%d", i)
		if err := s.Put(t.Context(), key, want); err != nil {
			t.Fatal(err)
		}
		if next := s.up.next.Sub(begun); i == 0 && next < s.up.takes(2*len(want)) {
			t.Errorf("the next body may begin after %v, want %v at least", next, s.up.takes(2*len(want)))
		}
		got := make([]byte, len(want)-7)
		if err := s.ReadAt(t.Context(), key, got, 7); err != nil || !bytes.Equal(got, want[7:]) {
			t.Errorf("%s has other bytes, %v", key, err)
		}
	}
}
